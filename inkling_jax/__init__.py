"""Inkling 2 Small in JAX; the public names are fetched from their modules on first use."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inkling_jax.cache import Cache, init_cache, rollback
    from inkling_jax.config import Config, TextConfig, VisionConfig, inkling2_small
    from inkling_jax.engine import Engine
    from inkling_jax.errors import InputError
    from inkling_jax.generation import decode, generate, prefill
    from inkling_jax.inspection import Inspection, inspect
    from inkling_jax.loading import convert
    from inkling_jax.model import (
        abstract_params,
        encode_image,
        forward,
        graphdef,
        init_params,
        unembed,
    )
    from inkling_jax.opening import load
    from inkling_jax.outputs import GenerationOutput, Score, StreamPiece
    from inkling_jax.planning.report import Plan, plan
    from inkling_jax.sampling import Sampling
    from inkling_jax.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "Cache",
    "Config",
    "Engine",
    "GenerationOutput",
    "InputError",
    "Inspection",
    "Plan",
    "Sampling",
    "SamplingParams",
    "Score",
    "StreamPiece",
    "TextConfig",
    "VisionConfig",
    "abstract_params",
    "convert",
    "decode",
    "encode_image",
    "forward",
    "generate",
    "graphdef",
    "init_cache",
    "init_params",
    "inkling2_small",
    "inspect",
    "load",
    "plan",
    "prefill",
    "rollback",
    "unembed",
]

_HOME = {
    "Cache": "cache",
    "Config": "config",
    "Engine": "engine",
    "GenerationOutput": "outputs",
    "InputError": "errors",
    "Inspection": "inspection",
    "Plan": "planning.report",
    "Sampling": "sampling",
    "SamplingParams": "sampling_params",
    "Score": "outputs",
    "StreamPiece": "outputs",
    "TextConfig": "config",
    "VisionConfig": "config",
    "abstract_params": "model",
    "convert": "loading",
    "decode": "generation",
    "encode_image": "model",
    "forward": "model",
    "generate": "generation",
    "graphdef": "model",
    "init_cache": "cache",
    "init_params": "model",
    "inkling2_small": "config",
    "inspect": "inspection",
    "load": "opening",
    "plan": "planning.report",
    "prefill": "generation",
    "rollback": "cache",
    "unembed": "model",
}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
