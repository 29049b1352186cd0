"""Which experts a step needs, for which rows: the list of work that the kernels walk through."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

ROWS = 8  # rows of activations that share one pass over an expert's weights (N of an MMA)


class Plan(NamedTuple):
    """Work items, the needed ones first; slot `token * k + i` stands for a token's i-th pick.

    Attributes:
      expert: int32 [W] expert of the item.
      start: int32 [W] where the item's slots begin in `order`.
      count: int32 [W] how many they are, at most ROWS; 0: nothing to do.
      order: int32 [T * k] the slots sorted by expert, those of rows that are not valid last.
    """

    expert: jax.Array
    start: jax.Array
    count: jax.Array
    order: jax.Array


def work_items(tokens: int, k: int, experts: int) -> int:
    """The most items that `tokens` rows of `k` picks can need."""
    return min(tokens * k, min(experts, tokens * k) + tokens * k // ROWS)


def make_plan(picked: jax.Array, valid: jax.Array, experts: int) -> Plan:
    """Groups the picks of valid rows by expert, in items of at most ROWS.

    Args:
      picked: int32 [T, k] the experts of each row, distinct within a row.
      valid: bool [T].
      experts: how many experts there are.
    """
    tokens, k = picked.shape
    flat = jnp.where(valid[:, None], picked, experts).reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = (flat[:, None] == jnp.arange(experts)).sum(axis=0, dtype=jnp.int32)
    ends = jnp.cumsum(counts)
    items = -(-counts // ROWS)
    item_ends = jnp.cumsum(items)
    item = jnp.arange(work_items(tokens, k, experts), dtype=jnp.int32)
    expert = jnp.searchsorted(item_ends, item, side="right").astype(jnp.int32)
    busy = expert < experts
    expert = jnp.minimum(expert, experts - 1)
    skipped = (item - (item_ends[expert] - items[expert])) * ROWS
    start = ends[expert] - counts[expert] + skipped
    count = jnp.where(busy, jnp.minimum(counts[expert] - skipped, ROWS), 0)
    return Plan(jnp.where(busy, expert, 0), jnp.where(busy, start, 0), count, order)
