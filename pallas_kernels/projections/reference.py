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
    wide = jnp.promote_types(x.dtype, jnp.float32)
    out = [
        x[g].astype(wide) @ weight[low:high].T.astype(wide)
        for g, (low, high) in enumerate(itertools.pairwise(edges))
    ]
    return jnp.concatenate(out, axis=1)
