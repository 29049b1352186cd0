"""How the warps of one program share a projection."""

TILE_ROWS = 32  # two fragments of 16 rows
STEP_COLUMNS = 64
FEW = 72  # tiles


def choose(rows: int) -> int:
    """Warps that share the columns of 32 rows: four, but eight where the rows are few.

    Four keep so many programs for the few experts of one token that the device is full. A TP4
    rank's gate and up have a quarter of the rows, and each warp has few loads under way at a time.
    """
    return 8 if rows // TILE_ROWS < FEW else 4
