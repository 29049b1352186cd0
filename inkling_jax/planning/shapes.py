"""Abstract parameters and caches, and what of them lies on one device of a mesh."""

import functools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from inkling_jax import quant
from inkling_jax.cache import Cache, cache_specs, init_cache
from inkling_jax.config import Config, TextConfig, inkling2_small
from inkling_jax.hub import resolve
from inkling_jax.inspection import format_of
from inkling_jax.loading import checkpoint_params
from inkling_jax.model import abstract_params, param_specs
from inkling_jax.planning.floors import BLOCK, Weights
from sharding.mesh import group_size
from sharding.partition import shard_shapes

SMALL = "small"
NVFP4_LAYERS = 40  # of Inkling 2 Small as it is published; the last 8 are MXFP8


def abstract_model(model: str | Path) -> tuple[Config, nnx.State]:
    """Returns architecture and parameter shapes, as a GPU has them: in bfloat16 or packed.

    Args:
      model: "small" for Inkling 2 Small as published, or what `inspect` takes.

    Raises:
      InputError: the directory does not hold a model.
    """
    if model != SMALL:
        directory = resolve(model)
        config = Config.from_file(directory / "config.json")
        return config, checkpoint_params(directory, config, jnp.bfloat16)

    def packed(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        if path[-1] not in ("w13", "w2"):
            return variable
        fmt = "nvfp4" if path[1] < NVFP4_LAYERS else "mxfp8"
        return variable.replace(quant.abstract(variable.get_value().shape, fmt))

    config = inkling2_small()
    flat = nnx.to_flat_state(abstract_params(config, jnp.bfloat16))
    return config, nnx.from_flat_state([(path, packed(path, v)) for path, v in flat])


def abstract_cache(text: TextConfig, rows: int, context: int, mesh: Mesh | AbstractMesh) -> Cache:
    """Returns the shapes of a cache of so many rows, of slots that the mesh divides."""
    slots = context + -context % group_size(mesh.shape, "cp")
    make = functools.partial(init_cache, text, rows, slots, BLOCK, jnp.dtype(jnp.bfloat16))
    return jax.eval_shape(make)


def place(tree: Any, specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Returns shapes with their shardings."""
    return jax.tree.map(lambda a, s: a.update(sharding=NamedSharding(mesh, s)), tree, specs)


def device_weights(params: nnx.State, mesh: AbstractMesh) -> tuple[Weights, ...]:
    """Returns what one device has of the parameters, the largest part first.

    Raises:
      MeshError: the mesh does not divide them.
    """
    nbytes: Counter[tuple[str, str]] = Counter()
    elements: Counter[tuple[str, str]] = Counter()
    for path, variable in nnx.to_flat_state(shard_shapes(params, param_specs(params, mesh), mesh)):
        value = variable.get_value()
        key = _part(path), format_of(value)
        nbytes[key] += _nbytes(value)
        elements[key] += math.prod(value.shape)
    return tuple(
        Weights(part, fmt, size, elements[part, fmt]) for (part, fmt), size in nbytes.most_common()
    )


def device_cache(text: TextConfig, rows: int, context: int, mesh: AbstractMesh) -> tuple[int, int]:
    """Returns the bytes of (keys and values, convolution states) that one device has."""
    cache = abstract_cache(text, rows, context, mesh)
    shards = shard_shapes(cache, cache_specs(cache, mesh), mesh)
    return (
        sum(_nbytes((layer.k, layer.v)) for layer in shards.layers),
        sum(_nbytes(layer.conv) for layer in shards.layers),
    )


def _nbytes(tree: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def _part(path: tuple[Any, ...]) -> str:
    match path:
        case ("embed", _):
            return "embedding"
        case ("unembed", _):
            return "head"
        case ("vision", *_):
            return "image tower"
        case ("layers", _, "attn", *_):
            return "attention"
        case ("layers", _, "moe", "w13" | "w2"):
            return "experts"
        case ("layers", _, "moe", _):
            return "router"
    return "other"
