"""How the work of a projection is cut: between warps of a program, and between programs."""

import math

TILE_ROWS = 32  # two fragments of 16 rows
STEP_COLUMNS = 64
FEW, MANY = 512, 4096  # programs
MAX_ROWS = 192  # N of wgmma: two accumulators take 192 of a lane's registers


def choose_warps(rows: int, columns: int, items: int) -> int:
    """Warps of a program, along the columns of its 32 rows: four, many for one token's few experts.

    Eight where programs are few (a TP4 rank's gate and up): a warp has few loads under way at a
    time. Where they are many, no more than divide the steps (one, of a rank's 576 columns).
    """
    steps, tiles = -(-columns // STEP_COLUMNS), rows // TILE_ROWS
    if tiles * items < FEW:
        return 8
    return 4 if tiles * items < MANY else math.gcd(steps, 4)


def choose_tokens(slots: int, experts: int) -> int:
    """Rows of activations per work item: what most experts get of `slots`, a multiple of 16."""
    most = math.ceil((1.25 * slots / experts + 8) / 16)
    return min(16 * most, slots // 16 * 16, MAX_ROWS)
