"""Inkling 2 Small in JAX; the public names are fetched from their modules on first use."""

import importlib
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inkling_jax.config import Config, TextConfig, VisionConfig, inkling2_small
    from inkling_jax.errors import InputError

__version__ = "0.1.0"
__all__ = ["Config", "InputError", "TextConfig", "VisionConfig", "inkling2_small"]

_HOME = {
    "Config": "config",
    "InputError": "errors",
    "TextConfig": "config",
    "VisionConfig": "config",
    "inkling2_small": "config",
}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        # Importing a submodule binds it here, which would hide a function of the same name.
        if name not in _HOME or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
