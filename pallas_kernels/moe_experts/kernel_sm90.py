"""Both projections as Pallas-Triton kernels around the MMA steps of `ptx.py` (Hopper and later).

One program owns 32 rows of one work item's expert; its warps share the columns and add up at the
end. Everything is one-dimensional with four elements per thread, so that element
`128 warp + 4 lane + i` is word i of a lane's 16-byte load and register i of its accumulators.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.launch import launch_next
from pallas_kernels.moe_experts.pack import WORDS, PackedExperts
from pallas_kernels.moe_experts.plan import Plan
from pallas_kernels.moe_experts.ptx import fragment_product
from pallas_kernels.moe_experts.tiles import STEP_COLUMNS

LANES = 32  # of a warp


def gate_up(
    x: jax.Array,
    plan: Plan,
    w13: PackedExperts,
    warps: int,
    gate_softcap: float,
    up_softcap: float,
) -> jax.Array:
    """[T, D] -> activations [T * k, I] of the plan's slots, in its order; others stay unwritten."""
    slots, tokens = plan.order.shape[0], x.shape[0]
    inner = w13.shape[1] // 2

    def row_of(place, order):
        return jnp.zeros_like(place) if tokens == 1 else lax.div(order[place], slots // tokens)

    def finish(sums, place, order, row, keep, outer, out):
        gate, up = (s * outer for s in sums)
        act = gate_softcap * jnp.tanh(gate / gate_softcap) * jax.nn.sigmoid(gate)
        act = act * (up_softcap * jnp.tanh(up / up_softcap))
        plt.store(out.at[place, row], act.astype(x.dtype), mask=keep)

    run = (tokens == 1, row_of, finish)
    return _projection(x, plan, w13, warps, run, (), (slots, inner), x.dtype)


def down(h: jax.Array, weights: jax.Array, plan: Plan, w2: PackedExperts, warps: int) -> jax.Array:
    """[T * k, I] in the plan's order -> float32 [T * k, D], each planned slot times its weight."""
    slots, rows = h.shape[0], w2.shape[1]

    def row_of(place, order):
        return place

    def finish(sums, place, order, row, keep, outer, out, weight):
        slot = plt.load(order.at[place], mask=keep, other=slots)
        scale = outer * plt.load(weight.at[slot], mask=keep, other=0.0)
        first = (row // 16) * 32 + row % 16
        for fragment, s in enumerate(sums):
            plt.store(out.at[slot, first + 16 * fragment], s * scale, mask=keep)

    run, extra = (weights.shape[0] == 1, row_of, finish), (weights.reshape(slots),)
    return _projection(h, plan, w2, warps, run, extra, (slots, rows), jnp.float32)


def _projection(x, plan, w, warps, run, extra, shape, dtype):
    grid = (w.words.shape[1], plan.count.shape[0])
    scales = () if w.scales is None else (w.scales,)
    body = functools.partial(_body, x.shape, w.format, w.words.shape[2], warps, *run)
    return pl.pallas_call(
        body,
        grid=grid,
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        name="moe_experts_" + w.format,
    )(*plan, x.reshape(-1), w.outer, w.words, *scales, *extra)


def _body(x_shape, format, steps, warps, one_token, row_of, finish, expert, start, count, order, x,
          outer, words, *rest):  # fmt: skip
    scales, rest = (None, rest) if format == "bfloat16" else (rest[0], rest[1:])
    *extra, out = rest
    program, item = pl.program_id(0), pl.program_id(1)
    e = expert[item]
    # One token's items are its picks, with nothing else to look up.
    n, first = (1, item) if one_token else (count[item], start[item])

    # All three are part of the condition, as otherwise two would be looked up behind it.
    @pl.when((e | first | (n - 1)) >= 0)
    def _():
        # Idle programs end at once, which lets the next launch begin as well.
        tile = launch_next(program, interpret=False)
        place = jnp.arange(warps * WORDS, dtype=jnp.int32)
        warp, word = lax.div(place, WORDS), lax.rem(place, WORDS)
        # Lanes without a row of their own repeat the last one: a column of an MMA never mixes with
        # another, and theirs are not stored.
        lane = 0 if one_token else jnp.minimum(lax.div(word, 16), n - 1)
        row = row_of(jnp.full_like(word, first) + lane, order)
        column = lax.rem(lax.div(word, 4), 4) * 16 + lax.rem(word, 4)
        acts = row * x_shape[1] + column
        sums = [jnp.zeros(place.shape, jnp.float32)] * 2
        # Unrolled: rolled loops and prefetching by hand both measured slower.
        for s in range(pl.cdiv(steps, warps)):
            step = s * warps + warp
            whole = (s + 1) * warps <= steps
            mask, other = (None, None) if whole else (step < steps, 0)  # zeros beyond the last
            step = step if whole else jnp.minimum(step, steps - 1)
            b = [_load_acts(x, acts, step, j, x_shape[1], steps) for j in range(4)]
            scale = [] if scales is None else [_load_scales(scales, e, tile, step, word)]
            for fragment in range(2):
                a = [
                    plt.load(words.at[e, tile, step, fragment, load, word], mask=mask, other=other)
                    for load in range(words.shape[4])
                ]
                asm, constraints = fragment_product(format, fragment)
                [sums[fragment]] = plt.elementwise_inline_asm(
                    asm,
                    args=[*a, *scale, *b, sums[fragment]],
                    constraints=constraints,
                    pack=4,
                    result_shape_dtypes=[jax.ShapeDtypeStruct(place.shape, jnp.float32)],
                )
        if warps > 1:  # adding up one would go through shared memory all the same
            sums = [s.reshape(warps, WORDS).sum(axis=0) for s in sums]
        # One for each thread, so all of them twice where warps are eight: Triton would take fewer
        # in the layout of the sums, in which SwiGLU is every warp's work anew.
        copies = max(LANES * warps // WORDS, 1)
        sums = [jnp.broadcast_to(s, (copies, WORDS)).reshape(-1) for s in sums]
        # Accumulator i of lane 4g + t: row g + 8 (i / 2), token 2t + i % 2.
        word = lax.rem(jnp.arange(copies * WORDS, dtype=jnp.int32), WORDS)
        token = lax.rem(lax.div(word, 4), 4) * 2 + lax.rem(word, 2)
        row = tile * 16 + lax.div(word, 16) + lax.rem(lax.div(word, 2), 2) * 8
        keep = token < n
        # Past the end where not kept: the interpreter stores masked elements too, unchanged.
        place = jnp.where(keep, first + token, order.shape[0])
        # Loaded for each thread, which decides the layout.
        finish(sums, place, order, row, keep, outer[jnp.full_like(word, e)], out, *extra)


def _load_acts(x, acts, step, j, columns, steps):
    """Four neighbouring activations per lane: the B registers of MMA j."""
    index = acts + (step * STEP_COLUMNS + 4 * j)
    index = plt.max_contiguous(pl.multiple_of(index, 4), 4)
    if columns == steps * STEP_COLUMNS:
        return x[index]
    # A short last step: the weights there are zeros, the activations must be finite.
    lane = lax.rem(lax.div(jnp.arange(acts.shape[0], dtype=jnp.int32), 4), 4)
    keep = step * STEP_COLUMNS + lane * 16 + 4 * j < columns
    return plt.load(x.at[index], mask=keep, other=0)


def _load_scales(scales, e, tile, step, word):
    """A lane's four bytes; pairs of lanes share them where a block has 32 columns."""
    if scales.shape[3] == WORDS:
        return scales[e, tile, step, word]
    shared = lax.div(word, 8) * 4 + lax.rem(word, 4)
    return scales[e, tile, step, plt.max_contiguous(pl.multiple_of(shared, 4), 4)]
