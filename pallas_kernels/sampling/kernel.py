"""The end of the kept tokens by three Pallas-Triton kernels; a boundary between them is a barrier.

Only few of a row's values can be the last one kept, and those with the largest values are found
through the largest of each group of neighbours: whatever is at least `floor`, the HEADth largest of
these, lies in the groups that reach it (a step more where equal ones are too many). One program
holds these in registers and finds each threshold bit by bit, as the plain version does. Where they
do not reach far enough (a large k, many equal values), the same search reads the whole row instead.

Where p alone cuts, `tally.py` has found its threshold before.

Floats are compared as integers of the same order.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.sampling.row import (
    LOWEST,
    load_row,
    mass_to_reach,
    only_p_cuts,
    order_of,
    store_row,
    total_mass,
    value_of,
)
from pallas_kernels.sampling.tally import chosen, chunk_of_tie
from pallas_kernels.sampling.tiles import CHUNK, GROUP, GROUPS, HEAD, WARPS


def group(logits: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """[B, V] -> of each group of neighbours the largest value, and Σ exp(value - largest)."""
    rows, vocabulary = logits.shape
    groups = pl.cdiv(vocabulary, GROUP)
    return pl.pallas_call(
        _group_body,
        grid=(pl.cdiv(groups, GROUPS), rows),
        out_shape=[jax.ShapeDtypeStruct((rows, groups), jnp.float32)] * 2,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="sampling_group",
    )(logits)


def _group_body(logit_ref, largest_ref, sum_ref):
    row = pl.program_id(1)
    at = pl.program_id(0) * GROUPS + jnp.arange(GROUPS, dtype=jnp.int32)
    token = at[:, None] * GROUP + jnp.arange(GROUP, dtype=jnp.int32)[None]
    value = load_row(logit_ref, row, token)
    largest = value.max(axis=1)
    finite = jnp.maximum(largest, jnp.finfo(jnp.float32).min)  # -inf - -inf would be NaN
    sums = jnp.exp(value - finite[:, None]).sum(axis=1)
    exists = at < largest_ref.shape[1]
    plt.store(largest_ref.at[row, at], largest, mask=exists)
    plt.store(sum_ref.at[row, at], sums, mask=exists)


def choose_head(largest: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """[B, groups] -> the groups that reach `floor` [B, HEAD], -1 for none; `floor` as integer [B].

    It is the HEADth largest of the groups, or the next integer where more than HEAD reach that.
    """
    rows = largest.shape[0]
    return pl.pallas_call(
        _head_body,
        grid=(rows,),
        out_shape=[
            jax.ShapeDtypeStruct((rows, HEAD), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        ],
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="sampling_head",
    )(largest)


def _head_body(largest_ref, head_ref, floor_ref):
    row, groups = pl.program_id(0), largest_ref.shape[1]
    at = jnp.arange(pl.next_power_of_2(groups), dtype=jnp.int32)
    rank = order_of(load_row(largest_ref, row, at), at < groups)

    def reaching(floor):
        return (rank >= floor).astype(jnp.int32)

    floor = _largest(lambda t: reaching(t).sum() >= HEAD, LOWEST, 32)
    floor = jnp.maximum(floor, LOWEST + 1)  # what is behind the last group is LOWEST
    floor += (reaching(floor).sum() > HEAD).astype(jnp.int32)
    reaches = reaching(floor)
    place = jnp.cumsum(reaches) - 1
    rest = jnp.arange(HEAD, dtype=jnp.int32)
    store_row(head_ref, row, place, at, reaches > 0)
    store_row(head_ref, row, rest, jnp.full((HEAD,), -1, jnp.int32), rest >= reaches.sum())
    floor_ref[row] = floor


def search(
    logits: jax.Array,
    largest: jax.Array,
    sums: jax.Array,
    head: jax.Array,
    floor: jax.Array,
    tallied: tuple,
    top_k: jax.Array,
    top_p: jax.Array,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Logit and id [B] of the last token kept."""
    rows = logits.shape[0]
    return pl.pallas_call(
        _search_body,
        grid=(rows,),
        out_shape=[
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        ],
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="sampling_search",
    )(logits, largest, sums, head, floor, *tallied, top_k, top_p)


