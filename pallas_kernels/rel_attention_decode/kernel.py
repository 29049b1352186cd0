"""Split-KV decode attention in Pallas-Triton: a kernel over the keys and one that combines.

A program of the first kernel takes the query heads of one KV head, for all new tokens, as the rows
of one tile, so that keys and values are read once. Split s takes key blocks s, s + n, s + 2n, ...:
the few blocks near the query, which alone need the bias, are spread evenly.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.launch import launch_next
from pallas_kernels.rel_attention_decode.tiles import TileConfig

_LOG2E = math.log2(math.e)
_HIDDEN = -1e30  # a masked score: finite, so that a fully masked tile makes no NaN


def split_attention(q, r, k, v, proj, start, lengths, window, tiles: TileConfig, interpret):
    """Returns normalised partial outputs [B, K, n, rows, d] and their log2 sums [B, K, n, rows].

    A split without keys leaves its output unwritten and gives -inf.
    """
    batch, tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    rows = tile_rows(tokens, group)
    split = (batch, kv_heads, tiles.splits, rows)
    body = functools.partial(_split_body, window, tiles, k.shape[1], interpret)
    return pl.pallas_call(
        body,
        grid=(kv_heads, tiles.splits, batch),
        out_shape=[
            jax.ShapeDtypeStruct((*split, dim), jnp.float32),
            jax.ShapeDtypeStruct(split, jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="rel_attention_decode",
    )(
        q.reshape(batch, tokens, kv_heads, group, dim),
        r.reshape(batch, tokens, kv_heads, group, -1),
        k,
        v,
        proj,
        start,
        lengths,
    )


def tile_rows(tokens: int, group: int) -> int:
    """Rows of the query tile: a power of two that a matrix product takes."""
    return max(16, pl.next_power_of_2(tokens * group))


def _split_body(window, tiles, slots, interpret, q_ref, r_ref, k_ref, v_ref, proj_ref, start_ref,
                length_ref, out_ref, lse_ref):  # fmt: skip
    kv, split, row = (pl.program_id(axis) for axis in range(3))
    kv = launch_next(kv, interpret)
    _, tokens, _, group, dim = q_ref.shape
    ranks, extent = proj_ref.shape
    start = start_ref[row]
    end = start + length_ref[row]
    lowest = jnp.int32(0) if window is None else jnp.maximum(start - window + 1, 0)
    first = lax.div(lowest, tiles.keys)
    last = lax.div(end + tiles.keys - 1, tiles.keys)
    near = first if window else lax.div(jnp.maximum(start - extent + 1, 0), tiles.keys)

    def mine(stop):
        return jnp.maximum(lax.div(stop - first - split + tiles.splits - 1, tiles.splits), 0)

    blocks = jnp.where(length_ref[row] > 0, mine(last), 0)
    free_blocks = jnp.minimum(mine(near), blocks)
    line = jnp.arange(out_ref.shape[3], dtype=jnp.int32)
    token, head = lax.div(line, group), lax.rem(line, group)
    real = (token < tokens)[:, None]
    token = jnp.minimum(token, tokens - 1)
    lane = jnp.arange(dim, dtype=jnp.int32)[None, :]

    @pl.when(blocks == 0)
    def _():
        lse_ref[row, kv, split, :] = jnp.full(line.shape, -jnp.inf, jnp.float32)

    @pl.when(blocks > 0)
    def _():
        q = plt.load(q_ref.at[row, token[:, None], kv, head[:, None], lane], mask=real, other=0)
        rel = _spread_rel(r_ref, row, kv, token, head, real[:, 0], tokens, ranks)

        def attend(state, i, biased):
            peak, total, acc = state
            base = (first + split + i * tiles.splits) * tiles.keys
            position = base + jnp.arange(tiles.keys, dtype=jnp.int32)
            slot = position if window is None else lax.rem(position, slots)
            at = (row, slot[:, None], kv, lane)
            if biased:
                inside = ((position >= lowest) & (position < end))[:, None]
                key = plt.load(k_ref.at[at], mask=inside, other=0)
                value = plt.load(v_ref.at[at], mask=inside, other=0)
            else:  # far from the query: every key exists and is seen
                key, value = k_ref[at], v_ref[at]
            score = plt.dot(q, key, trans_b=True) * (_LOG2E / math.sqrt(dim))
            if biased:
                bias = plt.dot(rel, _near_proj(proj_ref, start, position, tokens))
                score = score + bias * _LOG2E
                distance = start + token[:, None] - position[None, :]
                seen = (distance >= 0) & (position < end)[None, :]
                if window is not None:
                    seen &= distance < window
                score = jnp.where(seen, score, _HIDDEN)
            new_peak = jnp.maximum(peak, score.max(axis=1))
            weight = jnp.exp2(score - new_peak[:, None])
            if biased:
                weight = jnp.where(seen, weight, 0.0)
            shrink = jnp.exp2(peak - new_peak)
            total = total * shrink + weight.sum(axis=1)
            acc = acc * shrink[:, None] + plt.dot(weight.astype(value.dtype), value)
            return new_peak, total, acc

        state = (
            jnp.full(line.shape, _HIDDEN, jnp.float32),
            jnp.zeros(line.shape, jnp.float32),
            jnp.zeros((line.shape[0], dim), jnp.float32),
        )
        if window is None:
            state = lax.fori_loop(0, free_blocks, lambda i, s: attend(s, i, False), state)
        state = lax.fori_loop(free_blocks, blocks, lambda i, s: attend(s, i, True), state)
        peak, total, acc = state
        some = total > 0
        total = jnp.where(some, total, 1.0)
        out_ref[row, kv, split, :, :] = acc / total[:, None]
        lse_ref[row, kv, split, :] = jnp.where(some, peak + jnp.log2(total), -jnp.inf)


def _spread_rel(r_ref, row, kv, token, head, real, tokens, ranks):
    """r of each line in its token's block of columns, zeros elsewhere: [rows, tokens * ranks].

    The tokens of a tile see a key at different distances; with one block of columns per token, one
    product with `_near_proj` gives every line its own shift of the table.
    """
    column = jnp.arange(pl.next_power_of_2(tokens) * ranks, dtype=jnp.int32)
    mine = (lax.div(column, ranks)[None, :] == token[:, None]) & real[:, None]
    at = r_ref.at[row, token[:, None], kv, head[:, None], lax.rem(column, ranks)[None, :]]
    return plt.load(at, mask=mine, other=0)


def _near_proj(proj_ref, start, position, tokens):
    """proj at each key's distance from each token: [tokens * ranks, keys], 0 beyond the extent."""
    ranks, extent = proj_ref.shape
    line = jnp.arange(pl.next_power_of_2(tokens) * ranks, dtype=jnp.int32)[:, None]
    distance = start + lax.div(line, ranks) - position[None, :]
    near = (distance >= 0) & (distance < extent)
    at = proj_ref.at[lax.rem(line, ranks), jnp.where(near, distance, 0)]
    return plt.load(at, mask=near, other=0)


