"""qkv_prep in plain jnp: the specification of the kernel."""

import math

import jax
import jax.numpy as jnp


def qkv_prep(
    q, r, k, v, q_scale, r_scale, k_taps, v_taps, k_cache, v_cache, k_state, v_state,
    start, lengths, *, qk_threshold, rel_threshold, eps, log_scaling=None,
):  # fmt: skip
    """Arguments and results are those of the kernel; invalid tokens give zeros."""
    token = jnp.arange(q.shape[1])
    valid = token < lengths[:, None]
    q, r, k, v = (jnp.where(valid[..., None, None], x, 0) for x in (q, r, k, v))
    q = _clip(q * q_scale.astype(jnp.float32), qk_threshold)
    r = _clip(r * r_scale.astype(jnp.float32), rel_threshold)
    if log_scaling:
        floor, alpha = log_scaling
        position = (start[:, None] + token + 1).astype(jnp.float32)
        tau = 1 + alpha * jnp.log(jnp.maximum(position / floor, 1))
        q, r = (x * tau[..., None, None] for x in (q, r))
    q, r = (x.astype(k_cache.dtype) for x in (q, r))
    key = _clip(_convolve(k, k_taps, k_state, start), qk_threshold)
    value = _convolve(v, v_taps, v_state, start)
    value = value * jax.lax.rsqrt(jnp.mean(jnp.square(value), axis=-1, keepdims=True) + eps)
    new = ((k_cache, key), (v_cache, value), (k_state, k), (v_state, v))
    return (q, r, *(_write(ring, x, start, valid) for ring, x in new))


def _clip(x, threshold):
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True))
    return x * jnp.minimum(1, threshold / (norm + 1e-6))


def _convolve(u, taps, state, start):
    """Taps by backward distance: static [c, K, d], plus dynamic [B, T, K, c] where there are."""
    if isinstance(taps, tuple):
        static, dynamic = taps
    else:
        static, dynamic = jnp.moveaxis(taps[..., ::-1], -1, 0), None
    c, tokens = static.shape[0], u.shape[1]
    position = start[:, None] + jnp.arange(1 - c, 0)
    row = jnp.arange(u.shape[0])[:, None]
    past = state[row, position % state.shape[1]]
    inputs = jnp.concatenate((jnp.where((position >= 0)[..., None, None], past, 0), u), axis=1)
    y = u
    for lag in range(c):
        tap = static[lag] if dynamic is None else static[lag] + dynamic[..., lag, None]
        y = y + tap * inputs[:, c - 1 - lag : c - 1 - lag + tokens]
    return y / math.sqrt((1 if dynamic is None else 2) * c + 1)


def _write(ring, new, start, valid):
    position = start[:, None] + jnp.arange(new.shape[1])
    slot = jnp.where(valid, position % ring.shape[1], ring.shape[1])
    row = jnp.arange(ring.shape[0])[:, None]
    return ring.at[row, slot].set(new.astype(ring.dtype), mode="drop")
