"""Tiles of thin products."""

from collections.abc import Sequence

ROWS, COLUMNS = 64, 128  # of a weight that a program multiplies at a time
PROGRAMS = 132  # multiprocessors of an H100 or H200


def columns(total: int) -> int:
    """How many of a weight's columns at a time: a power of two that divides them."""
    return min(COLUMNS, total & -total)


def programs(rows: int) -> int:
    """How many programs a weight takes."""
    return -(-rows // ROWS)


def stages(rows: Sequence[int]) -> int:
    """How many tiles a program has under way: four, so that two programs fit a multiprocessor.

    Seven, which still fit with 64 tokens, where those of all weights together are fewer than the
    multiprocessors (wo, TP4).
    """
    return 4 if sum(map(programs, rows)) >= PROGRAMS else 7
