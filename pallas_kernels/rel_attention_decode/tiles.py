"""Tiles of decode attention."""

import dataclasses

PROGRAMS = 264  # two per multiprocessor of an H100 or H200


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """`splits` programs share the keys of a KV head, `keys` at a time."""

    splits: int
    keys: int = 64
    warps: int = 4
    stages: int = 3


def choose(batch: int, kv_heads: int, rows: int, slots: int) -> TileConfig:
    """As many splits as fill the device once, a power of two (the combine reads them as a tile).

    Many query rows (> 32) halve the splits: a split costs rows x d floats of partial results.
    """
    wanted = PROGRAMS // (batch * kv_heads * (2 if rows > 32 else 1))
    most = min(max(wanted, 1), -(-slots // 64))
    return TileConfig(1 << (most.bit_length() - 1))
