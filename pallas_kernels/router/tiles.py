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

    @property
    def groups(self) -> int:
        """Gate rows side by side, of whose columns a thread has four."""
        return min(self.experts, max(128 * self.warps // self.columns, 1))


def choose(tokens: int, experts: int, hidden: int) -> TileConfig:
    """One gate row a program for one token, two for two, else four and twice the threads.

    All that a program reads of the gate is under way at once, so programs are few and large where
    the activations, which each of them reads, would else be many more bytes than the gate.
    """
    rows, warps = {1: (1, 4), 2: (2, 4)}.get(tokens, (4, 8))
    return TileConfig(min(rows, experts & -experts), min(512, hidden & -hidden), warps)