def _search_body(logit_ref, largest_ref, sum_ref, head_ref, floor_ref, tally_ref, known_ref,
                 above_ref, k_ref, p_ref, value_ref, id_ref):  # fmt: skip
    row, vocabulary = pl.program_id(0), logit_ref.shape[1]
    floor, k, p = floor_ref[row], k_ref[row], p_ref[row]
    top, mass = total_mass(largest_ref, sum_ref, row)
    place = jnp.arange(CHUNK, dtype=jnp.int32)
    first = head_ref[row, lax.div(place, GROUP)]
    token = jnp.where(first < 0, vocabulary, first * GROUP + lax.rem(place, GROUP))
    held = (order_of(load_row(logit_ref, row, token), token < vocabulary), token)

    def read(i):
        token = i * CHUNK + place
        return order_of(load_row(logit_ref, row, token), token < vocabulary), token

    def chunks(enough):
        return jnp.where(enough, jnp.int32(0), jnp.int32(pl.cdiv(vocabulary, CHUNK)))

    def total(part, enough):
        """Sums part(ranks, tokens), over the held ones alone where these are `enough`."""
        inside = part(*held).sum()
        begin = jnp.where(enough, inside, jnp.zeros_like(inside))
        return lax.fori_loop(0, chunks(enough), lambda i, acc: acc + part(*read(i)).sum(), begin)

    def weight(rank):
        return jnp.exp(value_of(rank) - top)

    def counts(reached):
        return lambda rank, token: reached(rank, token).astype(jnp.int32)

    def masses(reached):
        return lambda rank, token: jnp.where(reached(rank), weight(rank), 0)

    # Where the values from `floor` on are not enough for k or p, neither are those from below it.
    k_cuts = k < vocabulary
    enough = ~k_cuts | (counts(lambda rank, _: rank >= floor)(*held).sum() >= k)
    last_k = _largest(
        lambda t: total(counts(lambda rank, _: rank >= t), enough) >= k, LOWEST, 32, k_cuts
    )
    ties_k = k - total(counts(lambda rank, _: rank > last_k), enough)
    kept = total(masses(lambda rank: rank > last_k), enough)
    kept += ties_k.astype(jnp.float32) * weight(last_k)
    target = mass_to_reach(p, jnp.where(k_cuts, kept, mass))

    alone = only_p_cuts(k, p, vocabulary)
    p_cuts = (p < 1) & ~alone
    enough = ~p_cuts | (masses(lambda rank: rank >= floor)(*held).sum() >= target)
    last_p = _largest(
        lambda t: total(masses(lambda rank: rank >= t), enough) >= target, LOWEST, 32, p_cuts
    )
    above = total(masses(lambda rank: rank > last_p), enough)
    bits, larger = chosen(tally_ref, known_ref, above_ref, row, target)
    last_p = jnp.where(alone, bits ^ LOWEST, last_p)
    ties_p = (target - jnp.where(alone, larger, above)) / weight(last_p)
    ties_p = jnp.clip(jnp.ceil(ties_p), 1, vocabulary).astype(jnp.int32)

    last = jnp.maximum(last_k, last_p)
    ties = jnp.where(last_p == last, ties_p, vocabulary)
    ties = jnp.where(last_k == last, jnp.minimum(ties, ties_k), ties)
    # Of the values equal to the last one kept, the `ties` lowest ids stay.
    cuts = last > LOWEST
    enough = ~cuts | (last >= floor) | alone

    def skip(i, state):
        chunk, before = state
        until = before + (read(i)[0] == last).astype(jnp.int32).sum()
        passed = (chunk == i) & (until < ties)
        return jnp.where(passed, i + 1, chunk), jnp.where(passed, until, before)

    chunk, before = lax.fori_loop(0, chunks(enough), skip, (jnp.int32(0), jnp.int32(0)))
    tallied = chunk_of_tie(tally_ref, row, bits, weight(last), ties)
    chunk, before = jnp.where(alone, tallied[0], chunk), jnp.where(alone, tallied[1], before)
    enough &= ~alone
    rank, token = (jnp.where(enough, x, y) for x, y in zip(held, read(chunk), strict=True))

    def tied_before(back):
        return ((rank == last) & (vocabulary - 1 - token >= back)).astype(jnp.int32).sum()

    bits = (vocabulary - 1).bit_length()
    back = _largest(lambda t: tied_before(t) >= ties - before, 0, bits, cuts)
    value_ref[row] = jnp.where(cuts, value_of(last), -jnp.inf)
    id_ref[row] = vocabulary - 1 - back


def _largest(reached, lowest, bits, needed=None):
    """The largest integer, `bits` above `lowest`, that is reached; `lowest` if none or not needed.

    What is reached by an integer must be reached by all below it.
    """

    def step(i, found):
        candidate = found + lax.shift_left(jnp.int32(1), bits - 1 - i)
        return jnp.where(reached(candidate), candidate, found)

    steps = bits if needed is None else jnp.where(needed, jnp.int32(bits), jnp.int32(0))
    return lax.fori_loop(0, steps, step, jnp.int32(lowest))
