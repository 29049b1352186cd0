"""The one exception that stands for a user's mistake."""


class InputError(ValueError):
    """Bad input: one sentence that says what is wrong, where, and what would be right.

    The command line prints the sentence and exits with code 2.
    """
