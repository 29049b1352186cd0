"""Convolution, residual and attention-residual mix in plain jnp: the kernel's specification."""

import jax
import jax.numpy as jnp


def short_conv(
    u: jax.Array, weight: jax.Array, state: jax.Array, start: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The static short convolution over [B, T, D] and its ring of past inputs [B, S, D]."""
    batch, tokens, _ = u.shape
    taps, slots = weight.shape[1], state.shape[1]
    row = jnp.arange(batch)[:, None]
    position = start[:, None] + jnp.arange(1 - taps, tokens)  # B, c - 1 + T
    before = position[:, : taps - 1]
    past = jnp.where(before[..., None] < 0, 0, state[row, before % slots])
    valid = (jnp.arange(tokens) < lengths[:, None])[..., None]
    u = jnp.where(valid, u, 0).astype(jnp.float32)
    line = jnp.concatenate([past, u], axis=1)
    y = sum(weight[:, j] * line[:, j : j + tokens] for j in range(taps)) + u
    slot = jnp.where(valid[..., 0], position[:, taps - 1 :] % slots, slots)
    return y / jnp.sqrt(jnp.float32(taps + 1)), state.at[row, slot].set(u, mode="drop")


def mix(query: jax.Array, sources: jax.Array, eps: float) -> jax.Array:
    """Softmax-weighted sum of the normalised sources [n, ..., D] by `query` [D], in float32."""
    x = sources.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    p = jax.nn.softmax((x @ query) / jnp.sqrt(jnp.float32(query.shape[0])), axis=0)
    return (p[..., None] * x).sum(axis=0)


def conv_mix(
    u, partial, sources, gram, queries, norms, weight, state, start, lengths, *, count, keep, eps
):
    """Arguments and results as `pallas_kernels.conv_mix.conv_mix`."""
    y, state = short_conv(u.astype(jnp.float32).sum(axis=2), weight, state, start, lengths)
    partial = y if partial is None else partial.astype(jnp.float32) + y
    if keep:
        sources = sources.at[count].set(partial.astype(sources.dtype))
        partial = sources[count].astype(jnp.float32)
    every = jnp.concatenate([sources[:count].astype(jnp.float32), partial[None]])
    products = jnp.einsum("nbtd,btd->btn", every, partial)
    gram = gram.at[:, :, count, : count + 1].set(products)
    gram = gram.at[:, :, : count + 1, count].set(products)
    mixed = jnp.stack([mix(query, every, eps) for query in queries])
    z = mixed * jax.lax.rsqrt(jnp.mean(mixed * mixed, axis=-1, keepdims=True) + eps)
    z = (z * norms[:, None, None].astype(jnp.float32)).astype(sources.dtype)
    return z, partial, sources, gram, state
