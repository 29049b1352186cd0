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
    past = position[:, : taps - 1]
    before = jnp.where(past[..., None] < 0, 0, state[row, past % slots])
    valid = (jnp.arange(tokens) < lengths[:, None])[..., None]
    u = jnp.where(valid, u, 0)
    slot = jnp.where(valid[..., 0], position[:, taps - 1 :] % slots, slots)
    return convolve(u, before, weight), state.at[row, slot].set(u, mode="drop")


def convolve(u: jax.Array, before: jax.Array, weight: jax.Array) -> jax.Array:
    """The same of inputs [B, T, D] after those [B, c - 1, D] before them."""
    taps, tokens = weight.shape[1], u.shape[1]
    line = jnp.concatenate([before, u], axis=1)
    y = sum(weight[:, j] * line[:, j : j + tokens] for j in range(taps)) + u
    return y / jnp.sqrt(jnp.float32(taps + 1))


def inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    """1 / rms of the rows of [..., D]."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1) + eps)


def mix(query: jax.Array, sources: jax.Array) -> jax.Array:
    """Softmax-weighted sum of normalised sources [n, ..., D] by `query` [D], in float32."""
    p = jax.nn.softmax((sources @ query) / jnp.sqrt(jnp.float32(query.shape[0])), axis=0)
    return (p[..., None] * sources).sum(axis=0)


def conv_mix(u, partial, blocks, scales, queries, norms, weight, state, start, lengths, **options):
    """Arguments and results as `pallas_kernels.conv_mix.conv_mix`."""
    u = u if u.ndim == 3 else u.sum(axis=2)
    y, state = short_conv(u, weight, state, start, lengths)
    y = jnp.where((jnp.arange(u.shape[1]) < lengths[:, None])[..., None], y, 0)
    return *_add_and_mix(y, partial, blocks, scales, queries, norms, **options), state


def conv_mix_long(u, before, partial, blocks, scales, queries, norms, weight, **options):
    """Arguments and results as `pallas_kernels.conv_mix.conv_mix_long`."""
    y = convolve(u, before, weight)
    return _add_and_mix(y, partial, blocks, scales, queries, norms, **options)


def _add_and_mix(y, partial, blocks, scales, queries, norms, *, dtypes, eps, norm_eps):
    partial = y if partial is None else partial + y
    scale = inverse_rms(partial, eps)
    pairs = zip((*blocks, partial), (*scales, scale), strict=True)
    sources = jnp.stack([x * s[..., None] for x, s in pairs])
    z = []
    for query, norm in zip(queries, norms, strict=True):
        mixed = mix(query, sources)
        normed = mixed * inverse_rms(mixed, norm_eps)[..., None] * norm.astype(jnp.float32)
        z += [normed.astype(dtype) for dtype in dtypes]
    return tuple(z), partial, scale
