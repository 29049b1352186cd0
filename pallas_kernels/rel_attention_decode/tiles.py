"""Tiles of decode attention."""

import dataclasses

KEYS = 64  # of a step
PROGRAMS = 264  # two per multiprocessor of an H100 or H200


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """`splits` programs share the keys of a KV head, `keys` at a time."""

    splits: int
    keys: int = KEYS
    warps: int = 4
    stages: int = 3


def choose(batch: int, kv_heads: int, rows: int, slots: int) -> TileConfig:
    """A split for each block of `KEYS` slots, but no more than fill the device once.

    They are a power of two, rounded up: the combine reads them as a tile.
    Many query rows (> 32) halve the keys of a step, so that two programs still fit a
    multiprocessor: one computes while the other waits for its keys.
    """
    blocks = -(-slots // KEYS)
    most = max(PROGRAMS // (batch * kv_heads), 1)
    splits = min(1 << (blocks - 1).bit_length(), 1 << (most.bit_length() - 1))
    return TileConfig(splits, keys=KEYS // 2 if rows > 32 else KEYS)
