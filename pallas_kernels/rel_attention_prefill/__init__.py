"""Prefill attention of many new tokens: relative bias, sink and output gate included."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.rel_attention_prefill import kernel_sm90, shear, tiles

__all__ = ["rel_attention_prefill", "unsupported"]

MAX_EXTENT = 1024  # of the bias; its table stays in shared memory


def unsupported(
    heads: int,
    kv_heads: int,
    head_dim: int,
    d_rel: int,
    extent: int,
    slots: int,
    window: int | None,
) -> str | None:
    """Says why the kernel cannot run these shapes, or None.

    Args:
      slots: of the cache of a layer without a window.
    """
    if head_dim not in (64, 128):
        return f"head_dim is {head_dim}, not 64 or 128"
    if d_rel != shear.RANKS:
        return f"d_rel is {d_rel}, not {shear.RANKS}"
    if heads % kv_heads:
        return f"{heads} heads are no multiple of {kv_heads} KV heads"
    if extent > MAX_EXTENT:
        return f"the bias has an extent of {extent}, more than {MAX_EXTENT}"
    if window is None and slots % tiles.ALIGN:
        return f"{slots} slots are not a multiple of {tiles.ALIGN}"
    if window is not None and window % shear.KEYS:
        return f"the window of {window} is not a multiple of {shear.KEYS}"
    return None


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
    interpret: Any = None,
) -> Float[Array, "B T H d"]:
    """Attends from T new tokens of each row to themselves and to what was read before.

    (Spec: inkling2.md, "Attention".)

    Args:
      q: clipped and scaled queries, bfloat16.
      r: relative vectors, bfloat16.
      k, v: bfloat16. Without a window a cache that holds the new tokens already, position p in
        slot p. With one, the keys of `window` positions before the call, then those of the call.
        Those that no valid token sees may hold anything.
      proj: bias table, bfloat16; the bias of distance δ is r · proj[:, δ] for 0 <= δ < E, else 0.
      sink: logits of the sink.
      gate: its sigmoid multiplies the output; rounded to bfloat16.
      start: position of token 0.
      lengths: valid tokens of the row, 0...T; the others give zeros.
      window: a query sees distances below it; None: all.
      interpret: `InterpretGPUParams` to run in Pallas' interpreter.

    Returns:
      The gated outputs in bfloat16.

    Raises:
      ValueError: a shape or dtype that the kernel does not take; the value is named.
    """
    tokens, heads, dim = q.shape[1:]
    slots, kv_heads = k.shape[1:3]
    d_rel, extent = proj.shape
    if reason := unsupported(heads, kv_heads, dim, d_rel, extent, slots, window):
        raise ValueError(f"rel_attention_prefill: {reason}")
    for name, x in (("q", q), ("r", r), ("k", k), ("v", v), ("proj", proj)):
        if x.dtype != jnp.bfloat16:
            raise ValueError(f"rel_attention_prefill: {name} is {x.dtype}, not bfloat16")
    if window is not None and slots != window + tokens:
        raise ValueError(
            f"rel_attention_prefill: {slots} keys, not {window} before and {tokens} of the call"
        )
    q, r, sink, gate = (_padded(x, tiles.BLOCK) for x in (q, r, sink, gate))
    k, v = (_padded(x, tiles.ALIGN) for x in (k, v))
    first = start if window is None else jnp.full_like(start, window)
    # No query sees a whole window back.
    lowest = jnp.zeros_like(start) if window is None else jnp.maximum(window - start, 1)
    out = kernel_sm90.run(
        q, r, k, v, proj, sink, gate.astype(q.dtype), first, lowest, lengths, window, interpret
    )
    return out[:, :tokens]


def _padded(x, multiple):
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple), *((0, 0),) * (x.ndim - 2)))
