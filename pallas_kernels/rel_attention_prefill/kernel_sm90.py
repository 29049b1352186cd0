"""Prefill attention in Mosaic GPU: two warpgroups compute, one loads.

A program has 128 queries of a head; one warpgroup computes the even, the other the odd ones, and
they take turns at the tensor cores: one multiplies while the other is at its softmax. Keys are read
in tiles of 128 that end where the queries end, so that every program has the same few tiles with an
edge: those at the diagonal and the oldest, which come last. Tiles beyond the reach of the bias come
first. Behind the last tile of values comes the gate, whose place the output takes.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rel_attention_prefill import tiles
from pallas_kernels.rel_attention_prefill.shear import (
    KEYS,
    LEAD,
    QUERIES,
    RANKS,
    products,
    skewed,
    table,
)
from pallas_kernels.rel_attention_prefill.tiles import ALIGN, BLOCK, GROUPS

STAGES = 2
_LOG2E = math.log2(math.e)
_HIDDEN = -1e30  # a masked score: finite, as the running maximum starts at the sink


class Operands(NamedTuple):
    """References to what the kernel reads; T = 2P queries, of which a program has 64 pairs.

    Attributes:
      q, gate: [B, P, 2, H, d].
      r: [B, P, 2, H, 16].
      k, v: [B, S, K, d].
      lines: the table of `shear.table`.
      sink: float32 [B, H, blocks, 2, 64].
      first, lowest, count: int32 [B], see `run`.
    """

    q: Any
    r: Any
    k: Any
    v: Any
    lines: Any
    sink: Any
    gate: Any
    first: Any
    lowest: Any
    count: Any


class Shared(NamedTuple):
    """Shared memory: queries and r of each warpgroup, the table, and rings of tiles."""

    q: Any
    r: Any
    lines: Any
    k: Any
    v: Any


class Barriers(NamedTuple):
    """What came to shared memory, which slots of the rings are free, and whose turn it is."""

    q_came: Any
    lines_came: Any
    k_came: Any
    v_came: Any
    gate_came: Any
    k_free: Any
    v_free: Any
    turn: Any


def run(q, r, k, v, proj, sink, gate, first, lowest, count, window, interpret=None):
    """Returns the gated outputs, [B, T, H, d].

    Args:
      q, r, sink, gate: of T queries, a multiple of BLOCK.
      k, v: [B, S, K, d] in the order of positions.
      first, lowest, count: [B], index of query 0's own key, of the oldest key, and of queries.
    """
    batch, tokens, heads, dim = q.shape
    blocks = tokens // BLOCK
    lines = table(proj, tiles.within(proj.shape[1] + ALIGN - 1))

    def paired(x):  # even and odd queries apart
        return x.reshape(batch, tokens // 2, 2, *x.shape[2:])

    sink = sink.reshape(batch, blocks, QUERIES, GROUPS, heads)
    sink = sink.transpose(0, 4, 1, 3, 2).astype(jnp.float32)
    tile = plgpu.SMEM((STAGES, KEYS, dim), q.dtype)
    came = plgpu.Barrier(num_barriers=STAGES)
    free = plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES)
    out = plgpu.kernel(
        functools.partial(_body, blocks=blocks, window=window, extent=proj.shape[1]),
        out_type=jax.ShapeDtypeStruct(paired(q).shape, q.dtype),
        grid=(heads, blocks, batch),
        grid_names=("head", "block", "row"),
        num_threads=GROUPS + 1,
        thread_name="group",
        scratch_types={
            "shared": Shared(
                q=plgpu.SMEM((GROUPS, QUERIES, dim), q.dtype),
                r=plgpu.SMEM((GROUPS, QUERIES, RANKS), q.dtype),
                lines=plgpu.SMEM(lines.shape, q.dtype),
                k=tile,
                v=tile,
            ),
            "barriers": Barriers(
                q_came=plgpu.Barrier(num_arrivals=2, num_barriers=GROUPS),  # with r
                lines_came=plgpu.Barrier(),
                k_came=came,
                v_came=came,
                gate_came=plgpu.Barrier(num_arrivals=GROUPS),
                k_free=free,
                v_free=free,
                turn=plgpu.Barrier(num_arrivals=GROUPS),
            ),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="rel_attention_prefill",
        interpret=interpret,
    )(*Operands(paired(q), paired(r), k, v, lines, sink, paired(gate), first, lowest, count))
    return out.reshape(q.shape)


def _body(*refs, shared, barriers, blocks, window, extent):
    given, out_ref = Operands(*refs[:-1]), refs[-1]
    row, group = lax.axis_index("row"), lax.axis_index("group")
    block = blocks - 1 - lax.axis_index("block")  # the longest work first
    first, lowest, count = given.first[row], given.lowest[row], given.count[row]
    work = tiles.cut(row, lax.axis_index("head"), block, first, lowest, count, window)

    @pl.when(group < GROUPS)
    def _():
        plgpu.set_max_registers(240, action="increase")
        _compute(given, out_ref, shared, barriers, work, group, window, extent)

    @pl.when(group == GROUPS)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        _load(given, shared, barriers, work)


def _load(given, shared, barriers, work):
    for group in range(GROUPS):
        at, came = work.queries(group), barriers.q_came.at[group]
        plgpu.copy_gmem_to_smem(given.q.at[at], shared.q.at[group], came)
        plgpu.copy_gmem_to_smem(given.r.at[at], shared.r.at[group], came)
    plgpu.copy_gmem_to_smem(given.lines, shared.lines, barriers.lines_came)
    share = given.q.shape[3] // given.k.shape[2]

    def make_room(step, free):  # waits until the slot's tile of before has been read
        pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(free.at[lax.rem(step, STAGES)]))

    @pl.loop(0, work.tiles)
    def _(step):
        keys = pl.ds(pl.multiple_of(work.came_at(step), ALIGN), KEYS)
        at, slot = (work.row, keys, lax.div(work.head, share)), lax.rem(step, STAGES)
        make_room(step, barriers.k_free)
        plgpu.copy_gmem_to_smem(given.k.at[at], shared.k.at[slot], barriers.k_came.at[slot])
        make_room(step, barriers.v_free)
        plgpu.copy_gmem_to_smem(given.v.at[at], shared.v.at[slot], barriers.v_came.at[slot])

    make_room(work.tiles, barriers.v_free)
    for group in range(GROUPS):
        place = shared.v.at[lax.rem(work.tiles, STAGES), pl.ds(QUERIES * group, QUERIES)]
        plgpu.copy_gmem_to_smem(given.gate.at[work.queries(group)], place, barriers.gate_came)
    for step in range(STAGES):  # nothing is loaded any more
        make_room(work.tiles + step, barriers.k_free)
        make_room(work.tiles + 1 + step, barriers.v_free)


def _compute(given, out_ref, shared, barriers, work, group, window, extent):
    dim, turn = shared.q.shape[2], barriers.turn
    peak = _LOG2E * plgpu.load(
        given.sink.at[work.row, work.head, work.block, group],
        layout=plgpu.Layout.WGMMA.reduce(1),
        optimized=False,
    )
    total = jnp.ones_like(peak)
    acc = plgpu.layout_cast(jnp.zeros((QUERIES, dim), jnp.float32), plgpu.Layout.WGMMA)
    plgpu.barrier_wait(barriers.q_came.at[group])
    rel = plgpu.load(shared.r.at[group], layout=plgpu.Layout.WGMMA, optimized=False)
    plgpu.barrier_wait(barriers.lines_came)

    def take_turns():
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def attend(step, state, biased, edge):
        acc, peak, total = state
        slot, came = lax.rem(step, STAGES), work.came_at(step)
        if biased:  # while the tensor cores are free of wgmma, which mma waits for
            farthest = (shared.lines.shape[0] - 3) * KEYS
            distance = jnp.minimum(work.begin - came, farthest) + group
            p = products(shared.lines, rel, farthest + KEYS - 1 - LEAD - distance)
        plgpu.barrier_wait(barriers.k_came.at[slot])

        def multiply(ref):
            plgpu.wgmma(ref, shared.q.at[group], shared.k.at[slot].transpose((1, 0)))
            plgpu.barrier_arrive(turn)
            bias = skewed(p) if biased else None
            plgpu.barrier_wait(turn)
            return ref[...], bias

        shape = (QUERIES, KEYS)
        score, bias = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        plgpu.barrier_arrive(barriers.k_free.at[slot])
        if biased:
            score += bias.astype(jnp.float32) * math.sqrt(dim)
        if edge:
            score = jnp.where(_seen(work, step, group, window), score, _HIDDEN)
        scale = _LOG2E / math.sqrt(dim)
        top = jnp.maximum(peak, score.max(axis=1) * scale)
        weight = jnp.exp2(score * scale - lax.broadcast_in_dim(top, score.shape, [0]))
        shrink = jnp.exp2(peak - top)
        acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
        total = total * shrink + weight.sum(axis=1)
        weight = weight.astype(given.v.dtype)
        acc, total, top, weight = lax.optimization_barrier((acc, total, top, weight))
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(barriers.v_came.at[slot])
        if edge:
            real = work.lowest - came, work.end - came
            clear = functools.partial(_clear, shared.v.at[slot], *real)
            pl.when((real[0] > 0) | (real[1] < KEYS))(clear)
        plgpu.barrier_wait(turn)
        acc = accumulate(acc, weight, shared.v.at[slot])
        plgpu.barrier_arrive(barriers.v_free.at[slot])
        return acc, top, total

    def loop(begin, end, state, **kind):
        return lax.fori_loop(begin, end, lambda step, s: attend(step, s, **kind), state)

    far, inner = work.loops(window, extent)
    pl.when(group == 1)(take_turns)
    state = acc, peak, total
    if window is None or window > extent:
        state = loop(0, far, state, biased=False, edge=False)
    state = loop(far, inner, state, biased=True, edge=False)
    acc, peak, total = loop(inner, work.tiles, state, biased=True, edge=True)
    pl.when(group == 0)(take_turns)

    slot = lax.rem(work.tiles, STAGES)
    mine = shared.v.at[slot, pl.ds(pl.multiple_of(QUERIES * group, QUERIES), QUERIES)]
    plgpu.barrier_wait(barriers.gate_came)
    gate = plgpu.load(mine, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    out = acc / lax.broadcast_in_dim(total, acc.shape, [0]) / (1 + jnp.exp2(-_LOG2E * gate))
    line = plgpu.broadcasted_iota(jnp.int32, acc.shape, 0, layout=plgpu.Layout.WGMMA)
    valid = work.begin + GROUPS * line + group < work.end
    mine[...] = jnp.where(valid, out, 0).astype(given.q.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(mine, out_ref.at[work.queries(group)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(barriers.v_free.at[slot])


def accumulate(acc, weight, values):
    """acc + weight · values in registers."""
    add = pl.run_state(lambda ref: plgpu.wgmma(ref, weight, values))
    return add(plgpu.WGMMAAccumulatorRef.init(acc))


def _seen(work, step, group, window):
    """Which keys of a step's tile each query of a warpgroup sees."""
    line = plgpu.broadcasted_iota(jnp.int32, (QUERIES,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    query, came = work.begin + GROUPS * line + group, work.came_at(step)
    # What a tile that begins later than it should has in common with the next one comes with that.
    last = jnp.minimum(query, work.key_at(step) + KEYS - 1) - came
    oldest = jnp.broadcast_to(work.lowest, query.shape)
    if window is not None:
        oldest = jnp.maximum(oldest, query - window + 1)
    shape = (QUERIES, KEYS)
    oldest, last = (lax.broadcast_in_dim(x, shape, [0]) for x in (oldest - came, last))
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    return (key >= oldest) & (key <= last)


def _clear(values, begin, end):
    """Zeros the lines but those from `begin` to `end`, as they may hold anything."""
    for first in range(0, KEYS, QUERIES):
        lines = pl.ds(first, QUERIES)
        kept = plgpu.load(values.at[lines], layout=plgpu.Layout.WGMMA)
        line = plgpu.broadcasted_iota(jnp.int32, kept.shape, 0, layout=plgpu.Layout.WGMMA)
        real = (line >= begin - first) & (line < end - first)
        values[lines] = jnp.where(real, kept, jnp.zeros_like(kept))
    plgpu.commit_smem()
