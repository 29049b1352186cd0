"""Attention with a relative position bias, a sink and an output gate (spec: inkling2.md).

Scores are formed per block of queries. The bias of a block against the keys it can reach is a band:
query i meets distance δ at key i + reach - δ, so row i of `r · proj` is shifted right by i.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from inkling_jax import ops
from inkling_jax.cache import LayerCache, read_before, write
from inkling_jax.config import TextConfig
from inkling_jax.layers import einsum, l2_clip, log_scale, param, rms, rounded
from inkling_jax.short_conv import DynamicShortConv, ShortConv, exchange
from sharding.collectives import ALONE, Collectives

MAX_QUERY_BLOCK = 256
MAX_SCORES = 2**22  # query block × keys; bounds a block's memory at long contexts


class Attention(nnx.Module):
    """Sliding or full attention of one layer."""

    def __init__(self, config: TextConfig, layer: int, dtype: DTypeLike):
        shape = config.attention(layer)
        self.config, self.shape = config, shape
        hidden, kernel, rel = config.hidden_size, config.conv_kernel_size, config.d_rel
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        self.wq = param((heads, dim, hidden), ("heads", None, "embed"), dtype)
        self.wk = param((kv_heads, dim, hidden), ("kv_heads", None, "embed"), dtype)
        self.wv = param((kv_heads, dim, hidden), ("kv_heads", None, "embed"), dtype)
        self.wr = param((heads, rel, hidden), ("heads", None, "embed"), dtype)
        self.gate = param((heads, dim, hidden), ("heads", None, "embed"), dtype)
        self.sink = param((heads, hidden), ("heads", "embed"), dtype)
        self.wo = param((hidden, heads, dim), ("embed", "heads", None), dtype)
        self.q_scale = param((heads, dim), ("heads", None), dtype, "ones")
        self.r_scale = param((heads, rel), ("heads", None), dtype, "ones")
        self.rel_proj = param((rel, shape.extent), (None, None), dtype)
        if shape.sliding:
            self.k_conv = ShortConv((kv_heads, dim), ("kv_heads", None), kernel)
            self.v_conv = ShortConv((kv_heads, dim), ("kv_heads", None), kernel)
        else:
            self.k_conv = DynamicShortConv(kv_heads, dim, hidden, kernel, dtype)
            self.v_conv = DynamicShortConv(kv_heads, dim, hidden, kernel, dtype)

    def __call__(
        self,
        z_q: Float[Array, "B T D"],
        z_k: Float[Array, "B T D"],
        z_v: Float[Array, "B T D"],
        cache: LayerCache,
        start: Int[Array, " B"],
        count: Int[Array, " B"],
        collectives: Collectives = ALONE,
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        """Reads `count[b]` tokens a row from position `start[b]` on; the result is float32."""
        block = (z_q, z_k, z_v, cache, start, count)
        collectives = ALONE if self.shape.sliding else collectives  # a window's ring is not split
        heads, rel, _ = self.wr[...].shape
        taps, ring = self.config.conv_kernel_size, collectives.own_slots(cache.k.shape[1])[1]
        if ops.takes_attention(z_q, cache, heads, rel, taps, self.shape.window, ring):
            return self._by_kernels(*block)
        return self._plainly(*block, collectives)

    def _plainly(self, z_q, z_k, z_v, cache: LayerCache, start, count, collectives):
        by_kernel = ops.takes_preparation(z_q, cache, self.config.d_rel)
        prepare = self._prepare_by_kernel if by_kernel else self._prepare
        q, r, k, v, conv = prepare(z_q, z_k, z_v, cache, start, count)
        part = collectives.own_slots(cache.k.shape[1])
        new_k, new_v = (write(x, y, start, count, part) for x, y in ((cache.k, k), (cache.v, v)))
        written = LayerCache(new_k, new_v, conv, cache.sliding)
        sink = einsum("btd,hd->bth", z_q, self.sink[...])
        gate = einsum("btd,hkd->bthk", z_q, self.gate[...])
        gated = self._attend(q, r, k, v, sink, gate, cache, written, start, count, collectives)
        return einsum("bthk,dhk->btd", gated, self.wo[...]), written

    def _attend(self, q, r, k, v, sink, gate, cache, written, start, count, collectives):
        """Gated attention of new tokens with keys `k`, in the dtype of `q`."""
        window, proj = self.shape.window, self.rel_proj[...]
        ring = collectives.own_slots(cache.k.shape[1])[1]
        by_kernel = ops.takes_prefill(q, cache.k, proj, window, ring)
        if window:
            before = window if by_kernel else window - 1
            k = jnp.concatenate((read_before(cache.k, start, before), k), axis=1)
            v = jnp.concatenate((read_before(cache.v, start, before), v), axis=1)
        else:
            k, v = written.k, written.v
        if by_kernel:
            return ops.attend_prefill(q, r, k, v, proj, sink, gate, start, count, window=window)
        attended = attend(q, k, v, r, proj, sink, start, window, collectives)
        return (jax.nn.sigmoid(gate) * attended).astype(q.dtype)

    def _by_kernels(self, z_q, z_k, z_v, cache: LayerCache, start, count):
        """The same for a few tokens: five launches, two of them in `ops.attend`."""
        conv = cache.conv
        of_q = [(z_q, w[...]) for w in (self.wq, self.wr, self.gate, self.sink)]
        of_kv = [(z_k, self.wk[...]), (z_v, self.wv[...])]
        dynamic = [*_dynamic(self.k_conv, z_k), *_dynamic(self.v_conv, z_v)]
        q, r, gate, sink, k, v, *dynamic = ops.project([*of_q, *of_kv, *dynamic])
        k_taps, v_taps = _taps(self.k_conv, dynamic[:1]), _taps(self.v_conv, dynamic[1:])
        ready = ops.prepare(
            q, r, k, v, self.q_scale[...], self.r_scale[...], k_taps, v_taps,
            cache.k, cache.v, conv.k, conv.v, start, count, **self._preparation,
        )  # fmt: skip
        conv = dataclasses.replace(conv, k=ready.k_state, v=ready.v_state)
        written = LayerCache(ready.k_cache, ready.v_cache, conv, cache.sliding)
        gated = ops.attend(
            ready.q, ready.r, written.k, written.v, self.rel_proj[...], sink, gate, start, count,
            window=self.shape.window,
        )  # fmt: skip
        rows = gated.reshape(*gated.shape[:2], -1)
        [out] = ops.project([(rows, self.wo[...].reshape(-1, rows.shape[2]))])
        return out, written

    def _prepare(self, z_q, z_k, z_v, cache: LayerCache, start, count):
        """Returns q, r, k and v of all tokens, ready for attention, and the convolutions' state."""
        config, conv = self.config, cache.conv
        q, r, u_k, u_v = self._project(z_q, z_k, z_v)
        q = l2_clip(self.q_scale[...].astype(jnp.float32) * q, config.qk_l2_clip_threshold)
        r = l2_clip(self.r_scale[...].astype(jnp.float32) * r, config.rel_l2_clip_threshold)
        if not self.shape.sliding:
            position = start[:, None] + jnp.arange(z_q.shape[1])
            tau = log_scale(position, config.log_scaling_n_floor, config.log_scaling_alpha)
            q, r = (x * tau[..., None, None] for x in (q, r))
        k, k_state = _convolve(self.k_conv, u_k, z_k, conv.k, start, count)
        v, v_state = _convolve(self.v_conv, u_v, z_v, conv.v, start, count)
        k = l2_clip(k, config.qk_l2_clip_threshold)
        v = rms(v, config.rms_norm_eps)
        # A key is the same number in the call that makes it and, later, out of the cache.
        k, v = rounded(k, cache.k.dtype), rounded(v, cache.v.dtype)
        q, r = q.astype(z_q.dtype), r.astype(z_q.dtype)
        return q, r, k, v, dataclasses.replace(conv, k=k_state, v=v_state)

    def _prepare_by_kernel(self, z_q, z_k, z_v, cache: LayerCache, start, count):
        """The same of tokens beyond those of `_by_kernels`."""
        conv, reach = cache.conv, self.config.conv_kernel_size - 1
        q, r, k, v = self._project(z_q, z_k, z_v)
        k_before, k_state = exchange(k, conv.k, start, count, reach)
        v_before, v_state = exchange(v, conv.v, start, count, reach)
        k_taps, v_taps = (
            _taps(conv, [einsum("btd,kld->btkl", *pair) for pair in _dynamic(conv, z)])
            for conv, z in ((self.k_conv, z_k), (self.v_conv, z_v))
        )
        ready = ops.prepare_long(
            q, r, k, v, self.q_scale[...], self.r_scale[...], k_taps, v_taps, k_before, v_before,
            start, count, dtype=cache.k.dtype, **self._preparation,
        )  # fmt: skip
        return *ready, dataclasses.replace(conv, k=k_state, v=v_state)

    def _project(self, z_q, z_k, z_v):
        products = ((z_q, self.wq), (z_q, self.wr), (z_k, self.wk), (z_v, self.wv))
        return [einsum("btd,hkd->bthk", z, w[...]) for z, w in products]

    @property
    def _preparation(self) -> dict[str, Any]:
        """The options of `ops.prepare` and `ops.prepare_long`."""
        config = self.config
        log_scaling = (config.log_scaling_n_floor, config.log_scaling_alpha)
        return {
            "qk_threshold": config.qk_l2_clip_threshold,
            "rel_threshold": config.rel_l2_clip_threshold,
            "eps": config.rms_norm_eps,
            "log_scaling": None if self.shape.sliding else log_scaling,
        }


