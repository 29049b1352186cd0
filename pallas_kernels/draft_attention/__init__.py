"""Attention of a drafter's block to its context and to itself, from bare projections."""

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.draft_attention import kernel

__all__ = ["draft_attention", "unsupported"]

SPLIT_SLOTS = 1024  # of the context, for each of the splits that share it


def unsupported(tokens: int, heads: int, kv_heads: int, head_dim: int) -> str | None:
    """Says why the kernel cannot run these shapes, or None."""
    if head_dim < 32 or head_dim & (head_dim - 1):
        return f"head_dim is {head_dim}, not a power of two of at least 32"
    if (rows := kernel.tile_rows(tokens * (heads // kv_heads))) > 128:
        return f"{tokens} tokens x {heads // kv_heads} heads need {rows} rows, more than 128"
    return None


def draft_attention(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B T K d"],
    v: Float[Array, "B T K d"],
    q_norm: Float[Array, " d"],
    k_norm: Float[Array, " d"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    context: Float[Array, "B S L 2 K d"],
    start: Int[Array, " B"],
    *,
    layer: int,
    eps: float,
    interpret: bool = False,
) -> Float[Array, "B T H d"]:
    """Norms and rotates q and k, then attends to the context and to the whole block.

    (Spec: dspark.md, "One draft".)

    Args:
      q, k, v: float32 projections of the block.
      q_norm, k_norm: weights of the norms of each head.
      cos, sin: of each token's angles.
      context: keys, normed and rotated, and values of the tokens before the block, by layer.
      start: how many of the S tokens of each row are there; the others may hold anything.
      layer: static; which of the L layers attends.
      eps: of the norms.
      interpret: run in Pallas' interpreter.

    Returns:
      The outputs in the context's dtype.

    Raises:
      ValueError: a shape that the kernel does not take; the value is named.
    """
    batch, tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    if reason := unsupported(tokens, heads, kv_heads, dim):
        raise ValueError(f"draft_attention: {reason}")
    splits = min(-(-context.shape[1] // SPLIT_SLOTS), 32)
    parts, sums = kernel.split_attention(
        q, k, v, q_norm, k_norm, cos, sin, context, start, layer, eps, splits, interpret
    )
    share = jax.nn.softmax(sums, axis=2)[..., None]
    joined = (share * parts).sum(axis=2)  # [B, K, rows, d]
    joined = joined[:, :, : tokens * heads // kv_heads].reshape(batch, kv_heads, tokens, -1, dim)
    return joined.swapaxes(1, 2).reshape(q.shape).astype(context.dtype)
