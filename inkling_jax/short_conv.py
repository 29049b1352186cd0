"""Short causal depthwise convolutions in float32 (spec: inkling2.md, "Short convolution").

Both take the cached inputs of the tokens before the call and return them with the new ones added.
Where tokens are split over devices, each convolves its own and asks its neighbour for those before.
"""

import math

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from inkling_jax.cache import read_before, write
from inkling_jax.layers import einsum, param
from sharding.collectives import ALONE, Collectives


def exchange(
    u: Float[Array, "B T *ch"],
    state: Float[Array, "B S *ch"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    reach: int,
    collectives: Collectives = ALONE,
) -> tuple[Float[Array, "B reach *ch"], Float[Array, "B S *ch"]]:
    """Returns the `reach` inputs before the device's own u, and the state with the new ones."""
    before = collectives.halo(u, read_before(state, start, reach))
    last, kept = collectives.last_tokens(u, count, state.shape[1])
    return before, write(state, last, start + count - kept, kept)


class ShortConv(nnx.Module):
    """Static taps: y_t = (Σ_j w[ch, j] · u_{t-(c-1)+j} + u_t) / sqrt(c + 1)."""

    def __init__(self, channels: tuple[int, ...], axes: tuple[str | None, ...], kernel: int):
        self.weight = param((*channels, kernel), (*axes, None), jnp.float32)

    def __call__(
        self,
        u: Float[Array, "B T *ch"],
        state: Float[Array, "B S *ch"],
        start: Int[Array, " B"],
        count: Int[Array, " B"],
        collectives: Collectives = ALONE,
    ) -> tuple[Float[Array, "B T *ch"], Float[Array, "B S *ch"]]:
        """Convolves u, the device's own of `count[b]` tokens a row from position `start[b]` on."""
        w, t = self.weight[...], u.shape[1]
        c = w.shape[-1]
        before, state = exchange(u, state, start, count, c - 1, collectives)
        inputs = jnp.concatenate((before, u), axis=1)
        y = sum((w[..., j] * inputs[:, j : j + t] for j in range(c)), u)
        return y / math.sqrt(c + 1), state


class DynamicShortConv(nnx.Module):
    """Static taps plus taps computed from the current token, shared within a KV head:
    y_t = (Σ_l (static[l] + (dynamic · z_t)[head, l]) · u_{t-l} + u_t) / sqrt(2c + 1)."""

    def __init__(self, kv_heads: int, head_dim: int, hidden: int, kernel: int, dtype: DTypeLike):
        self.static = param(
            (kernel, kv_heads, head_dim), (None, "kv_heads", None), jnp.float32, "zeros"
        )
        self.dynamic = param((kv_heads, kernel, hidden), ("kv_heads", None, "embed"), dtype)

    def __call__(
        self,
        u: Float[Array, "B T K d"],
        z: Float[Array, "B T D"],
        state: Float[Array, "B S K d"],
        start: Int[Array, " B"],
        count: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T K d"], Float[Array, "B S K d"]]:
        """Convolves u, whose taps come from z, the normed input of u's projection."""
        static, t = self.static[...], u.shape[1]
        c = static.shape[0]
        dynamic = einsum("btd,kld->btkl", z, self.dynamic[...])
        before, state = exchange(u, state, start, count, c - 1)
        inputs = jnp.concatenate((before, u), axis=1)
        y = u
        for lag in range(c):
            taps = static[lag] + dynamic[..., lag, None]
            y = y + taps * inputs[:, c - 1 - lag : c - 1 - lag + t]
        return y / math.sqrt(2 * c + 1), state
