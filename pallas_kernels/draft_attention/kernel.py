"""Draft attention in Pallas-Triton: one launch from projections to outputs of each split.

A program takes the query heads of one KV head, for all tokens of the block, as the rows of one
tile, so that keys and values are read once. Heads stay in halves, as the rotation has them: a score
is the sum of two products. Split s takes blocks s, s + n, s + 2n, … of the context's keys that
exist; the first one also takes the block's own.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

KEYS = 64  # of the context, in one step
_LOG2E = math.log2(math.e)
_HIDDEN = -1e30  # a masked score: finite, so that a fully masked tile makes no NaN


def split_attention(
    q, k, v, q_norm, k_norm, cos, sin, context, start, layer, eps, splits, interpret
):
    """Returns normalised outputs [B, K, n, rows, d] of each split and their log sums."""
    batch, tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    split = (batch, kv_heads, splits, tile_rows(tokens * (heads // kv_heads)))
    return pl.pallas_call(
        functools.partial(_body, layer, eps),
        grid=(kv_heads, splits, batch),
        out_shape=[
            jax.ShapeDtypeStruct((*split, dim), jnp.float32),
            jax.ShapeDtypeStruct(split, jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="draft_attention",
    )(q, k, v, q_norm, k_norm, cos, sin, context, start)


def tile_rows(rows: int) -> int:
    """Rows of a tile: a power of two that a matrix product takes."""
    return max(16, pl.next_power_of_2(rows))


def _body(layer, eps, q_ref, k_ref, v_ref, q_norm_ref, k_norm_ref, cos_ref, sin_ref, context_ref,
          start_ref, out_ref, sum_ref):  # fmt: skip
    kv, split, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    tokens, dim = q_ref.shape[1], q_ref.shape[3]
    group, splits, dtype = q_ref.shape[2] // k_ref.shape[2], out_ref.shape[2], context_ref.dtype
    start = start_ref[row]
    half = jnp.arange(dim // 2, dtype=jnp.int32)[None]
    lane = jnp.arange(dim, dtype=jnp.int32)[None]

    def ready(ref, norm_ref, token, head):
        """Both halves of a head at each token, normed and rotated."""
        token, head = jnp.minimum(token, tokens - 1)[:, None], head[:, None]
        a, b = ref[row, token, head, half], ref[row, token, head, half + dim // 2]
        scale = lax.rsqrt(((a * a).sum(axis=1) + (b * b).sum(axis=1)) / dim + eps)[:, None]
        a = a * scale * norm_ref[half].astype(jnp.float32)
        b = b * scale * norm_ref[half + dim // 2].astype(jnp.float32)
        cos, sin = cos_ref[row, token, half], sin_ref[row, token, half]
        return (a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype)

    line = jnp.arange(out_ref.shape[3], dtype=jnp.int32)
    queries = ready(q_ref, q_norm_ref, lax.div(line, group), kv * group + lax.rem(line, group))

    def meet(state, keys, value, seen):
        """Adds keys [keys, d/2] × 2 and their values to what the rows have attended to."""
        peak, total, acc = state
        pairs = zip(queries, keys, strict=True)
        score = sum(plt.dot(x, y, trans_b=True) for x, y in pairs) * (_LOG2E / math.sqrt(dim))
        score = jnp.where(seen[None], score, _HIDDEN)
        new_peak = jnp.maximum(peak, score.max(axis=1))
        weight = jnp.where(seen[None], jnp.exp2(score - new_peak[:, None]), 0.0)
        shrink = jnp.exp2(peak - new_peak)
        acc = acc * shrink[:, None] + plt.dot(weight.astype(dtype), value)
        return new_peak, total * shrink + weight.sum(axis=1), acc

    def of_context(i, state):
        slot = (split + i * splits) * KEYS + jnp.arange(KEYS, dtype=jnp.int32)
        seen = slot < start

        def load(part, lane):
            at = context_ref.at[row, slot[:, None], layer, part, kv, lane]
            return plt.load(at, mask=seen[:, None], other=0)

        return meet(state, (load(0, half), load(0, half + dim // 2)), load(1, lane), seen)

    state = (
        jnp.full(line.shape, _HIDDEN, jnp.float32),
        jnp.zeros(line.shape, jnp.float32),
        jnp.zeros((line.shape[0], dim), jnp.float32),
    )
    blocks = lax.div(start + KEYS - 1, KEYS)
    mine = lax.div(blocks - split + splits - 1, splits)
    state = lax.fori_loop(0, mine, of_context, state)

    token = jnp.arange(tile_rows(tokens), dtype=jnp.int32)
    own = ready(k_ref, k_norm_ref, token, jnp.full_like(token, kv))
    value = v_ref[row, jnp.minimum(token, tokens - 1)[:, None], kv, lane].astype(dtype)
    peak, total, acc = meet(state, own, value, (token < tokens) & (split == 0))
    some = total > 0
    total = jnp.where(some, total, 1.0)
    out_ref[row, kv, split, :, :] = acc / total[:, None]
    log_sum = (peak + jnp.log2(total)) / _LOG2E
    sum_ref[row, kv, split, :] = jnp.where(some, log_sum, -jnp.inf)
