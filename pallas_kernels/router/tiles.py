"""How the gate product is cut."""

import dataclasses
import math

TOKENS = 8  # rows of activations that share one pass over the gate
# Tokens whose experts are picked at a time. More would not fit the registers; with fewer, not all
# items of an expert (eight rows each, of 64 tokens) would find a place in the plan.
SELECTED = 8


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """A program multiplies one of `splits` ranges of `experts` gate rows, `columns` at a time."""

    experts: int
    columns: int
    warps: int
    splits: int = 1

    @property
    def groups(self) -> int:
        """Gate rows side by side, of whose columns a thread has four."""
        return min(self.experts, max(128 * self.warps // self.columns, 1))


def choose(tokens: int, experts: int, hidden: int) -> TileConfig:
    """One gate row a program for one token, two for two, sixteen of a range of columns for more.

    From 17 tokens on, which take turns, there are programs enough with four rows and all columns.

    All that a program reads of the gate is under way at once. With eight tokens a range of sixteen
    rows is as long as twice that of the activations, which each program reads; but one program adds
    up the ranges of all tokens.
    """
    rows, columns, warps, splits = (16, 128, 8, 4)
    if tokens <= 2:
        rows, columns, warps, splits = (tokens, 512, 4, 1)
    elif tokens > 2 * TOKENS:
        rows, columns, warps, splits = (4, 512, 8, 1)
    columns = math.gcd(columns, hidden)
    return TileConfig(math.gcd(rows, experts), columns, warps, math.gcd(splits, hidden // columns))
