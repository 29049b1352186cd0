"""The router and its plan in plain jnp: the specification of the kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.moe_experts.plan import Plan, make_plan


def scores(z: Float[Array, "T D"], gate: Float[Array, "N D"]) -> Float[Array, "T N"]:
    """sigmoid(gate · z) in float32."""
    return jax.nn.sigmoid(jnp.dot(z.astype(jnp.float32), gate.T, precision="highest"))


def select(
    scores: Float[Array, "T N"],
    bias: Float[Array, " N"],
    real: Bool[Array, " T"],
    *,
    k: int,
    scale: float,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"], Plan]:
    """Result as `pallas_kernels.router.route`, from the scores."""
    experts = scores.shape[1]
    picks = jax.lax.top_k(scores + bias, k)[1]
    weights = jnp.take_along_axis(scores, picks, axis=1)
    weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20) * scale
    picks = jnp.where(real[:, None], picks, experts)
    return picks, jnp.where(real[:, None], weights, 0), make_plan(picks, experts)
