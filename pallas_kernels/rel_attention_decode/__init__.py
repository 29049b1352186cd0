"""Decode attention over a ring or linear cache: relative bias, sink and output gate included."""

import jax

from pallas_kernels.rel_attention_decode import kernel, tiles
from pallas_kernels.rel_attention_decode.tiles import TileConfig

__all__ = ["TileConfig", "rel_attention_decode", "unsupported"]


def unsupported(tokens: int, heads: int, kv_heads: int, head_dim: int, d_rel: int) -> str | None:
    """Says why the kernel cannot run these shapes, or None."""
    if head_dim not in (64, 128):
        return f"head_dim is {head_dim}, not 64 or 128"
    if d_rel < 16 or d_rel & (d_rel - 1):
        return f"d_rel is {d_rel}, not a power of two of at least 16"
    if heads % kv_heads:
        return f"{heads} heads are no multiple of {kv_heads} KV heads"
    if (rows := kernel.tile_rows(tokens, heads // kv_heads)) > 128:
        return f"{tokens} tokens x {heads // kv_heads} heads need {rows} rows, more than 128"
    return None


def rel_attention_decode(
    q: jax.Array,
    r: jax.Array,
    k: jax.Array,
    v: jax.Array,
    proj: jax.Array,
    sink: jax.Array,
    gate: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    window: int | None,
    config: TileConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attends from the T newest tokens of each row to its cache, which holds them already.

    Position p of row b lives in slot p % S. Slots that no valid token can see may hold anything.

    Args:
      q: [B, T, H, d] clipped and scaled queries.
      r: [B, T, H, R] relative vectors.
      k, v: [B, S, K, d] cache.
      proj: [R, E] bias table; the bias of distance δ is r · proj[:, δ] for 0 <= δ < E, else 0.
      sink: [B, T, H] logits of the sink.
      gate: [B, T, H, d]; its sigmoid multiplies the output.
      start: int32 [B], position of token 0.
      lengths: int32 [B], valid tokens of the row, 0...T; the others give zeros.
      window: a query sees distances below it; None: all, and then S must hold every position.
      config: tiles, by default chosen from the shapes.
      interpret: run in Pallas' interpreter.

    Returns:
      [B, T, H, d] in the gate's dtype.

    Raises:
      ValueError: a shape that the kernel does not take; the value is named.
    """
    batch, tokens, heads, dim = q.shape
    slots, kv_heads = k.shape[1:3]
    if reason := unsupported(tokens, heads, kv_heads, dim, r.shape[-1]):
        raise ValueError(f"rel_attention_decode: {reason}")
    if window is not None and slots < window + tokens - 1:
        raise ValueError(
            f"rel_attention_decode: {slots} slots cannot hold a window of {window} for {tokens} "
            "tokens"
        )
    if config is None:
        reach = slots if window is None else min(slots, window + tokens - 1)
        rows = kernel.tile_rows(tokens, heads // kv_heads)
        config = tiles.choose(batch, kv_heads, rows, reach)
    partial_out, lse = kernel.split_attention(
        q, r, k, v, proj, start, lengths, window, config, interpret
    )
    return kernel.combine(partial_out, lse, sink, gate, lengths, interpret)
