"""Tiles of thin products."""

from collections.abc import Sequence

ROWS, COLUMNS = 64, 128  # of a weight in a tile: wgmma takes 64 rows, whether all are there or not
FEWEST = 16  # rows of a program
MULTIPROCESSORS = 132  # of an H100 or H200


def columns(total: int) -> int:
    """How many of a weight's columns at a time: a power of two that divides them."""
    return min(COLUMNS, total & -total)


def programs(weights: Sequence[int], rows: int) -> int:
    """How many programs take weights of so many rows."""
    return sum(-(-total // rows) for total in weights)


def rows(weights: Sequence[int]) -> int:
    """How many rows a program takes: the fewest that need no more waves than whole tiles do.

    Every multiprocessor then has as many programs and reads as much as any other: 2 x 58 rows of
    a sliding layer, 35 of `wo`, 29 of a TP4 rank's sliding layer.
    """
    waves = -(-programs(weights, ROWS) // MULTIPROCESSORS)
    fits = (n for n in range(FEWEST, ROWS) if programs(weights, n) <= waves * MULTIPROCESSORS)
    return next(fits, ROWS)


def stages(programs: int) -> int:
    """How many tiles a program has under way: four, so that two programs fit a multiprocessor.

    Seven, which still fit with 64 tokens, where a multiprocessor has no more than one.
    """
    return 4 if programs > MULTIPROCESSORS else 7
