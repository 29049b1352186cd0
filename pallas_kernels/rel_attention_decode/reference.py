"""Decode attention with the relative bias in plain jnp: the specification of the kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rel_attention_decode(
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
    """Attends from the T newest tokens of each row to its cache (spec: inkling2.md, "Attention").

    Arguments and result as `pallas_kernels.rel_attention_decode.rel_attention_decode`; computed in
    float32.
    """
    batch, tokens, heads, dim = q.shape
    slots, kv_heads = k.shape[1:3]
    extent = proj.shape[1]
    q, r, k, v, proj, sink, gate = (a.astype(jnp.float32) for a in (q, r, k, v, proj, sink, gate))
    query_position = start[:, None] + jnp.arange(tokens)  # B T
    end = (start + lengths)[:, None]
    # The newest position below `end` that lives in each slot of the ring; negative: none yet.
    newest = end - 1 - jnp.mod(end - 1 - jnp.arange(slots), slots)  # B S
    distance = query_position[:, :, None] - newest[:, None]  # B T S
    seen = (newest >= 0)[:, None] & (distance >= 0)
    if window is not None:
        seen &= distance < window
    v = jnp.where(seen.any(axis=1)[:, :, None, None], v, 0)
    query = q.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    score = jnp.einsum("btkgd,bskd->btkgs", query, k) / jnp.sqrt(jnp.float32(dim))
    score = score.reshape(batch, tokens, heads, slots)
    table = jnp.einsum("bthr,re->bthe", r, proj)
    near = (distance >= 0) & (distance < extent)
    index = jnp.clip(distance, 0, extent - 1)[:, :, None]
    bias = jnp.take_along_axis(table, jnp.broadcast_to(index, score.shape), axis=3)
    score = jnp.where(seen[:, :, None], score + jnp.where(near[:, :, None], bias, 0), -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([score, sink[..., None]], axis=-1), axis=-1)
    weights = weights[..., :-1].reshape(batch, tokens, kv_heads, heads // kv_heads, slots)
    out = jnp.einsum("btkgs,bskd->btkgd", weights, v).reshape(batch, tokens, heads, dim)
    valid = jnp.arange(tokens) < lengths[:, None]
    return jnp.where(valid[:, :, None, None], jax.nn.sigmoid(gate) * out, 0)
