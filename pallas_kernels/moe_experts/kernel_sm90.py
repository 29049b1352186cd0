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

from pallas_kernels.moe_experts.pack import WORDS, PackedExperts
from pallas_kernels.moe_experts.plan import Plan
from pallas_kernels.moe_experts.ptx import fragment_product
from pallas_kernels.moe_experts.tiles import STEP_COLUMNS


def gate_up(
    x: jax.Array,
    plan: Plan,
    w13: PackedExperts,
    warps: int,
    gate_softcap: float,
    up_softcap: float,
) -> jax.Array:
    """[T, D] -> activations [T * k, I] of every planned slot; the other rows stay unwritten."""
    slots = plan.order.shape[0]
    inner = w13.shape[1] // 2
    k = slots // x.shape[0]

    def finish(sums, row, slot, keep, out):
        gate, up = sums
        act = gate_softcap * jnp.tanh(gate / gate_softcap) * jax.nn.sigmoid(gate)
        act = act * (up_softcap * jnp.tanh(up / up_softcap))
        plt.store(out.at[slot, row], act.astype(x.dtype), mask=keep)

    return _projection(x, plan, w13, (), warps, k, finish, (slots, inner), x.dtype)


def down(h: jax.Array, weights: jax.Array, plan: Plan, w2: PackedExperts, warps: int) -> jax.Array:
    """[T * k, I] -> float32 [T * k, D], each planned slot times its weight."""
    slots, rows = h.shape[0], w2.shape[1]

    def finish(sums, row, slot, keep, out):
        first = (row // 16) * 32 + row % 16
        for fragment, s in enumerate(sums):
            plt.store(out.at[slot, first + 16 * fragment], s, mask=keep)

    factors = (weights.reshape(slots),)
    return _projection(h, plan, w2, factors, warps, 1, finish, (slots, rows), jnp.float32)


def _projection(x, plan, w, factors, warps, k, finish, shape, dtype):
    scales = () if w.scales is None else (w.scales,)
    body = functools.partial(_body, x.shape, w.format, w.words.shape[2], warps, k, finish)
    return pl.pallas_call(
        body,
        grid=(w.words.shape[1], plan.count.shape[0]),
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        name="moe_experts_" + w.format,
    )(*plan, x.reshape(-1), w.outer, w.words, *scales, *factors)


def _body(x_shape, format, steps, warps, k, finish, expert, start, count, order, x, outer, words,
          *rest):  # fmt: skip
    scales, rest = (None, rest) if format == "bfloat16" else (rest[0], rest[1:])
    *factors, out = rest
    tile, item = pl.program_id(0), pl.program_id(1)
    e, first, n = expert[item], start[item], count[item]

    @pl.when(n > 0)
    def _():
        # What the end needs is loaded now, so that nothing waits for it there. Accumulator i of
        # lane 4g + t is of row g + 8 (i / 2), token 2t + i % 2.
        word = jnp.arange(WORDS, dtype=jnp.int32)
        token = lax.rem(lax.div(word, 4), 4) * 2 + lax.rem(word, 2)
        keep = token < n
        # Past the end where not kept: the interpreter stores masked elements too, unchanged.
        slot = plt.load(order.at[first + token], mask=keep, other=order.shape[0])
        factor = outer[e]
        for ref in factors:
            factor *= plt.load(ref.at[slot], mask=keep, other=0)

        place = jnp.arange(warps * WORDS, dtype=jnp.int32)
        warp, word = lax.div(place, WORDS), lax.rem(place, WORDS)
        # Lanes without a row of their own repeat the last one: a column of an MMA never mixes with
        # another, and theirs are not stored.
        row = order[first + jnp.minimum(lax.div(word, 16), n - 1)]
        row = lax.div(row, k) * x_shape[1]
        column = lax.rem(lax.div(word, 4), 4) * 16 + lax.rem(word, 4)
        acts = row + column
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
        sums = [s.reshape(warps, WORDS).sum(axis=0) * factor for s in sums]
        word = jnp.arange(WORDS, dtype=jnp.int32)
        row = tile * 16 + lax.div(word, 16) + lax.rem(lax.div(word, 2), 2) * 8
        finish(sums, row, slot, keep, out)


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
