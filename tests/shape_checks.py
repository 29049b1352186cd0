"""The run-time checker that conftest.py puts on every function of our packages."""

import typing

import beartype
import jaxtyping


def check(function):
    """Checks the shapes and dtypes that a function's signature states, and nothing else.

    Fields of dataclasses are left alone: JAX rebuilds registered dataclasses with shardings,
    shapes and markers in place of arrays.
    """
    stated = {k: v for k, v in function.__annotations__.items() if _has_shape(v)}
    if function.__name__ == "__init__" or not stated:
        return function
    function.__annotations__ = stated
    return beartype.beartype(function)


def _has_shape(hint) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shape, typing.get_args(hint)))
