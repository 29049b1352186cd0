"""Thin products in plain jnp: the specification of the kernel."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def project(products: Sequence[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
    """Returns x [T, K] times the rows of weight [N, K], float32 [T, N], for every pair."""
    return [x.astype(jnp.float32) @ weight.T.astype(jnp.float32) for x, weight in products]
