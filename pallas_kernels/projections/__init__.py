"""Thin products of a decode step: a few rows of activations times a whole weight, read once."""

import jax
import jax.numpy as jnp

from pallas_kernels.projections import kernel, tiles
from pallas_kernels.projections.tiles import TileConfig

__all__ = ["TileConfig", "project", "unsupported"]

MAX_TOKENS = 64


def unsupported(tokens: int, columns: int, bounds: tuple[int, ...] = ()) -> str | None:
    """Says why the kernel cannot run these shapes, or None."""
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens, the decode kernel takes at most {MAX_TOKENS}"
    if columns % 32:
        return f"{columns} columns are no multiple of 32"
    for bound in bounds:
        if bound % 64:
            return f"group boundary {bound} is not a multiple of 64"
    return None


def project(
    x: jax.Array,
    weight: jax.Array,
    bounds: tuple[int, ...] = (),
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    config: TileConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiplies stacked weights by their inputs in one launch.

    Args:
      x: [G, T, K] one input per group of weight rows.
      weight: [N, K] in x's dtype; group g has rows bounds[g - 1]...bounds[g].
      bounds: the G - 1 inner boundaries, multiples of 64.
      dtype: of the result.
      config: tiles, by default chosen from the shapes.
      interpret: run in Pallas' interpreter.

    Returns:
      [T, parts, N]: summands over `config.parts` shares of K, which the consumer adds up.

    Raises:
      ValueError: a shape that the kernel does not take; the value is named.
    """
    if reason := unsupported(x.shape[1], x.shape[2], bounds):
        raise ValueError(f"project: {reason}")
    if x.shape[0] != len(bounds) + 1:
        raise ValueError(f"project: {x.shape[0]} inputs for {len(bounds) + 1} groups of rows")
    config = config or tiles.choose(*weight.shape)
    return kernel.project(x, weight, bounds, config, dtype, interpret)
