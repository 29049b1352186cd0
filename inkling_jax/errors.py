"""The one exception that stands for a user's mistake, and how an interrupt is told from a fault."""

from collections.abc import Sequence
from pathlib import Path

MOST_LISTED = 20


class InputError(ValueError):
    """Bad input: one sentence that says what is wrong, where, and what would be right.

    The command line prints the sentence and exits with code 2.
    """


def interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C is behind it: while JAX compares trees, it makes a ValueError of that."""
    return isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt)


def report(where: str | Path, of_what: str, faults: Sequence[str]) -> InputError:
    """Returns one error for many faults, of which it lists the first."""
    heading = f"{where}: {len(faults)} {'fault' if len(faults) == 1 else 'faults'} {of_what}:"
    more = len(faults) - MOST_LISTED
    rest = [f"and {more} more"] if more > 0 else []
    return InputError("\n  ".join([heading, *faults[:MOST_LISTED], *rest]))