def _convolve(conv: ShortConv | DynamicShortConv, u, z, state, start, count):
    if isinstance(conv, DynamicShortConv):
        return conv(u, z, state, start, count)
    return conv(u, state, start, count)


def _dynamic(conv: ShortConv | DynamicShortConv, z) -> list[tuple[Array, Array]]:
    """The product that gives a convolution's dynamic taps, where it has them."""
    return [(z, conv.dynamic[...])] if isinstance(conv, DynamicShortConv) else []


def _taps(conv: ShortConv | DynamicShortConv, dynamic: list[Array]):
    """A convolution's taps as `ops.prepare` takes them."""
    if isinstance(conv, DynamicShortConv):
        return conv.static[...], *dynamic
    return conv.weight[...]


def attend(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K d"],
    r: Float[Array, "B T H R"],
    proj: Float[Array, "R E"],
    sink: Float[Array, "B T H"],
    start: Int[Array, " B"],
    window: int | None,
    collectives: Collectives = ALONE,
) -> Float[Array, "B T H d"]:
    """Softmax attention with the bias r · proj[:, δ] for 0 ≤ δ < E and one sink logit, in float32.

    Query t of row b has position start[b] + t. Key s has position s without a window (of all keys,
    which may be split over devices), and start[b] - (window - 1) + s with one (the keys before the
    call, then those of the call).
    """
    b, t, h, d = q.shape
    kv_heads = k.shape[2]
    block = min(t, MAX_QUERY_BLOCK)
    if window is None:
        block = min(block, max(16, MAX_SCORES // k.shape[1]))
    n_blocks = -(-t // block)
    pad = n_blocks * block - t

    def grouped(x):  # [B, T, H, ...] -> [blocks, B, block, K, G, ...]
        x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(b, n_blocks, block, kv_heads, h // kv_heads, *x.shape[3:])
        return jnp.moveaxis(x, 1, 0)

    own_first = collectives.own_slots(k.shape[1])[0]
    if window is not None:
        k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (k, v))

    def one_block(args):
        first, q, r, sink = args
        band = _band(einsum("bqkgr,re->bkgqe", r, proj))
        if window is None:
            keys, values = k, v
            bias, visible = _full(band, start + first - own_first, k.shape[1])
        else:
            span = block + window - 1
            keys, values = (jax.lax.dynamic_slice_in_dim(x, first, span, axis=1) for x in (k, v))
            bias, visible = band, _sliding(start + first, block, window)
        scores = einsum("bqkgd,bskd->bkgqs", q, keys) / math.sqrt(d) + bias
        return _weigh(scores, visible[:, None, None], sink, values)

    blocks = (jnp.arange(n_blocks) * block, grouped(q), grouped(r), grouped(sink))
    if n_blocks == 1:
        parts = jax.tree.map(lambda x: x[None], one_block(jax.tree.map(lambda x: x[0], blocks)))
    else:
        parts = jax.lax.map(one_block, blocks)

    def joined(x):  # [blocks, B, block, K, G, ...] -> [B, T, H, ...]
        return jnp.moveaxis(x, 0, 1).reshape(b, t + pad, h, *x.shape[5:])[:, :t]

    values, total, top = collectives.sum_softmax(*map(joined, parts))
    return values / (total + jnp.exp(sink - top))[..., None]


def _band(bias: Float[Array, "B K G Q E"]) -> Float[Array, "B K G Q Q+E-1"]:
    """Lays bias[i, δ] at key i + E - 1 - δ of the Q + E - 1 keys that a block reaches, else 0."""
    q, extent = bias.shape[-2:]
    # Row i of the reversed bias starts at key i: rows of width n read with stride n - 1 shift so.
    rows = jnp.pad(bias[..., ::-1], ((0, 0),) * 4 + ((0, q),))
    flat = rows.reshape(*bias.shape[:3], q * (q + extent))
    return flat[..., : q * (q + extent - 1)].reshape(*bias.shape[:3], q, q + extent - 1)


def _sliding(first: Int[Array, " B"], q: int, window: int) -> Bool[Array, "B q S"]:
    """Tells which of the q + window - 1 keys each query sees: 0 ≤ δ < window, position ≥ 0."""
    query, key = jnp.arange(q)[:, None], jnp.arange(q + window - 1)
    distance = query + window - 1 - key
    exists = first[:, None, None] - (window - 1) + key >= 0
    return (distance >= 0) & (distance < window) & exists


def _full(band: Float[Array, "B K G Q N"], first: Int[Array, " B"], keys: int):
    """Returns (bias over all `keys`, which of them each query sees); the band ends at the query.

    Args:
      first: position of the block's first query, counted from the first key; it may lie outside.
    """
    q, n = band.shape[-2:]
    room = jnp.zeros((*band.shape[:-1], n + keys + n), band.dtype)
    at = jnp.clip(first - (n - q), -n, keys) + n  # of the band's first key
    place = jax.vmap(lambda x, b, at: jax.lax.dynamic_update_slice_in_dim(x, b, at, axis=-1))
    bias = place(room, band, at)[..., n : n + keys]
    position = first[:, None, None] + jnp.arange(q)[:, None]
    return bias, jnp.arange(keys) <= position


def _weigh(
    scores: Float[Array, "B K G Q S"],
    visible: Bool[Array, "B 1 1 Q S"],
    sink: Float[Array, "B Q K G"],
    values: Float[Array, "B S K d"],
) -> tuple[Float[Array, "B Q K G d"], Float[Array, "B Q K G"], Float[Array, "B Q K G"]]:
    """Returns (Σ weight · value, Σ weight, top) of the weights exp(score - top) of visible keys.

    top is the highest score, or the sink where that is higher; the sink's own weight is left out.
    """
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.maximum(jnp.max(scores, axis=-1), jnp.moveaxis(sink, 1, 3))
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(scores - top[..., None])
    weighted = einsum("bkgqs,bskd->bqkgd", weights.astype(values.dtype), values)
    return weighted, jnp.moveaxis(weights.sum(-1), 3, 1), jnp.moveaxis(top, 3, 1)
