"""Decode attention over a ring or linear cache: relative bias, sink and output gate included."""

from jaxtyping import Array, Float, Int

from pallas_kernels.rel_attention_decode import kernel, tiles
from pallas_kernels.rel_attention_decode.tiles import TileConfig

__all__ = ["TileConfig", "rel_attention_decode", "unsupported"]


def unsupported(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    d_rel: int,
    slots: int,
    window: int | None,
) -> str | None:
    """Says why the kernel cannot run these shapes, or None."""
    if head_dim not in (64, 128):
        return f"head_dim is {head_dim}, not 64 or 128"
    if d_rel < 16 or d_rel & (d_rel - 1):
        return f"d_rel is {d_rel}, not a power of two of at least 16"
    if heads % kv_heads:
        return f"{heads} heads are no multiple of {kv_heads} KV heads"
    if (rows := kernel.tile_rows(tokens, heads // kv_heads)) > 128:
        return f"{tokens} tokens x {heads // kv_heads} heads need {rows} rows, more than 128"
    if window is not None and window < slots < window + tokens - 1:
        return f"{slots} slots cannot hold a window of {window} for {tokens} tokens"
    return None


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
    config: TileConfig | None = None,
    interpret: bool = False,
) -> Float[Array, "B T H d"]:
    """Attends from the T newest tokens of each row to its cache, which holds them already.

    Position p of row b lives in slot p % S. Slots that no valid token can see may hold anything.
    (Spec: inkling2.md, "Attention".)

    Args:
      q: clipped and scaled queries.
      r: relative vectors.
      k, v: cache, in q's dtype.
      proj: bias table; the bias of distance δ is r · proj[:, δ] for 0 <= δ < E, else 0.
      sink: logits of the sink.
      gate: its sigmoid multiplies the output.
      start: position of token 0.
      lengths: valid tokens of the row, 0...T; the others give zeros.
      window: a query sees distances below it; None: all. Without a window, or with S <= window,
        every position must have a slot of its own.
      config: tiles, by default chosen from the shapes.
      interpret: run in Pallas' interpreter.

    Returns:
      The gated outputs in q's dtype.

    Raises:
      ValueError: a shape that the kernel does not take; the value is named.
    """
    batch, tokens, heads, dim = q.shape
    slots, kv_heads = k.shape[1:3]
    if reason := unsupported(tokens, heads, kv_heads, dim, r.shape[-1], slots, window):
        raise ValueError(f"rel_attention_decode: {reason}")
    if window is not None and slots <= window:
        window = None  # no position is ever far enough from another
    if config is None:
        # A window begins within a block of keys.
        reach = slots if window is None else min(slots, window + tokens + tiles.KEYS - 2)
        rows = kernel.tile_rows(tokens, heads // kv_heads)
        config = tiles.choose(batch, kv_heads, rows, reach)
    partial_out, lse = kernel.split_attention(
        q, r, k, v, proj, start, lengths, window, config, interpret
    )
    return kernel.combine(partial_out, lse, sink, gate, lengths, q.dtype, interpret)
