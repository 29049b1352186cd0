"""Block attention residuals: what every sublayer reads and adds to (spec: inkling2.md, "AttnRes").

A sublayer's end is one step here, from its output to the inputs of what follows: the sum over
devices, the short convolution, the residual, the mix and the norms. Decoding runs it as one kernel.
"""

import dataclasses
import math
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from inkling_jax import ops
from inkling_jax.layers import RMSNorm, einsum
from inkling_jax.short_conv import ShortConv, exchange
from sharding.collectives import Collectives

EPS = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residual:
    """The sources of the mix, in float32.

    Attributes:
      blocks: the finished blocks.
      partial: the running sum of the current block, None before its first summand.
      scales: 1 / rms of each of `sources`, kept from its creation.
    """

    blocks: tuple[Float[Array, "B T D"], ...]
    partial: Float[Array, "B T D"] | None
    scales: tuple[Float[Array, "B T"], ...]

    @classmethod
    def start(cls, x: Float[Array, "B T D"]) -> Self:
        """Returns the residual that consists of the embedding."""
        return cls((), x, (_inverse_rms(x),))

    @property
    def sources(self) -> tuple[Float[Array, "B T D"], ...]:
        """The finished blocks and the running sum."""
        return self.blocks if self.partial is None else (*self.blocks, self.partial)

    def finish_block(self) -> Self:
        """Returns the residual in which the running sum is a finished block."""
        return dataclasses.replace(self, blocks=self.sources, partial=None)


class Reader(NamedTuple):
    """What reads the residual: queries, the norms of what they mix, the dtypes of each result."""

    queries: Float[Array, "n D"]
    norms: tuple[RMSNorm, ...]
    dtypes: tuple[DTypeLike, ...]


def mix(query: Float[Array, "*n D"], residual: Residual) -> Float[Array, "*n B T D"]:
    """Mixes the finished blocks and the running sum, each normalised to unit root mean square.

    p = softmax_i(query · n_i / sqrt(D)), result Σ_i p_i n_i in float32; several queries, several
    results.
    """
    pairs = zip(residual.sources, residual.scales, strict=True)
    sources = jnp.stack([x * scale[..., None] for x, scale in pairs])
    scores = einsum("...d,sbtd->...sbt", query, sources) / math.sqrt(sources.shape[-1])
    weights = jax.nn.softmax(scores, axis=-3)
    return einsum("...sbt,sbtd->...btd", weights, sources)


def advance(
    residual: Residual,
    u: Float[Array, "B U *n D"],
    axes: tuple[str, ...],
    conv: ShortConv,
    state: Float[Array, "B S D"],
    reader: Reader,
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    collectives: Collectives,
) -> tuple[Residual, tuple[Float[Array, "B T D"], ...], Float[Array, "B S D"]]:
    """Ends a sublayer: convolves its output, adds it to the residual and reads what follows.

    Args:
      u: the device's share of the sublayer's output, float32, of all tokens; or n summands of it,
        of which those of padding may hold anything.
      axes: mesh axes over which the shares add up.
      conv: its convolution, whose `state` has the tokens before the call.
      reader: what follows.
      start, count: row b has `count[b]` real tokens from position `start[b]` on.

    Returns:
      The new residual; the inputs of what follows, one per query and dtype; the state.
    """
    blocks, partial, weight = residual.blocks, residual.partial, conv.weight[...]
    scales = residual.scales[: len(blocks)]
    norms = tuple(norm.weight[...] for norm in reader.norms)
    mixing = (partial, blocks, scales, reader.queries, norms, weight)
    options = {"dtypes": reader.dtypes, "eps": EPS, "norm_eps": reader.norms[0].eps}
    split = bool(collectives.sp)
    few = not split and ops.takes_mix(u, blocks, weight, state)
    if u.ndim == 4 and (axes or not few):
        real = jnp.arange(u.shape[1]) < count[:, None]
        u = jnp.where(real[..., None], u.sum(axis=2), 0)
    if few:
        inputs, partial, scale, state = ops.conv_mix(
            u, axes, *mixing, state, start, count, **options
        )
        return Residual(blocks, partial, (*scales, scale)), inputs, state
    by_kernel = ops.takes_long_mix(u, split, weight, state)
    u = collectives.sum(u, axes)
    if by_kernel:
        before, state = exchange(u, state, start, count, weight.shape[1] - 1, collectives)
        inputs, partial, scale = ops.conv_mix_long(u, before, *mixing, **options)
        return Residual(blocks, partial, (*scales, scale)), inputs, state
    y, state = conv(u, state, start, count, collectives)
    partial = y if partial is None else partial + y
    residual = Residual(blocks, partial, (*scales, _inverse_rms(partial)))
    mixed = mix(reader.queries, residual)
    pairs = zip(reader.norms, mixed, strict=True)
    inputs = tuple(norm(h, dtype) for norm, h in pairs for dtype in reader.dtypes)
    return residual, inputs, state


def _inverse_rms(x: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    return jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1) + EPS)
