"""Where the filters end a row, by sorting it: the specification of the kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def prefix_end(
    logits: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """Arguments and result as `pallas_kernels.sampling.prefix_end`."""
    order = jnp.argsort(-logits, axis=1, stable=True).astype(jnp.int32)
    value = jnp.take_along_axis(logits, order, axis=1)
    place = jnp.arange(logits.shape[1])
    among = place < top_k[:, None]
    mass = jnp.where(among, jnp.exp(value - value[:, :1]), 0)
    before = jnp.cumsum(mass, axis=1) - mass
    target = (top_p * mass.sum(axis=1))[:, None]
    kept = among & ((before < target) | (top_p >= 1)[:, None] | (place == 0))
    last = (kept.sum(axis=1) - 1)[:, None]
    value, order = (jnp.take_along_axis(x, last, axis=1)[:, 0] for x in (value, order))
    return value, order