def combine(partial_out, lse, sink, gate, lengths, dtype, interpret):
    """Joins the splits, the sink and the output gate: [B, T, H, d] in `dtype`."""
    batch, tokens, heads, _ = gate.shape
    kv_heads = partial_out.shape[1]
    return pl.pallas_call(
        functools.partial(_combine_body, heads // kv_heads, interpret),
        grid=(heads, tokens, batch),
        out_shape=jax.ShapeDtypeStruct(gate.shape, dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="rel_attention_combine",
    )(partial_out, lse, sink, gate, lengths)


def _combine_body(group, interpret, part_ref, lse_ref, sink_ref, gate_ref, length_ref, out_ref):
    head, token, row = (pl.program_id(axis) for axis in range(3))
    head = launch_next(head, interpret)
    kv, line = lax.div(head, group), token * group + lax.rem(head, group)
    splits = jnp.arange(part_ref.shape[2], dtype=jnp.int32)
    lse = lse_ref[row, kv, splits, line]
    sink = sink_ref[row, token, head].astype(jnp.float32) * _LOG2E
    peak = jnp.maximum(lse.max(), sink)
    weight = jnp.exp2(lse - peak)
    used = (weight > 0)[:, None]
    lane = jnp.arange(part_ref.shape[4], dtype=jnp.int32)[None, :]
    part = plt.load(part_ref.at[row, kv, splits[:, None], line, lane], mask=used, other=0)
    total = weight.sum() + jnp.exp2(sink - peak)
    out = (part * weight[:, None]).sum(axis=0) / total
    out *= jax.nn.sigmoid(gate_ref[row, token, head, :].astype(jnp.float32))
    out_ref[row, token, head, :] = jnp.where(token < length_ref[row], out, 0).astype(out_ref.dtype)
