"""The experts in plain jnp: the specification of the kernels (spec: inkling2.md, "MoE")."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize_nvfp4(values: jax.Array, scales: jax.Array, outer: jax.Array) -> jax.Array:
    """uint8 [n, R, C / 2], float8_e4m3fn [n, R, C / 16], float32 [n] -> float32 [n, R, C]."""
    n, rows, half = values.shape
    codes = jnp.stack([values & 15, values >> 4], axis=-1).reshape(n, rows, 2 * half)
    table = jnp.array(E2M1 + tuple(-v for v in E2M1), jnp.float32)
    scale = jnp.repeat(scales.astype(jnp.float32), 16, axis=2)
    return table[codes] * scale * outer[:, None, None]


def dequantize_mxfp8(values: jax.Array, scales: jax.Array) -> jax.Array:
    """float8_e4m3fn [n, R, C], uint8 [n, R, C / 32] -> float32 [n, R, C]."""
    scale = jnp.ldexp(jnp.float32(1), scales.astype(jnp.int32) - 127)
    return values.astype(jnp.float32) * jnp.repeat(scale, 32, axis=2)


def moe_experts(
    x: jax.Array,
    picked: jax.Array,
    weights: jax.Array,
    valid: jax.Array,
    w13: Callable[[jax.Array], jax.Array],
    w2: Callable[[jax.Array], jax.Array],
    *,
    gate_softcap: float,
    up_softcap: float,
) -> jax.Array:
    """Sums the weighted outputs of each token's experts, one token and expert at a time.

    Args:
      x: [T, D] activations.
      picked: int32 [T, k] experts of a token.
      weights: float32 [T, k] their weights.
      valid: bool [T]; a row that is not valid gives zeros whatever it holds.
      w13: expert -> float32 [2 I, D], rows gate0, up0, gate1, ...
      w2: expert -> float32 [D, I].
      gate_softcap, up_softcap: c in c tanh(x / c).

    Returns:
      float32 [T, D].
    """
    tokens, k = picked.shape

    def pair(i: jax.Array) -> jax.Array:
        expert, z = picked[i // k, i % k], x[i // k].astype(jnp.float32)
        gate, up = (w13(expert) @ z).reshape(-1, 2).T
        act = gate_softcap * jnp.tanh(gate / gate_softcap) * jax.nn.sigmoid(gate)
        act = act * (up_softcap * jnp.tanh(up / up_softcap))
        return weights[i // k, i % k] * (w2(expert) @ act.astype(x.dtype).astype(jnp.float32))

    out = lax.map(pair, jnp.arange(tokens * k)).reshape(tokens, k, -1).sum(axis=1)
    return jnp.where(valid[:, None], out, 0)
