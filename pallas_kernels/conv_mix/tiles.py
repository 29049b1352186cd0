"""Tiles of conv_mix."""

import dataclasses

SLOTS = 16  # sources and partial, padded to a power of two


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One program takes `columns` of one row."""

    columns: int
    warps: int = 4


def choose(width: int) -> TileConfig:
    """256 columns (18 programs a row at 4608): few enough to add up, enough to hide latency."""
    return TileConfig(min(256, width & -width))
