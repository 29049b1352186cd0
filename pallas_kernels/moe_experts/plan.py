"""Which experts a step needs, for which rows: the list of work that the kernels walk through."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

ROWS = 8  # rows of activations that share one pass over an expert's weights (N of an MMA)


class Plan(NamedTuple):
    """Work items, the needed ones first; slot `token * k + i` stands for a token's i-th pick.

    Attributes:
      expert: int32 [W] expert of the item.
      start: int32 [W] where the item's slots begin in `order`.
      count: int32 [W] how many they are, at most ROWS; 0: nothing to do.
      order: int32 [T * k] the slots sorted by expert; kernels do not read behind the last item's.
    """

    expert: Int[Array, " W"]
    start: Int[Array, " W"]
    count: Int[Array, " W"]
    order: Int[Array, " slots"]


def work_items(tokens: int, k: int, experts: int) -> int:
    """The most items that `tokens` rows of `k` picks can need."""
    return min(tokens * k, min(experts, tokens * k) + tokens * k // ROWS)


def make_plan(picked: Int[Array, "T k"], experts: int) -> Plan:
    """Groups picks by expert, in items of at most ROWS.

    Args:
      picked: int32, the experts of each row, distinct within a row; `experts` or more: none.
      experts: how many experts there are.
    """
    tokens, k = picked.shape
    flat = picked.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = (flat[:, None] == jnp.arange(experts)).sum(axis=0, dtype=jnp.int32)
    ends = jnp.cumsum(counts)
    items = -(-counts // ROWS)
    item_ends = jnp.cumsum(items)
    item = jnp.arange(work_items(tokens, k, experts), dtype=jnp.int32)
    # Compared with all: a search by halves is a loop, which breaks up a captured decode step.
    expert = jnp.searchsorted(item_ends, item, side="right", method="compare_all")
    expert = expert.astype(jnp.int32)
    busy = expert < experts
    expert = jnp.minimum(expert, experts - 1)
    skipped = (item - (item_ends[expert] - items[expert])) * ROWS
    start = ends[expert] - counts[expert] + skipped
    count = jnp.where(busy, jnp.minimum(counts[expert] - skipped, ROWS), 0)
    return Plan(jnp.where(busy, expert, 0), jnp.where(busy, start, 0), count, order)
