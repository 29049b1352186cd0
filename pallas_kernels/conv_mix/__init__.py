"""Short convolution, residual update, attention-residual mix and norms of one sublayer's output."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.conv_mix import kernel, tiles
from pallas_kernels.conv_mix.tiles import SLOTS, TileConfig

__all__ = ["ConvMix", "TileConfig", "conv_mix", "empty_gram", "unsupported"]


class ConvMix(NamedTuple):
    """What a sublayer leaves behind.

    Attributes:
      z: [nq, B, T, D] normed inputs of the next sublayer, in the sources' dtype.
      partial: [B, T, D] running sum of the block; None where it went into `sources[count]`.
      sources: [M, B, T, D] as given, with row `count` written if `keep`.
      gram: float32 [B, T, 16, 16] with row and column `count` written.
      state: float32 [B, S, D] the convolution's ring with the new inputs.
    """

    z: jax.Array
    partial: jax.Array | None
    sources: jax.Array
    gram: jax.Array
    state: jax.Array


def empty_gram(batch: int, tokens: int) -> jax.Array:
    """The inner products of no sources: float32 [B, T, 16, 16]."""
    return jnp.zeros((batch, tokens, SLOTS, SLOTS), jnp.float32)


def unsupported(width: int, sources: int) -> str | None:
    """Says why the kernel cannot run these shapes, or None."""
    if tiles.choose(width).columns < 32:
        return f"hidden size {width} is not a multiple of 32"
    if sources > SLOTS:
        return f"{sources} sources, the kernel takes at most {SLOTS}"
    return None


def conv_mix(
    u: jax.Array,
    partial: jax.Array | None,
    sources: jax.Array,
    gram: jax.Array,
    queries: jax.Array,
    norms: jax.Array,
    weight: jax.Array,
    state: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    count: int,
    keep: bool,
    eps: float,
    config: TileConfig | None = None,
    interpret: bool = False,
) -> ConvMix:
    """Convolves a sublayer's output, adds it to the residual and reads the next inputs off it.

    Sources are the finished blocks `sources[:count]` and the new partial. Rows of tokens that are
    not valid are left unwritten. (Spec: inkling2.md, "Block attention residuals".)

    Args:
      u: [B, T, P, D] sublayer output as P summands (experts of a token, ranks).
      partial: [B, T, D] running sum of the block, None where a block starts.
      sources: [M, B, T, D] finished blocks in rows 0...count - 1; donated.
      gram: float32 [B, T, 16, 16] inner products of the sources; donated.
      queries: float32 [nq, D], one per following input.
      norms: [nq, D] RMSNorm weights of those inputs.
      weight: float32 [D, c] taps, the last weighs the current token.
      state: float32 [B, S, D] past inputs, position p in slot p % S, S >= c - 1 + T; donated.
      start: int32 [B], position of token 0.
      lengths: int32 [B], valid tokens of a row.
      count: finished blocks.
      keep: round the new partial to the sources' dtype and store it in `sources[count]` (the end of
        a layer), where it becomes a finished block when `count` grows.
      eps: of all norms.
      config: tiles, by default chosen from the width.
      interpret: run in Pallas' interpreter.

    Raises:
      ValueError: a shape that the kernel does not take; the value is named.
    """
    if reason := unsupported(u.shape[-1], count + 1):
        raise ValueError(f"conv_mix: {reason}")
    if (needed := weight.shape[1] - 1 + u.shape[1]) > state.shape[1]:
        raise ValueError(f"conv_mix: the ring has {state.shape[1]} slots, it needs {needed}")
    config = config or tiles.choose(u.shape[-1])
    out, state, products = kernel.accumulate(
        u, partial, sources, queries, weight, state, start, lengths, count, keep, config, interpret
    )
    sources, partial = (out, None) if keep else (sources, out)
    z, gram = kernel.apply(
        partial, products, sources, gram, queries, norms, lengths, count, eps, config, interpret
    )
    return ConvMix(z, partial, sources, gram, state)
