"""One decoder layer: attention and experts, each read off the residual and added to it again."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from inkling_jax.attention import Attention
from inkling_jax.cache import ConvState, LayerCache
from inkling_jax.config import TextConfig
from inkling_jax.layers import RMSNorm, param
from inkling_jax.moe import Experts, Moe
from inkling_jax.residual import Reader, Residual, advance
from inkling_jax.short_conv import ShortConv
from sharding.collectives import Collectives


class DecoderLayer(nnx.Module):
    """One decoder layer; the five steps of the spec's "Decoder layer"."""

    def __init__(self, config: TextConfig, layer: int, dtype: DTypeLike):
        hidden, kernel = config.hidden_size, config.conv_kernel_size
        self.starts_block = config.starts_block(layer)
        self.sliding = config.attention(layer).sliding
        norm = functools.partial(RMSNorm, hidden, config.rms_norm_eps, dtype)
        if self.sliding:
            self.attn_norm = norm()
        else:
            self.q_norm, self.k_norm, self.v_norm = norm(), norm(), norm()
        queries = () if self.sliding else (3,)
        axes = (*(None for _ in queries), "embed")
        self.attn_query = param((*queries, hidden), axes, jnp.float32, "zeros") if layer else None
        self.attn = Attention(config, layer, dtype)
        self.attn_conv = ShortConv((hidden,), ("embed",), kernel)
        self.mlp_query = param((hidden,), ("embed",), jnp.float32, "zeros")
        self.mlp_norm = norm()
        self.moe = Moe(config, dtype)
        self.mlp_conv = ShortConv((hidden,), ("embed",), kernel)

    @property
    def attn_norms(self) -> tuple[RMSNorm, ...]:
        """The norms of attention's one input, or of those of q, k and v."""
        return (self.attn_norm,) if self.sliding else (self.q_norm, self.k_norm, self.v_norm)

    @property
    def attn_reader(self) -> Reader:
        """Steps 1 and 2; layer 0 has none, it reads the embedding."""
        assert self.attn_query is not None
        query, norms = jnp.atleast_2d(self.attn_query[...]), self.attn_norms
        return Reader(query, norms, (self.attn.wq[...].dtype,))

    def __call__(
        self,
        residual: Residual,
        inputs: tuple[Float[Array, "B T D"], ...],
        cache: LayerCache,
        start: Int[Array, " B"],
        count: Int[Array, " B"],
        experts: Experts,
        collectives: Collectives,
        following: Reader,
    ) -> tuple[Residual, tuple[Float[Array, "B T D"], ...], LayerCache]:
        """Reads a block of tokens.

        Sums stay float32; what products read has the parameters' dtype, but for the router's.
        Residual and inputs are of the device's own tokens; attention and experts read all tokens.

        Args:
          residual: as the layer before left it.
          inputs: what attention reads off it, one per norm of `attn_norms`.
          following: what reads the residual after this layer.

        Returns:
          The new residual, what `following` reads off it, the new cache.
        """
        where = (start, count, collectives)
        with jax.named_scope("attention"):
            inputs = tuple(collectives.gather_tokens(z) for z in inputs)
            z_q, z_k, z_v = inputs * 3 if self.sliding else inputs
            a, cache = self.attn(z_q, z_k, z_v, cache, *where)
            dtypes = (jnp.float32, self.attn.wq[...].dtype)
            reader = Reader(self.mlp_query[...][None], (self.mlp_norm,), dtypes)
            if self.starts_block:
                residual = residual.finish_block()
            residual, (z, rounded), attn_state = advance(
                residual, a, collectives.tp, self.attn_conv, cache.conv.attn, reader, *where
            )
        with jax.named_scope("moe"):
            m = self.moe(z, rounded, count, experts, collectives)
            axes = collectives.ep + collectives.tp
            residual, inputs, mlp_state = advance(
                residual, m, axes, self.mlp_conv, cache.conv.mlp, following, *where
            )
        conv = ConvState(cache.conv.k, cache.conv.v, attn_state, mlp_state)
        return residual, inputs, dataclasses.replace(cache, conv=conv)
