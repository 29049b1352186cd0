"""How the work of a projection is cut: between warps of a program, and between programs."""

import math

TILE_ROWS = 32  # two fragments of 16 rows
STEP_COLUMNS = 64
FEW = 72  # tiles
MAX_ROWS = 192  # N of wgmma: two accumulators take 192 of a lane's registers


def choose(rows: int) -> int:
    """Warps that share the columns of 32 rows: four, but eight where the rows are few.

    Four keep so many programs for the few experts of one token that the device is full. A TP4
    rank's gate and up have a quarter of the rows, and each warp has few loads under way at a time.
    """
    return 8 if rows // TILE_ROWS < FEW else 4


def choose_tokens(slots: int, experts: int) -> int:
    """Rows of activations per work item: what most experts get of `slots`, a multiple of 16."""
    most = math.ceil((1.25 * slots / experts + 8) / 16)
    return min(16 * most, slots // 16 * 16, MAX_ROWS)
