"""How the queries of a call are cut into programs, and what each of them reads."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.rel_attention_prefill.shear import KEYS, QUERIES

GROUPS = 2  # computing warpgroups
BLOCK = GROUPS * QUERIES  # queries of a program, as many as keys of a tile
ALIGN = 8  # a copy starts at a multiple, as shared memory is tiled by so many lines


class Work(NamedTuple):
    """A program's part: 128 queries of a head, and the tiles of keys that they see.

    Attributes:
      row, head, block: whose queries.
      begin: the key of the first query; keys are counted as in `Operands.k`.
      end: the key behind the last valid query's.
      lowest: the oldest key.
      over: keys between the end of the queries and that of the first tile, as copies are aligned.
      tiles: how many.
    """

    row: Any
    head: Any
    block: Any
    begin: Any
    end: Any
    lowest: Any
    over: Any
    tiles: Any

    def key_at(self, step):
        """The first key of a step's tile: from the second oldest tile on, the oldest last."""
        tile = jnp.where(step < self.tiles - 1, self.tiles - 2 - step, self.tiles - 1)
        return self.begin + self.over - KEYS * tile

    def came_at(self, step):
        """The first key that is loaded for it: where a tile lies before all keys, 0."""
        return jnp.maximum(self.key_at(step), 0)

    def queries(self, group):
        """Where the queries of a warpgroup lie."""
        pairs = pl.ds(pl.multiple_of(QUERIES * self.block, QUERIES), QUERIES)
        return self.row, pairs, group, self.head

    def loops(self, window, extent):
        """The steps before which tiles lie beyond the bias, and have no edge."""
        # The oldest has one, and those on the diagonal, which are two where they are not aligned.
        inner = jnp.maximum(self.tiles - (3 if window is None else 2), 0)
        near = 1 + lax.div(extent + self.over + BLOCK - 2, KEYS)  # tiles with a bias
        return jnp.clip(self.tiles - 1 - near, 0, inner), inner


def cut(row, head, block, first, lowest, count, window) -> Work:
    """The work of a program; `first`, `lowest` and `count` of its row as in `kernel_sm90.run`."""
    begin = first + BLOCK * block
    over = -begin & (ALIGN - 1)
    tiles = 1 + lax.div(begin + over - lowest + KEYS - 1, KEYS)
    if window is not None:
        tiles = jnp.minimum(tiles, within(window))
    tiles = jnp.where(BLOCK * block < count, tiles, 0)
    return Work(row, head, block, begin, first + count, lowest, over, tiles)


def within(reach: int) -> int:
    """Tiles, from the diagonal on, in which a block has distances below `reach`."""
    return (reach + BLOCK - 2) // KEYS + 1
