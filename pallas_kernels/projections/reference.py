"""Thin products in plain jnp: the specification of the kernel."""

import itertools

import jax
import jax.numpy as jnp


def project(x: jax.Array, weight: jax.Array, bounds: tuple[int, ...] = ()) -> jax.Array:
    """Rows of `weight` [N, K] from `bounds[g - 1]` to `bounds[g]` times `x[g]` [T, K].

    Returns:
      float32 [T, N].
    """
    edges = (0, *bounds, weight.shape[0])
    out = [
        x[g].astype(jnp.float32) @ weight[low:high].T.astype(jnp.float32)
        for g, (low, high) in enumerate(itertools.pairwise(edges))
    ]
    return jnp.concatenate(out, axis=1)
