"""Which experts a step needs, for which rows: the list of work that the kernels walk through."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

ROWS = 8  # rows of activations that share one pass over an expert's weights (N of an MMA)


class Plan(NamedTuple):
    """Work items, the needed ones first; slot `token * k + i` stands for a token's i-th pick.

    Attributes:
      expert: int32 [W] expert of the item; -1: nothing to do.
      start: int32 [W] where the item's slots begin in `order`.
      count: int32 [W] how many they are, 0 where there is nothing to do.
      order: int32 [T * k], or more where aligned, the slots sorted by expert; kernels do not read
        behind the last item's.
    """

    expert: Int[Array, " W"]
    start: Int[Array, " W"]
    count: Int[Array, " W"]
    order: Int[Array, " slots"]


def work_items(tokens: int, k: int, experts: int, rows: int = ROWS) -> int:
    """The most items that `tokens` rows of `k` picks can need."""
    return min(tokens * k, min(experts, tokens * k) + tokens * k // rows)


def make_plan(picked: Int[Array, "T k"], experts: int, rows: int = ROWS, align: int = 1) -> Plan:
    """Groups picks by expert, in items of at most `rows`.

    Args:
      picked: int32, the experts of each row, distinct within a row; `experts` or more: none.
      experts: how many experts there are.
      rows: of an item, a multiple of `align`.
      align: what the items' starts in `order` are multiples of, by filling it up with any slots.
    """
    tokens, k = picked.shape
    flat = picked.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = (flat[:, None] == jnp.arange(experts)).sum(axis=0, dtype=jnp.int32)
    room = -(-counts // align) * align
    ends = jnp.cumsum(room)
    items = -(-counts // rows)
    item_ends = jnp.cumsum(items)
    item = jnp.arange(work_items(tokens, k, experts, rows), dtype=jnp.int32)
    expert = _first_above(item_ends, item)
    busy = expert < experts
    expert = jnp.minimum(expert, experts - 1)
    skipped = (item - (item_ends[expert] - items[expert])) * rows
    start = ends[expert] - room[expert] + skipped
    count = jnp.where(busy, jnp.minimum(counts[expert] - skipped, rows), 0)
    if align > 1:
        most = flat.size + (align - 1) * min(experts, flat.size)
        place = jnp.arange(-(-most // align) * align, dtype=jnp.int32)
        filled = jnp.pad(jnp.cumsum(room - counts), (1, 0))  # places before each expert's
        order = order[jnp.minimum(place - filled[_first_above(ends, place)], flat.size - 1)]
    return Plan(jnp.where(busy, expert, -1), jnp.where(busy, start, 0), count, order)


def _first_above(ends, place):
    """Index of the first end above each place, by comparing with all.

    A search by halves is a loop, which breaks up a captured decode step.
    """
    found = jnp.searchsorted(ends, place, side="right", method="compare_all")
    return found.astype(jnp.int32)
