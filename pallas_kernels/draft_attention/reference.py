"""Attention of a drafter's block in plain jnp: the specification of the kernel."""

import math

import jax
import jax.numpy as jnp


def draft_attention(q, k, v, q_norm, k_norm, cos, sin, context, start, *, layer, eps):
    """Arguments and result as `pallas_kernels.draft_attention.draft_attention`."""

    def ready(x, weight):
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * weight
        a, b = jnp.split(x, 2, axis=-1)
        c, s = cos[:, :, None], sin[:, :, None]
        return jnp.concatenate((a * c - b * s, b * c + a * s), axis=-1).astype(context.dtype)

    group, slots = q.shape[2] // k.shape[2], context.shape[1]
    own = jnp.stack((ready(k, k_norm), v.astype(context.dtype)), axis=2)
    keys, values = jnp.moveaxis(jnp.concatenate((context[:, :, layer], own), axis=1), 2, 0)
    keys, values = (jnp.repeat(x, group, axis=2).astype(jnp.float32) for x in (keys, values))
    scores = jnp.einsum("bthd,bshd->bhts", ready(q, q_norm).astype(jnp.float32), keys)
    at = jnp.arange(slots + q.shape[1])
    seen = (at >= slots) | (at < start[:, None])
    scores = jnp.where(seen[:, None, None], scores / math.sqrt(q.shape[-1]), -jnp.inf)
    values = jnp.where(seen[..., None, None], values, 0.0)
    attended = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), values)
    return attended.astype(context.dtype)
