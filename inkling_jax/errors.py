"""The one exception that stands for a user's mistake."""

from collections.abc import Sequence

MOST_LISTED = 20


class InputError(ValueError):
    """Bad input: one sentence that says what is wrong, where, and what would be right.

    The command line prints the sentence and exits with code 2.
    """


def report(heading: str, faults: Sequence[str]) -> InputError:
    """Returns one error for many faults, of which it lists the first."""
    more = len(faults) - MOST_LISTED
    rest = [f"and {more} more"] if more > 0 else []
    return InputError("\n  ".join([heading, *faults[:MOST_LISTED], *rest]))
