"""qkv_prep in plain jnp: the specification of the kernel."""

import math

import jax
import jax.numpy as jnp


def qkv_prep(
    q, r, k, v, q_scale, r_scale, k_taps, v_taps, k_cache, v_cache, k_state, v_state,
    start, lengths, **options,
):  # fmt: skip
    """Arguments and results are those of the kernel; invalid tokens give zeros."""
    k_before, v_before = (_past(state, start, k_taps) for state in (k_state, v_state))
    q, r, key, value = qkv_prep_long(
        q, r, k, v, q_scale, r_scale, k_taps, v_taps, k_before, v_before, start, lengths,
        dtype=k_cache.dtype, **options,
    )  # fmt: skip
    new = ((k_cache, key), (v_cache, value), (k_state, k), (v_state, v))
    valid = jnp.arange(q.shape[1]) < lengths[:, None]
    return (q, r, *(_write(ring, x, start, valid) for ring, x in new))


def qkv_prep_long(
    q, r, k, v, q_scale, r_scale, k_taps, v_taps, k_before, v_before, start, lengths, *, dtype,
    qk_threshold, rel_threshold, eps, log_scaling=None,
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
    key = _clip(_convolve(k, k_taps, k_before), qk_threshold)
    value = _convolve(v, v_taps, v_before)
    value = value * jax.lax.rsqrt(jnp.mean(jnp.square(value), axis=-1, keepdims=True) + eps)
    key, value = (jnp.where(valid[..., None, None], x, 0) for x in (key, value))
    return tuple(x.astype(dtype) for x in (q, r, key, value))


def _clip(x, threshold):
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True))
    return x * jnp.minimum(1, threshold / (norm + 1e-6))


def _by_distance(taps):
    """Taps by backward distance: static [c, K, d], and dynamic [B, T, K, c] or None."""
    return taps if isinstance(taps, tuple) else (jnp.moveaxis(taps[..., ::-1], -1, 0), None)


def _past(state, start, taps):
    """The inputs of the c - 1 tokens before the call, out of their ring."""
    position = start[:, None] + jnp.arange(1 - _by_distance(taps)[0].shape[0], 0)
    past = state[jnp.arange(state.shape[0])[:, None], position % state.shape[1]]
    return jnp.where((position >= 0)[..., None, None], past, 0)


def _convolve(u, taps, before):
    static, dynamic = _by_distance(taps)
    c, tokens = static.shape[0], u.shape[1]
    inputs = jnp.concatenate((before, u), axis=1)
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
