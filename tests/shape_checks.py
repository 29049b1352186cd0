"""The run-time checker that conftest.py puts on every function of our packages."""

import typing
import warnings

import beartype
import beartype.roar

# An int is accepted for a float, as type checkers do.
_checked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def check(function):
    """Checks a function's arguments and result, but not the fields of dataclasses.

    JAX rebuilds registered dataclasses with shardings, shapes and markers in place of arrays.
    Functions that return `Self` are left out: beartype only knows it in classes of its own.
    """
    if function.__name__ == "__init__" or typing.Self in function.__annotations__.values():
        return function
    with warnings.catch_warnings():
        # nnx.State is generic over typing.Hashable, which beartype calls deprecated.
        warnings.simplefilter("ignore", beartype.roar.BeartypeDecorHintPep585DeprecationWarning)
        return _checked(function)
