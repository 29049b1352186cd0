"""How the warps of one program share a projection."""

import dataclasses
import math

TILE_ROWS = 32  # two fragments of 16 rows
STEP_COLUMNS = 64


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """`warps` of a program, `column_warps` of them side by side along the columns."""

    warps: int = 4
    column_warps: int = 4

    @property
    def row_warps(self) -> int:
        return self.warps // self.column_warps


def choose(rows: int, columns: int) -> TileConfig:
    """The split whose column share is whole: 4 warps along 4608 or 2304 columns, 1 along 576.

    Sharing the columns keeps 32 rows per program and so many programs for the few experts of one
    token; more warps, or more rows per warp, measured slower.
    """
    steps = -(-columns // STEP_COLUMNS)
    tiles = rows // TILE_ROWS
    shares = [n for n in (4, 2, 1) if steps % n == 0 and tiles % (4 // n) == 0]
    return TileConfig(4, shares[0]) if shares else TileConfig(1, 1)


MAX_ROWS = 192  # N of wgmma: two accumulators take 192 of a lane's registers


def choose_tokens(slots: int, experts: int) -> int:
    """Rows of activations per work item: what most experts get of `slots`, a multiple of 16."""
    most = math.ceil((1.25 * slots / experts + 8) / 16)
    return min(16 * most, slots // 16 * 16, MAX_ROWS)
