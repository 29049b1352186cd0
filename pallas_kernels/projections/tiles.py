"""Tiles of thin products."""

import dataclasses
from collections.abc import Sequence

PROGRAMS = 132  # multiprocessors of an H100 or H200
WEIGHTS = 64 * 128  # of a tile: with four stages, 64 KB in flight


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """A program multiplies `rows` weight rows, `WEIGHTS / rows` columns of them at a time."""

    rows: int = 64
    warps: int = 4
    stages: int = 4

    def columns(self, total: int) -> int:
        """How many of a weight's columns at a time: a power of two that divides them."""
        return min(WEIGHTS // self.rows, total & -total)

    def programs(self, rows: int) -> int:
        """How many programs a weight takes."""
        return -(-rows // self.rows)


def choose(rows: Sequence[int]) -> TileConfig:
    """Halves the tiles where those of all weights together do not fill the device (wo, TP4)."""
    wide = TileConfig()
    return wide if sum(map(wide.programs, rows)) >= PROGRAMS else TileConfig(rows=32)
