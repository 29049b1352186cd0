"""The layers of a drafter, and what they remember of the tokens before a block (spec: dspark.md).

A block of one anchor and masks sees the context and all of itself at once.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from inkling_jax import ops
from inkling_jax.drafter_config import DrafterConfig
from inkling_jax.layers import RMSNorm, einsum, param, rms


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Keys and values of all tokens before the anchor, of all L layers of the drafter.

    A token at position p lies in slot p, so that one write takes it in. The target's cache says how
    many tokens there are, so rolling that back rolls back this.
    """

    kv: Float[Array, "B S L 2 K d"]


def init_context(config: DrafterConfig, batch: int, capacity: int, dtype: DTypeLike) -> Context:
    """Returns an empty context for `capacity` tokens a row."""
    of_token = (config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim)
    return Context(jnp.zeros((batch, capacity, *of_token), dtype))


def rotary(
    position: Int[Array, "B T"], dim: int, theta: float
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Returns cosine and sine of the angle by which each pair of `dim` values is rotated."""
    half = dim // 2
    inv_freq = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position.astype(jnp.float32)[..., None] * inv_freq
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "B T *n d"], position: Int[Array, "B T"], theta: float
) -> Float[Array, "B T *n d"]:
    """Rotary embedding of half-split pairs (x[i], x[i + d/2]), in float32."""
    some = range(2, x.ndim - 1)
    cos, sin = (jnp.expand_dims(t, some) for t in rotary(position, x.shape[-1], theta))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


class DraftAttention(nnx.Module):
    """Attention from a block to its context and to all of itself."""

    def __init__(self, config: DrafterConfig, dtype: DTypeLike):
        self.theta, self.eps = config.rope_theta, config.rms_norm_eps
        hidden, dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.wq = param((heads, dim, hidden), ("heads", None, "embed"), dtype)
        self.wk = param((kv_heads, dim, hidden), ("kv_heads", None, "embed"), dtype)
        self.wv = param((kv_heads, dim, hidden), ("kv_heads", None, "embed"), dtype)
        self.wo = param((hidden, heads, dim), ("embed", "heads", None), dtype)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, dtype)

    def __call__(
        self,
        z: Float[Array, "B T D"],
        context: Context,
        layer: int,
        start: Int[Array, " B"],
        differentiable: bool,
    ) -> Float[Array, "B T D"]:
        """Attends from positions `start[b]`… to the `start[b]` tokens before and to the block."""
        heads = self.wq[...].shape[0]
        if not differentiable and ops.takes_draft(z, context.kv, heads):
            return self._by_kernels(z, context.kv, layer, start)
        return self._plainly(z, context.kv[:, :, layer], start)

    def _plainly(self, z, context, start):
        b, t, _ = z.shape
        slots, _, kv_heads, dim = context.shape[1:]
        position = start[:, None] + jnp.arange(t)
        q = self.q_norm(einsum("btd,hkd->bthk", z, self.wq[...]), jnp.float32)
        q = rotate(q, position, self.theta).astype(z.dtype)
        q = q.reshape(b, t, kv_heads, -1, dim)  # [B, T, K, G, d]
        block = keys_values([self], z, position)[:, :, 0]
        before = jnp.arange(slots) < start[:, None]
        scores = einsum("btkgd,bskd->bkgts", q, context[:, :, 0])
        scores = jnp.where(before[:, None, None, None], scores, -jnp.inf)
        scores = jnp.concatenate((scores, einsum("btkgd,bskd->bkgts", q, block[:, :, 0])), axis=-1)
        probs = jax.nn.softmax(scores / math.sqrt(dim), axis=-1).astype(z.dtype)
        old, new = jnp.split(probs, [slots], axis=-1)
        attended = einsum("bkgts,bskd->btkgd", old, context[:, :, 1])
        attended += einsum("bkgts,bskd->btkgd", new, block[:, :, 1])
        return einsum("bthk,dhk->btd", attended.reshape(b, t, -1, dim), self.wo[...])

    def _by_kernels(self, z, kv, layer, start):
        """The same in three launches, or four where splits of a long context are joined."""
        q, k, v = ops.project([(z, w[...]) for w in (self.wq, self.wk, self.wv)])
        position = start[:, None] + jnp.arange(z.shape[1])
        norms = self.q_norm.weight[...], self.k_norm.weight[...]
        cos, sin = rotary(position, q.shape[-1], self.theta)
        attended = ops.attend_draft(q, k, v, *norms, cos, sin, kv, start, layer=layer, eps=self.eps)
        rows = attended.reshape(*z.shape[:2], -1)
        [out] = ops.project([(rows, self.wo[...].reshape(-1, rows.shape[2]))])
        return out


def keys_values(
    layers: Sequence[DraftAttention], z: Float[Array, "B T D"], position: Int[Array, "B T"]
) -> Float[Array, "B T L 2 K d"]:
    """Returns rotated keys, and values, that L layers make of the same tokens."""
    k, v = (
        jnp.stack([einsum("btd,hkd->bthk", z, w[...]) for w in weights], axis=2)
        for weights in ([layer.wk for layer in layers], [layer.wv for layer in layers])
    )
    norm = jnp.stack([layer.k_norm.weight[...] for layer in layers]).astype(jnp.float32)
    k = rotate(rms(k, layers[0].eps) * norm[:, None], position, layers[0].theta)
    return jnp.stack((k, v), axis=3).astype(z.dtype)


class DraftLayer(nnx.Module):
    """One decoder layer of the drafter."""

    def __init__(self, config: DrafterConfig, dtype: DTypeLike):
        hidden, width = config.hidden_size, config.intermediate_size
        norm = functools.partial(RMSNorm, hidden, config.rms_norm_eps, dtype)
        self.attn_norm, self.mlp_norm = norm(), norm()
        self.attn = DraftAttention(config, dtype)
        self.gate = param((width, hidden), ("mlp", "embed"), dtype)
        self.up = param((width, hidden), ("mlp", "embed"), dtype)
        self.down = param((hidden, width), ("embed", "mlp"), dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        layer: int,
        start: Int[Array, " B"],
        differentiable: bool,
    ) -> Float[Array, "B T D"]:
        """Returns the block after attention and MLP, each with its residual."""
        dtype = x.dtype
        a = self.attn(self.attn_norm(x, dtype), context, layer, start, differentiable)
        x = (x.astype(jnp.float32) + a).astype(dtype)
        y = self.mlp_norm(x, dtype)
        gate, up = (einsum("btd,fd->btf", y, w[...]) for w in (self.gate, self.up))
        y = einsum("btf,df->btd", (jax.nn.silu(gate) * up).astype(dtype), self.down[...])
        return (x.astype(jnp.float32) + y).astype(dtype)
