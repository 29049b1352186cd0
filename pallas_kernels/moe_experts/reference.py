"""The experts in plain jnp: the specification of the kernels (spec: inkling2.md, "MoE")."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize_nvfp4(values: jax.Array, scales: jax.Array, outer: jax.Array) -> jax.Array:
    """uint8 [n, R, C / 2], float8_e4m3fn [n, R, C / 16], float32 [n] -> float32 [n, R, C]."""
    n, rows, half = values.shape
    codes = jnp.stack([values & 15, values >> 4], axis=-1).reshape(n, rows, 2 * half)
    table = jnp.array(E2M1 + tuple(-v for v in E2M1), jnp.float32)
    scale = scales.astype(jnp.float32) * outer[:, None, None]
    return table[codes] * jnp.repeat(scale, 16, axis=2)


def dequantize_mxfp8(values: jax.Array, scales: jax.Array) -> jax.Array:
    """float8_e4m3fn [n, R, C], uint8 [n, R, C / 32] -> float32 [n, R, C]."""
    scale = jnp.ldexp(jnp.float32(1), scales.astype(jnp.int32) - 127)
    return values.astype(jnp.float32) * jnp.repeat(scale, 32, axis=2)


def moe_experts(
    x: Float[Array, "T D"],
    picked: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    w13: Float[Array, "N F D"],
    w2: Float[Array, "N D I"],
    *,
    gate_softcap: float,
    up_softcap: float,
) -> Float[Array, "T D"]:
    """Sums the weighted outputs of each token's experts in float32, one pick at a time.

    Args:
      x: activations; not read where nothing is picked.
      picked: the experts of a token; N or more: none.
      weights: their weights.
      w13: rows gate0, up0, gate1, ...
      w2: the projection back.
      gate_softcap, up_softcap: c in c tanh(x / c).
    """
    tokens, k = picked.shape

    def pair(i: jax.Array) -> jax.Array:
        expert, z = picked[i // k, i % k], x[i // k].astype(jnp.float32)
        gate, up = (w13[expert] @ z).reshape(-1, 2).T
        act = gate_softcap * jnp.tanh(gate / gate_softcap) * jax.nn.sigmoid(gate)
        act = act * (up_softcap * jnp.tanh(up / up_softcap))
        y = weights[i // k, i % k] * (w2[expert] @ act.astype(x.dtype).astype(jnp.float32))
        return jnp.where(expert < w13.shape[0], y, 0)

    return lax.map(pair, jnp.arange(tokens * k)).reshape(tokens, k, -1).sum(axis=1)
