"""`sampling.prefix_end` written in Triton and called through jax-triton: what Pallas is judged by.

The same cut, the same eleven launches and the same search as `pallas_kernels/sampling`, the reading
of the whole row and `tally.py` included; only who turns them into kernels differs. The files there
say why each step is right.
"""

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl

from pallas_kernels.sampling import tally, tiles

LOWEST = tl.constexpr(-(2**31))
BITS = tl.constexpr(tally.BITS)
VALUES = tl.constexpr(1 << tally.BITS)


@triton.jit
def _order_of(x, exists):
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(exists, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)


@triton.jit
def _value_of(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _bit(i):
    return tl.full([], 1, tl.int32) << i


@triton.jit
def _read(logits, row, token, V: tl.constexpr):
    """Logits as integers of the same order."""
    there = token < V
    return _order_of(tl.load(logits + row * V + token, mask=there, other=float("-inf")), there)


@triton.jit
def _total_mass(largest, sums, row, N: tl.constexpr, SPAN: tl.constexpr):
    """The largest logit, and Σ exp(logit - it)."""
    at = tl.arange(0, SPAN)
    each = tl.load(largest + row * N + at, mask=at < N, other=float("-inf"))
    top = tl.max(each, 0)
    mass = tl.load(sums + row * N + at, mask=at < N, other=0.0)
    return top, tl.sum(mass * tl.exp(each - top), 0)


@triton.jit
def _group(logits, largest, sums, V: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr,
           GROUPS: tl.constexpr):  # fmt: skip
    row = tl.program_id(1)
    at = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    token = at[:, None] * GROUP + tl.arange(0, GROUP)[None]
    value = tl.load(logits + row * V + token, mask=token < V, other=float("-inf"))
    most = tl.max(value, 1)
    finite = tl.maximum(most, -3.4028234663852886e38)  # -inf - -inf would be NaN
    total = tl.sum(tl.exp(value - finite[:, None]), 1)
    tl.store(largest + row * N + at, most, mask=at < N)
    tl.store(sums + row * N + at, total, mask=at < N)


@triton.jit
def _head(largest, head, floors, N: tl.constexpr, SPAN: tl.constexpr, HEAD: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, SPAN)
    rank = _read(largest, row, at, N)
    floor = tl.full([], LOWEST, tl.int32)
    for i in range(32):
        candidate = floor + _bit(31 - i)
        reached = tl.sum((rank >= candidate).to(tl.int32), 0) >= HEAD
        floor = tl.where(reached, candidate, floor)
    floor = tl.maximum(floor, LOWEST + 1)  # what is behind the last group is LOWEST
    floor += (tl.sum((rank >= floor).to(tl.int32), 0) > HEAD).to(tl.int32)
    reaches = (rank >= floor).to(tl.int32)
    place = tl.cumsum(reaches, 0) - 1
    rest = tl.arange(0, HEAD)
    tl.store(head + row * HEAD + place, at, mask=reaches > 0)
    tl.store(head + row * HEAD + rest, -1, mask=rest >= tl.sum(reaches, 0))
    tl.store(floors + row, floor)


@triton.jit
def _chosen(sums, known, above, row, target, CHUNKS: tl.constexpr, SPAN: tl.constexpr):
    """The known bits with the next ones: the largest that reach the target; and the sum above."""
    chunk = tl.arange(0, SPAN)[:, None]
    bits = VALUES - 1 - tl.arange(0, VALUES)  # falling
    at = sums + (row * CHUNKS + chunk) * VALUES + bits[None]
    each = tl.sum(tl.load(at, mask=chunk < CHUNKS, other=0.0), 0)
    larger = tl.load(above + row)
    found = tl.max(tl.where(larger + tl.cumsum(each, 0) >= target, bits, 0), 0)
    larger += tl.sum(tl.where(bits > found, each, 0.0), 0)
    return (tl.load(known + row) << BITS) + found, larger


@triton.jit
def _tally(logits, largest, sums, top_k, top_p, each_before, known_before, above_before,
           each, known, above, SHIFT: tl.constexpr, FIRST: tl.constexpr, V: tl.constexpr,
           N: tl.constexpr, SPAN: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
           CHUNKS_SPAN: tl.constexpr):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    p = tl.load(top_p + row)
    if (tl.load(top_k + row) >= V) & (p < 1):
        top, mass = _total_mass(largest, sums, row, N, SPAN)
        bits_known = tl.full([], 0, tl.int32)
        larger = tl.full([], 0.0, tl.float32)
        if not FIRST:
            target = tl.maximum(p, 1e-30) * mass
            bits_known, larger = _chosen(
                each_before, known_before, above_before, row, target, CHUNKS, CHUNKS_SPAN
            )
        tl.store(known + row, bits_known)  # all programs write the same
        tl.store(above + row, larger)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        rank = _read(logits, row, token, V)
        bits = (rank ^ LOWEST).to(tl.uint32, bitcast=True) >> SHIFT
        weight = tl.exp(_value_of(rank) - top)
        begins = token < V
        if not FIRST:
            begins &= bits >> BITS == bits_known.to(tl.uint32, bitcast=True)
        weight = tl.where(begins, weight, 0.0)
        for i in tl.static_range(VALUES):
            mass = tl.sum(tl.where(bits & (VALUES - 1) == i, weight, 0.0), 0)
            tl.store(each + (row * CHUNKS + chunk) * VALUES + i, mass)


@triton.jit
def _part(rank, least, top, COUNTS: tl.constexpr):
    """How many values reach `least`, or their mass."""
    if COUNTS:
        return tl.sum((rank >= least).to(tl.int32), 0)
    else:
        return tl.sum(tl.where(rank >= least, tl.exp(_value_of(rank) - top), 0.0), 0)


@triton.jit
def _total(held, least, top, enough, logits, row, COUNTS: tl.constexpr, V: tl.constexpr,
           CHUNK: tl.constexpr):  # fmt: skip
    """`_part` of the held values alone where these are `enough`."""
    total = _part(held, least, top, COUNTS)
    total = tl.where(enough, total, tl.zeros_like(total))
    for i in range(tl.where(enough, 0, (V + CHUNK - 1) // CHUNK)):
        token = i * CHUNK + tl.arange(0, CHUNK)
        total += _part(_read(logits, row, token, V), least, top, COUNTS)
    return total


@triton.jit
def _largest(held, target, needed, top, enough, logits, row, COUNTS: tl.constexpr,
             V: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The largest integer of which `_total` reaches the target; LOWEST where it is not needed."""
    found = tl.full([], LOWEST, tl.int32)
    for i in range(tl.where(needed, 32, 0)):
        candidate = found + _bit(31 - i)
        reached = _total(held, candidate, top, enough, logits, row, COUNTS, V, CHUNK) >= target
        found = tl.where(reached, candidate, found)
    return found


@triton.jit
def _search(logits, largest, sums, head, floors, each, known, above, top_k, top_p, values, ids,
            V: tl.constexpr, N: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
            HEAD: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
            CHUNKS_SPAN: tl.constexpr, ID_BITS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    floor = tl.load(floors + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    top, mass = _total_mass(largest, sums, row, N, SPAN)
    place = tl.arange(0, CHUNK)
    first = tl.load(head + row * HEAD + place // GROUP)
    held_token = tl.where(first < 0, V, first * GROUP + place % GROUP)
    held = _read(logits, row, held_token, V)

    # Where the values from `floor` on are not enough for k or p, neither are those from below it.
    k_cuts = k < V
    enough = (k >= V) | (_part(held, floor, top, True) >= k)
    last_k = _largest(held, k, k_cuts, top, enough, logits, row, True, V, CHUNK)
    ties_k = k - _total(held, last_k + 1, top, enough, logits, row, True, V, CHUNK)
    kept = _total(held, last_k + 1, top, enough, logits, row, False, V, CHUNK)
    kept += ties_k.to(tl.float32) * tl.exp(_value_of(last_k) - top)
    target = tl.maximum(p, 1e-30) * tl.where(k_cuts, kept, mass)

    alone = (k >= V) & (p < 1)
    p_cuts = (p < 1) & k_cuts
    enough = (p_cuts == 0) | (_part(held, floor, top, False) >= target)
    last_p = _largest(held, target, p_cuts, top, enough, logits, row, False, V, CHUNK)
    larger = _total(held, last_p + 1, top, enough, logits, row, False, V, CHUNK)
    bits, tallied = _chosen(each, known, above, row, target, CHUNKS, CHUNKS_SPAN)
    last_p = tl.where(alone, bits ^ LOWEST, last_p)
    weight = tl.exp(_value_of(last_p) - top)
    ties_p = tl.ceil((target - tl.where(alone, tallied, larger)) / weight)
    ties_p = tl.minimum(tl.maximum(ties_p, 1.0), V * 1.0).to(tl.int32)

    last = tl.maximum(last_k, last_p)
    ties = tl.where(last_p == last, ties_p, V)
    ties = tl.where(last_k == last, tl.minimum(ties, ties_k), ties)
    # Of the values equal to the last one kept, the `ties` lowest ids stay.
    cuts = last > LOWEST
    enough = (last == LOWEST) | (last >= floor) | alone
    chunk = tl.full([], 0, tl.int32)
    before = tl.full([], 0, tl.int32)
    for i in range(tl.where(enough, 0, CHUNKS)):
        rank = _read(logits, row, i * CHUNK + place, V)
        until = before + tl.sum((rank == last).to(tl.int32), 0)
        passed = (chunk == i) & (until < ties)
        chunk = tl.where(passed, i + 1, chunk)
        before = tl.where(passed, until, before)

    at = tl.arange(0, CHUNKS_SPAN)
    each += (row * CHUNKS + at) * VALUES + (bits & (VALUES - 1))
    mass = tl.load(each, mask=at < CHUNKS, other=0.0)
    count = (mass / tl.exp(_value_of(last) - top) + 0.5).to(tl.int32)
    behind = (tl.cumsum(count, 0) < ties).to(tl.int32)
    chunk = tl.where(alone, tl.sum(behind, 0), chunk)
    before = tl.where(alone, tl.sum(behind * count, 0), before)
    in_held = enough & (k_cuts | (p >= 1))
    token = chunk * CHUNK + place
    rank = tl.where(in_held, held, _read(logits, row, token, V))
    token = tl.where(in_held, held_token, token)
    back = tl.full([], 0, tl.int32)
    for i in range(tl.where(cuts, ID_BITS, 0)):
        candidate = back + _bit(ID_BITS - 1 - i)
        tied = tl.sum(((rank == last) & (V - 1 - token >= candidate)).to(tl.int32), 0)
        back = tl.where(tied >= ties - before, candidate, back)
    tl.store(values + row, tl.where(cuts, _value_of(last), float("-inf")))
    tl.store(ids + row, V - 1 - back)


def prefix_end(logits: jax.Array, top_k: jax.Array, top_p: jax.Array):
    """Arguments and result as `pallas_kernels.sampling.prefix_end`."""
    rows, vocabulary = logits.shape
    groups = triton.cdiv(vocabulary, tiles.GROUP)
    chunks = triton.cdiv(vocabulary, tiles.CHUNK)
    spans = {"N": groups, "SPAN": triton.next_power_of_2(groups)}
    cut = {"V": vocabulary, "CHUNK": tiles.CHUNK, "CHUNKS": chunks,
           "CHUNKS_SPAN": triton.next_power_of_2(chunks)} | spans  # fmt: skip
    floats, whole = (jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.float32, jnp.int32))
    largest, sums = jax_triton.triton_call(
        logits,
        kernel=_group,
        out_shape=[jax.ShapeDtypeStruct((rows, groups), jnp.float32)] * 2,
        grid=(triton.cdiv(groups, tiles.GROUPS), rows),
        num_warps=4,
        num_stages=1,
        V=vocabulary,
        N=groups,
        GROUP=tiles.GROUP,
        GROUPS=tiles.GROUPS,
    )
    head, floors = jax_triton.triton_call(
        largest,
        kernel=_head,
        out_shape=[jax.ShapeDtypeStruct((rows, tiles.HEAD), jnp.int32), whole],
        grid=(rows,),
        num_warps=8,
        num_stages=1,
        HEAD=tiles.HEAD,
        **spans,
    )
    tallied = [logits] * 3  # the first launch reads none of them
    for shift in range(32 - tally.BITS, -1, -tally.BITS):
        tallied = jax_triton.triton_call(
            *(logits, largest, sums, top_k, top_p, *tallied),
            kernel=_tally,
            out_shape=[
                jax.ShapeDtypeStruct((rows, chunks, 1 << tally.BITS), jnp.float32), whole, floats
            ],
            grid=(chunks, rows),
            num_warps=8,
            num_stages=1,
            SHIFT=shift,
            FIRST=shift == 32 - tally.BITS,
            **cut,
        )  # fmt: skip
    return tuple(
        jax_triton.triton_call(
            *(logits, largest, sums, head, floors, *tallied, top_k, top_p),
            kernel=_search,
            out_shape=[floats, whole],
            grid=(rows,),
            num_warps=tiles.WARPS,
            num_stages=1,
            GROUP=tiles.GROUP,
            HEAD=tiles.HEAD,
            ID_BITS=(vocabulary - 1).bit_length(),
            **cut,
        )
    )
