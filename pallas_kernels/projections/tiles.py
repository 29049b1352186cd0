"""Tiles of thin products."""

import dataclasses

PROGRAMS = 132  # multiprocessors of an H100 or H200


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """A program multiplies `rows` weight rows, `columns` at a time, over a `parts`-th of K."""

    rows: int = 64
    columns: int = 128
    parts: int = 1
    warps: int = 4
    stages: int = 4


def choose(rows: int, columns: int) -> TileConfig:
    """Splits K only where the weight rows alone do not fill the device (wo: 72 tiles)."""
    if columns % 128:
        return TileConfig(columns=columns & -columns)
    parts = 1
    while rows // 64 * parts < PROGRAMS and columns % (256 * parts) == 0:
        parts *= 2
    return TileConfig(parts=parts)
