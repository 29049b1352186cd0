"""How the gate product is cut."""

import dataclasses

TOKENS = 8  # rows of activations that share one pass over the gate
SELECTED = 16  # tokens whose experts are picked at a time


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """A program computes the scores of `experts` gate rows, `columns` at a time."""

    experts: int
    columns: int
    warps: int


def choose(tokens: int, experts: int, hidden: int) -> TileConfig:
    """One gate row a program for one or two tokens, else four and four times the threads.

    Small programs keep many loads under way; but each reads all activations, and with eight tokens
    those are as many bytes as four gate rows.
    """
    rows, warps = (1, 4) if tokens <= 2 else (4, 16)
    return TileConfig(min(rows, experts & -experts), min(512, hidden & -hidden), warps)
