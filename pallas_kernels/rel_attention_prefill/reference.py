"""Prefill attention with the relative bias in plain jnp: the specification of the kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rel_attention_prefill(
    q: Float[Array, "B T H d"],
    r: Float[Array, "B T H R"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K d"],
    proj: Float[Array, "R E"],
    sink: Float[Array, "B T H"],
    gate: Float[Array, "B T H d"],
    start: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    window: int | None,
) -> Float[Array, "B T H d"]:
    """Attends from T new tokens of each row (spec: inkling2.md, "Attention").

    Arguments and result as `pallas_kernels.rel_attention_prefill.rel_attention_prefill`; computed
    in float32.
    """
    batch, tokens, heads, dim = q.shape
    slots, kv_heads = k.shape[1:3]
    extent = proj.shape[1]
    q, r, k, v, proj, sink, gate = (a.astype(jnp.float32) for a in (q, r, k, v, proj, sink, gate))
    first = start if window is None else jnp.full_like(start, window)  # slot of token 0
    distance = (first[:, None] + jnp.arange(tokens))[..., None] - jnp.arange(slots)  # B T S
    seen = (distance >= 0) & (jnp.arange(slots) >= (first - start)[:, None, None])
    if window is not None:
        seen &= distance < window
    valid = jnp.arange(tokens) < lengths[:, None]
    v = jnp.where((seen & valid[..., None]).any(axis=1)[:, :, None, None], v, 0)
    split = q.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    score = jnp.einsum("btkgd,bskd->btkgs", split, k) / jnp.sqrt(jnp.float32(dim))
    score = score.reshape(batch, tokens, heads, slots)
    bias = jnp.einsum("bthr,re->bthe", r, proj)
    near = ((distance >= 0) & (distance < extent))[:, :, None]
    index = jnp.broadcast_to(jnp.clip(distance, 0, extent - 1)[:, :, None], score.shape)
    score += jnp.where(near, jnp.take_along_axis(bias, index, axis=3), 0)
    score = jnp.where(seen[:, :, None], score, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([score, sink[..., None]], axis=-1), axis=-1)
    weights = weights[..., :-1].reshape(batch, tokens, kv_heads, heads // kv_heads, slots)
    out = jnp.einsum("btkgs,bskd->btkgd", weights, v).reshape(batch, tokens, heads, dim)
    return jnp.where(valid[:, :, None, None], jax.nn.sigmoid(gate) * out, 0)
