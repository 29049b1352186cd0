"""`moe_experts` of NVFP4 written in Triton and called through jax-triton: what Pallas is judged by.

The same cut, the same loads and the same PTX as `pallas_kernels/moe_experts/kernel_sm90.py`; only
who turns them into a kernel differs.
"""

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl

from pallas_kernels.moe_experts import PackedExperts, Plan, tiles
from pallas_kernels.moe_experts.ptx import fragment_product


@triton.jit
def _projection(
    expert,
    start,
    count,
    order,
    x,
    outer,
    words,
    scales,
    weight,
    out,
    K: tl.constexpr,  # slots that share a row of x
    WIDTH: tl.constexpr,  # of x
    ROWS: tl.constexpr,  # of the result
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    WARPS: tl.constexpr,
    FIRST: tl.constexpr,  # PTX of the two fragments
    SECOND: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    GATE_CAP: tl.constexpr,  # None where rows are no gates
    UP_CAP: tl.constexpr,
):
    """A program owns 32 rows of one work item's expert, as in Pallas."""
    tile = tl.program_id(0)
    item = tl.program_id(1)
    n = tl.load(count + item)
    e = tl.load(expert + item)
    first = tl.load(start + item)
    if n > 0:
        place = tl.arange(0, 128 * WARPS)
        warp = place // 128
        word = place % 128
        row = tl.load(order + first + tl.minimum(word // 16, n - 1)) // K
        acts = row * WIDTH + word // 4 % 4 * 16 + word % 4
        one = tl.zeros([128 * WARPS], tl.float32)
        two = one
        for s in tl.static_range((STEPS + WARPS - 1) // WARPS):
            step = s * WARPS + warp
            beyond = step >= STEPS
            step = tl.minimum(step, STEPS - 1)
            index = acts + step * 64
            b0 = tl.load(x + tl.max_contiguous(tl.multiple_of(index, 4), 4))
            b1 = tl.load(x + tl.max_contiguous(tl.multiple_of(index + 4, 4), 4))
            b2 = tl.load(x + tl.max_contiguous(tl.multiple_of(index + 8, 4), 4))
            b3 = tl.load(x + tl.max_contiguous(tl.multiple_of(index + 12, 4), 4))
            at = (e * TILES + tile) * STEPS + step
            scale = tl.load(scales + at * 128 + word)
            a = _load_words(words + at * 256 + word, beyond, STEPS % WARPS == 0)
            one = tl.inline_asm_elementwise(
                FIRST, CONSTRAINTS, [a, scale, b0, b1, b2, b3, one], tl.float32, True, 4
            )
            a = _load_words(words + at * 256 + 128 + word, beyond, STEPS % WARPS == 0)
            two = tl.inline_asm_elementwise(
                SECOND, CONSTRAINTS, [a, scale, b0, b1, b2, b3, two], tl.float32, True, 4
            )
        one = tl.reshape(one, [WARPS, 128]).sum(0)
        two = tl.reshape(two, [WARPS, 128]).sum(0)
        word = tl.arange(0, 128)
        token = word // 4 % 4 * 2 + word % 2
        row = tile * 16 + word // 16 + word // 2 % 2 * 8
        keep = token < n
        slot = tl.load(order + first + token, mask=keep, other=0)
        factor = tl.load(outer + e)
        if GATE_CAP is None:
            factor *= tl.load(weight + slot, mask=keep, other=0.0)
            at = out + slot * ROWS + row // 16 * 32 + row % 16
            tl.store(at, one * factor, mask=keep)
            tl.store(at + 16, two * factor, mask=keep)
        else:
            one *= factor
            act = _softcap(one, GATE_CAP) * tl.sigmoid(one) * _softcap(two * factor, UP_CAP)
            tl.store(out + slot * ROWS + row, act.to(tl.bfloat16), mask=keep)


@triton.jit
def _load_words(at, beyond, whole: tl.constexpr):
    """Weights of a step, zeros beyond the last."""
    if whole:
        return tl.load(at)
    else:
        return tl.load(at, mask=~beyond, other=0)


@triton.jit
def _softcap(x, c: tl.constexpr):
    """c tanh(x / c); Triton has no tanh of its own."""
    return c * (2 * tl.sigmoid(x * (2 / c)) - 1)


def moe_experts_slots(
    x: jax.Array,
    weights: jax.Array,
    plan: Plan,
    w13: PackedExperts,
    w2: PackedExperts,
    *,
    gate_softcap: float,
    up_softcap: float,
) -> jax.Array:
    """Arguments and result as `pallas_kernels.moe_experts.moe_experts_slots`; NVFP4 only."""
    tokens, k = weights.shape
    caps = {"GATE_CAP": gate_softcap, "UP_CAP": up_softcap}
    weight = weights.reshape(-1)
    shape = jax.ShapeDtypeStruct((tokens * k, w2.columns), jnp.bfloat16)
    h = _call(x, weight, plan, w13, shape, K=k, **caps)
    shape = jax.ShapeDtypeStruct((tokens * k, w2.words.shape[1] * tiles.TILE_ROWS), jnp.float32)
    y = _call(h, weight, plan, w2, shape, K=1, GATE_CAP=None, UP_CAP=None)
    return y.reshape(tokens, k, -1)


def _call(x, weight, plan, w, shape, **options):
    _, count, steps, *_ = w.words.shape
    assert w.format == "nvfp4" and w.columns == steps * tiles.STEP_COLUMNS
    warps = tiles.choose_warps(count * tiles.TILE_ROWS, w.columns, plan.count.shape[0])
    (first, constraints), (second, _) = (fragment_product("nvfp4", i) for i in range(2))
    return jax_triton.triton_call(
        *plan,
        x,
        w.outer,
        w.words,
        w.scales,
        weight,
        kernel=_projection,
        out_shape=shape,
        grid=(count, plan.count.shape[0]),
        num_warps=warps,
        num_stages=1,
        WIDTH=x.shape[1],
        ROWS=shape.shape[1],
        TILES=count,
        STEPS=steps,
        WARPS=warps,
        FIRST=first,
        SECOND=second,
        CONSTRAINTS=constraints,
        **options,
    )
