"""Prefill attention in Mosaic GPU: two warpgroups compute, one loads.

A program has 128 queries of a head; one warpgroup computes the even, the other the odd ones, and
they take turns at the tensor cores: one multiplies while the other is at its softmax. Keys are read
in tiles of 128 that end where the queries end, so that every program has the same few tiles with an
edge: those at the diagonal and the oldest, which come last. Tiles beyond the reach of the bias come
first. Behind the last tile of values comes the gate, whose place the output takes.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rel_attention_prefill.shear import (
    KEYS,
    LEAD,
    QUERIES,
    RANKS,
    products,
    skewed,
    table,
)

GROUPS = 2  # computing warpgroups
BLOCK = GROUPS * QUERIES  # queries of a program, as many as keys of a tile
ALIGN = 8  # a copy starts at a multiple, as shared memory is tiled by so many lines
STAGES = 2
_LOG2E = math.log2(math.e)
_HIDDEN = -1e30  # a masked score: finite, as the running maximum starts at the sink


def run(q, r, k, v, proj, sink, gate, first, lowest, count, window, interpret=None):
    """Returns the gated outputs, [B, T, H, d].

    Args:
      q, r, sink, gate: of T queries, a multiple of BLOCK.
      k, v: [B, S, K, d] in the order of positions.
      first, lowest, count: [B], index of query 0's own key, of the oldest key, and of queries.
    """
    batch, tokens, heads, dim = q.shape
    blocks = tokens // BLOCK
    lines = table(proj, tiles_within(proj.shape[1] + ALIGN - 1))

    def paired(x):  # even and odd queries apart
        return x.reshape(batch, tokens // 2, 2, *x.shape[2:])

    sink = sink.reshape(batch, blocks, QUERIES, GROUPS, heads)
    sink = sink.transpose(0, 4, 1, 3, 2).astype(jnp.float32)
    tile = plgpu.SMEM((STAGES, KEYS, dim), q.dtype)
    out = plgpu.kernel(
        functools.partial(_body, blocks, heads // k.shape[2], window, proj.shape[1]),
        out_type=jax.ShapeDtypeStruct(paired(q).shape, q.dtype),
        grid=(heads, blocks, batch),
        grid_names=("head", "block", "row"),
        num_threads=GROUPS + 1,
        thread_name="group",
        scratch_types={
            "q": plgpu.SMEM((GROUPS, QUERIES, dim), q.dtype),
            "r": plgpu.SMEM((GROUPS, QUERIES, RANKS), q.dtype),
            "k": tile,
            "v": tile,
            "lines": plgpu.SMEM(lines.shape, q.dtype),
            "q_came": plgpu.Barrier(num_arrivals=2, num_barriers=GROUPS),  # with r
            "k_came": plgpu.Barrier(num_barriers=STAGES),
            "v_came": plgpu.Barrier(num_barriers=STAGES),
            "gate_came": plgpu.Barrier(num_arrivals=GROUPS),
            "lines_came": plgpu.Barrier(),
            "k_free": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
            "v_free": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
            "turn": plgpu.Barrier(num_arrivals=GROUPS),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="rel_attention_prefill",
        interpret=interpret,
    )(paired(q), paired(r), k, v, lines, sink, paired(gate), first, lowest, count)
    return out.reshape(q.shape)


def tiles_within(reach: int) -> int:
    """Tiles, from the diagonal on, in which a block has distances below `reach`."""
    return (reach + BLOCK - 2) // KEYS + 1


def _body(blocks, share, window, extent, q_ref, r_ref, k_ref, v_ref, lines_ref, sink_ref,
          gate_ref, first_ref, lowest_ref, count_ref, out_ref, *, q, r, k, v, lines, q_came, k_came,
          v_came, gate_came, lines_came, k_free, v_free, turn):  # fmt: skip
    dim = q.shape[2]
    head, row, group = (lax.axis_index(name) for name in ("head", "row", "group"))
    block = blocks - 1 - lax.axis_index("block")  # the longest work first
    count, lowest = count_ref[row], lowest_ref[row]
    begin = first_ref[row] + BLOCK * block  # the key of the block's first query
    over = -begin & (ALIGN - 1)  # copies start at multiples of ALIGN
    tiles = 1 + lax.div(begin + over - lowest + KEYS - 1, KEYS)
    near = 1 + lax.div(extent + over + BLOCK - 2, KEYS)  # tiles with a bias
    edges = 3  # without an edge are all tiles but those on the diagonal and the oldest
    if window is not None:
        tiles, edges = jnp.minimum(tiles, tiles_within(window)), 2
    tiles = jnp.where(BLOCK * block < count, tiles, 0)
    pairs = pl.ds(pl.multiple_of(QUERIES * block, QUERIES), QUERIES)
    gate_slot = lax.rem(tiles, STAGES)

    def tile_at(step):  # its first key: from the second oldest on, the oldest last
        tile = jnp.where(step < tiles - 1, tiles - 2 - step, tiles - 1)
        return begin + over - KEYS * tile

    @pl.when(group < GROUPS)
    def _():
        plgpu.set_max_registers(240, action="increase")
        peak = _LOG2E * plgpu.load(
            sink_ref.at[row, head, block, group],
            layout=plgpu.Layout.WGMMA.reduce(1),
            optimized=False,
        )
        total = jnp.ones_like(peak)
        acc = plgpu.layout_cast(jnp.zeros((QUERIES, dim), jnp.float32), plgpu.Layout.WGMMA)
        plgpu.barrier_wait(q_came.at[group])
        rel = plgpu.load(r.at[group], layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.barrier_wait(lines_came)

        def take_turns():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def attend(step, state, biased, edge):
            acc, peak, total = state
            slot, key = lax.rem(step, STAGES), tile_at(step)
            came = jnp.maximum(key, 0)
            if biased:  # while the tensor cores are free of wgmma, which mma waits for
                farthest = (lines.shape[0] - 3) * KEYS
                distance = jnp.minimum(begin - came, farthest) + group
                p = products(lines, rel, farthest + KEYS - 1 - LEAD - distance)
            plgpu.barrier_wait(k_came.at[slot])

            def multiply(ref):
                plgpu.wgmma(ref, q.at[group], k.at[slot].transpose((1, 0)))
                plgpu.barrier_arrive(turn)
                bias = skewed(p) if biased else None
                plgpu.barrier_wait(turn)
                return ref[...], bias

            shape = (QUERIES, KEYS)
            score, bias = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
            plgpu.barrier_arrive(k_free.at[slot])
            if biased:
                score += bias.astype(jnp.float32) * math.sqrt(dim)
            if edge:
                oldest = jnp.maximum(lowest, came) - begin
                seen = _seen(group, came - begin, oldest, key + KEYS - begin, window)
                score = jnp.where(seen, score, _HIDDEN)
            scale = _LOG2E / math.sqrt(dim)
            top = jnp.maximum(peak, score.max(axis=1) * scale)
            weight = jnp.exp2(score * scale - lax.broadcast_in_dim(top, score.shape, [0]))
            shrink = jnp.exp2(peak - top)
            acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
            total = total * shrink + weight.sum(axis=1)
            weight = weight.astype(q.dtype)
            acc, total, top, weight = lax.optimization_barrier((acc, total, top, weight))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_came.at[slot])
            if edge:
                real = lowest - came, first_ref[row] + count - came
                pl.when((real[0] > 0) | (real[1] < KEYS))(lambda: _clear(v.at[slot], *real))
            plgpu.barrier_wait(turn)
            acc = accumulate(acc, weight, v.at[slot])
            plgpu.barrier_arrive(v_free.at[slot])
            return acc, top, total

        def loop(begin, end, state, **kind):
            return lax.fori_loop(begin, end, lambda i, s: attend(i, s, **kind), state)

        pl.when(group == 1)(take_turns)
        state = (acc, peak, total)
        inner = jnp.maximum(tiles - edges, 0)
        far = jnp.clip(tiles - 1 - near, 0, inner)
        if window is None or window > extent:
            state = loop(0, far, state, biased=False, edge=False)
        state = loop(far, inner, state, biased=True, edge=False)
        acc, peak, total = loop(inner, tiles, state, biased=True, edge=True)
        pl.when(group == 0)(take_turns)

        mine = v.at[gate_slot, pl.ds(pl.multiple_of(QUERIES * group, QUERIES), QUERIES)]
        plgpu.barrier_wait(gate_came)
        gate = plgpu.load(mine, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        out = acc / lax.broadcast_in_dim(total, acc.shape, [0]) / (1 + jnp.exp2(-_LOG2E * gate))
        line = plgpu.broadcasted_iota(jnp.int32, acc.shape, 0, layout=plgpu.Layout.WGMMA)
        valid = BLOCK * block + GROUPS * line + group < count
        mine[...] = jnp.where(valid, out, 0).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine, out_ref.at[row, pairs, group, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(v_free.at[gate_slot])

    @pl.when(group == GROUPS)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        for g in range(GROUPS):
            at = (row, pairs, g, head)
            plgpu.copy_gmem_to_smem(q_ref.at[at], q.at[g], q_came.at[g])
            plgpu.copy_gmem_to_smem(r_ref.at[at], r.at[g], q_came.at[g])
        plgpu.copy_gmem_to_smem(lines_ref, lines, lines_came)

        def make_room(step, free):  # waits until the slot's tile of before has been read
            pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(free.at[lax.rem(step, STAGES)]))

        @pl.loop(0, tiles)
        def _(step):
            keys = pl.ds(pl.multiple_of(jnp.maximum(tile_at(step), 0), ALIGN), KEYS)
            at, slot = (row, keys, lax.div(head, share)), lax.rem(step, STAGES)
            make_room(step, k_free)
            plgpu.copy_gmem_to_smem(k_ref.at[at], k.at[slot], k_came.at[slot])
            make_room(step, v_free)
            plgpu.copy_gmem_to_smem(v_ref.at[at], v.at[slot], v_came.at[slot])

        make_room(tiles, v_free)
        for g in range(GROUPS):
            place = v.at[gate_slot, pl.ds(QUERIES * g, QUERIES)]
            plgpu.copy_gmem_to_smem(gate_ref.at[row, pairs, g, head], place, gate_came)
        for step in range(STAGES):  # nothing is loaded any more
            make_room(tiles + step, k_free)
            make_room(tiles + 1 + step, v_free)


def accumulate(acc, weight, values):
    """acc + weight · values in registers."""
    add = pl.run_state(lambda ref: plgpu.wgmma(ref, weight, values))
    return add(plgpu.WGMMAAccumulatorRef.init(acc))


def _seen(group, key, oldest, end, window):
    """Which of the 128 keys from `key` on each query sees, of `oldest` to `end`."""
    line = plgpu.broadcasted_iota(jnp.int32, (QUERIES,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    query = GROUPS * line + group
    last = jnp.minimum(query, end - 1) - key
    oldest = oldest if window is None else jnp.maximum(query - window + 1, oldest)
    shape = (QUERIES, KEYS)
    first, last = (
        lax.broadcast_in_dim(jnp.broadcast_to(x, (QUERIES,)), shape, [0])
        for x in (oldest - key, last)
    )
    at = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    return (at >= first) & (at <= last)


def _clear(values, begin, end):
    """Zeros the lines but those from `begin` to `end`, as they may hold anything."""
    for first in range(0, KEYS, QUERIES):
        lines = pl.ds(first, QUERIES)
        kept = plgpu.load(values.at[lines], layout=plgpu.Layout.WGMMA)
        line = plgpu.broadcasted_iota(jnp.int32, kept.shape, 0, layout=plgpu.Layout.WGMMA)
        real = (line >= begin - first) & (line < end - first)
        values[lines] = jnp.where(real, kept, jnp.zeros_like(kept))
    plgpu.commit_smem()
