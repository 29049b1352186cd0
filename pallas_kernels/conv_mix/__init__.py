"""Short convolution, residual update, attention-residual mix and norms of one sublayer's output."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike

from pallas_kernels.conv_mix import kernel, kernel_long

__all__ = [
    "MAX_ROWS",
    "ConvMix",
    "ConvMixLong",
    "conv_mix",
    "conv_mix_long",
    "unsupported",
    "unsupported_long",
]

MAX_ROWS = 64  # a cluster each; more are prefill
MAX_HELD = 96  # elements of the sources in the registers of a thread, of which it has 255


class ConvMix(NamedTuple):
    """What a sublayer leaves behind.

    Attributes:
      z: normed inputs of what follows, [B, T, D] for each query in each dtype.
      partial: float32 [B, T, D] running sum of the block.
      scale: float32 [B, T] 1 / rms of `partial`.
      state: float32 [B, S, D] the convolution's ring with the new inputs.
    """

    z: tuple[jax.Array, ...]
    partial: jax.Array
    scale: jax.Array
    state: jax.Array


def unsupported(rows: int, width: int, blocks: int) -> str | None:
    """Says why the kernel cannot run these shapes, or None.

    Args:
      rows: tokens of all sequences.
      width: hidden size.
      blocks: finished blocks.
    """
    if width % kernel.THREADS:
        return f"hidden size {width} is not a multiple of {kernel.THREADS}"
    if rows > MAX_ROWS:
        return f"{rows} tokens, the kernel takes at most {MAX_ROWS}"
    if not blocks:
        return "no block is finished, the kernel mixes at least one"
    if (held := (blocks + 1) * kernel.elements(width)) > MAX_HELD:
        return f"{blocks} blocks leave {held} elements to a thread, it holds at most {MAX_HELD}"
    return None


def conv_mix(
    u: jax.Array,
    partial: jax.Array | None,
    blocks: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    queries: jax.Array,
    norms: Sequence[jax.Array],
    weight: jax.Array,
    state: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    dtypes: Sequence[DTypeLike],
    eps: float,
    norm_eps: float,
    peers: Sequence[str] = (),
    interpret: Any = None,
) -> ConvMix:
    """Convolves a sublayer's output, adds it to the residual and reads the next inputs off it.

    Sources of the mix are the finished blocks and the new partial. Tokens that are not valid add
    nothing to it, whatever u holds; what else is said of them means nothing. (Spec: inkling2.md,
    "Block attention residuals".)

    Args:
      u: float32 [B, T, D] sublayer output, or [B, T, n, D] its summands.
      partial: float32 [B, T, D] running sum of the block, None where a block starts.
      blocks: finished blocks, float32 [B, T, D] each.
      scales: 1 / rms of each finished block, float32 [B, T], kept from its creation.
      queries: float32 [nq, D], one per following input.
      norms: RMSNorm weight [D] of each following input.
      weight: float32 [D, c] taps, the last weighs the current token.
      state: float32 [B, S, D] past inputs, position p in slot p % S, S >= c - 1 + T; donated.
      start: int32 [B], position of token 0.
      lengths: int32 [B], valid tokens of a row.
      dtypes: in which each z is wanted.
      eps, norm_eps: of the sources' rms, of the norms.
      peers: mesh axes over which `u` is one summand of many; see `allreduce_conv_mix`.
      interpret: `InterpretGPUParams` to run in Pallas' interpreter, without peers.

    Raises:
      ValueError: a shape that the kernel does not take; the value is named.
    """
    batch, tokens, *_, width = u.shape
    if reason := unsupported(batch * tokens, width, len(blocks)):
        raise ValueError(f"conv_mix: {reason}")
    if (needed := weight.shape[1] - 1 + tokens) > state.shape[1]:
        raise ValueError(f"conv_mix: the ring has {state.shape[1]} slots, it needs {needed}")
    summands = u.reshape(batch, tokens, -1, width)
    given = kernel.Operands(
        start, lengths, tuple(scales), summands, weight.T, queries, tuple(norms), tuple(blocks),
        partial,
    )  # fmt: skip
    options = (tuple(dtypes), eps, norm_eps, tuple(peers), interpret)
    return ConvMix(*kernel.run(given, state, *options))


class ConvMixLong(NamedTuple):
    """What many tokens leave behind; see `ConvMix`."""

    z: tuple[jax.Array, ...]
    partial: jax.Array
    scale: jax.Array


def unsupported_long(rows: int, width: int) -> str | None:
    """Says why the kernel of many tokens cannot run these shapes, or None."""
    if width % kernel_long.LEAST:
        return f"hidden size {width} is not a multiple of {kernel_long.LEAST}"
    if rows * width >= 1 << 31:
        return f"{rows} tokens of {width} are more than 32 bits count"
    return None


def conv_mix_long(
    u: jax.Array,
    before: jax.Array,
    partial: jax.Array | None,
    blocks: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    queries: jax.Array,
    norms: Sequence[jax.Array],
    weight: jax.Array,
    *,
    dtypes: Sequence[DTypeLike],
    eps: float,
    norm_eps: float,
    interpret: bool = False,
) -> ConvMixLong:
    """`conv_mix` of any number of tokens, which leaves writing the ring to its caller.

    Args:
      u: float32 [B, T, D] sublayer output, every token of it.
      before: float32 [B, c - 1, D] inputs of the tokens before these, zeros before position 0.
      partial: as `conv_mix` takes it; donated.
      (others): as `conv_mix` takes them.

    Raises:
      ValueError: a shape that the kernel does not take; the value is named.
    """
    batch, tokens, width = u.shape
    if reason := unsupported_long(batch * tokens, width):
        raise ValueError(f"conv_mix_long: {reason}")
    total = kernel_long.add(partial, u, before, weight.T, interpret)
    z, scale = kernel_long.mix(
        total, blocks, scales, queries, norms, dtypes, eps, norm_eps, interpret
    )
    return ConvMixLong(z, total, scale)
