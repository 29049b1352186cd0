"""Image tower: 40 × 40 pixel tiles in, one feature per tile out (spec: inkling2.md, "Image")."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from inkling_jax import kernel_choice, ops
from inkling_jax.config import VisionConfig
from inkling_jax.layers import LayerNorm, Linear, einsum, param

QUERY_BLOCK = 512


class VisionTower(nnx.Module):
    """Patch embedding, transformer blocks, merger."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike):
        self.config = config
        hidden, grid = config.hidden_size, config.posemb_grid_size
        patch = 3 * config.patch_size**2
        self.patch_embedding = param((hidden, patch), ("vision_embed", None), dtype)
        self.position_embedding = param((grid * grid, hidden), (None, "vision_embed"), dtype)
        self.class_embedding = param((hidden,), ("vision_embed",), dtype)
        self.class_position = param((hidden,), ("vision_embed",), dtype)
        self.ln_pre = LayerNorm(hidden, config.layer_norm_eps, dtype)
        self.layers = nnx.List(
            [VisionLayer(config, dtype) for _ in range(config.num_hidden_layers)]
        )
        merged, inner = config.spatial_merge_size**2 * hidden, config.projection_hidden_dim
        bias = config.projector_bias
        self.proj_in = Linear((inner, merged), ("vision_mlp", "vision_embed"), dtype, bias)
        self.proj_out = Linear(
            (config.text_hidden_size, inner), ("embed", "vision_mlp"), dtype, bias
        )

    def __call__(
        self, tiles: Float[Array, "P t t 3"], grid: Int[Array, "2"]
    ) -> Float[Array, "P D"]:
        """Encodes one image of grid = (rows, columns) tiles in raster order.

        Tiles beyond rows · columns are padding. Returns each tile's feature in the tower's dtype.
        """
        config, dtype = self.config, self.patch_embedding[...].dtype
        m, p = config.spatial_merge_size, config.patch_size
        n = tiles.shape[0] * m * m
        patches = tiles.reshape(-1, m, p, m, p, 3).swapaxes(2, 3).reshape(n, -1)
        row, col = _patch_positions(tiles.shape[0], m, grid[1])
        x = einsum("np,hp->nh", patches.astype(dtype), self.patch_embedding[...])
        x = (x + self._positions(row, col, grid * m)).astype(dtype)
        first = (self.class_embedding[...] + self.class_position[...]).astype(dtype)
        x = self.ln_pre(jnp.concatenate((first[None], x)))
        zero = jnp.zeros(1, row.dtype)
        rope = _axial_angles(
            jnp.concatenate((zero, row + 1)), jnp.concatenate((zero, col + 1)), config
        )
        count = 1 + grid[0] * grid[1] * m * m
        for layer in self.layers:
            x = layer(x, rope, count)
        merged = x[1:].reshape(tiles.shape[0], -1)
        return self.proj_out(jax.nn.gelu(self.proj_in(merged), approximate=False))

    def _positions(self, row: Int[Array, " n"], col: Int[Array, " n"], size: Int[Array, "2"]):
        """Bilinear sample of the learned grid at the centre of each patch, float32."""
        side = self.config.posemb_grid_size
        table = self.position_embedding[...].astype(jnp.float32).reshape(side, side, -1)

        def corners(index, length):
            source = (index.astype(jnp.float32) + 0.5) * (side / length.astype(jnp.float32)) - 0.5
            source = jnp.clip(source, 0, side - 1)
            low = jnp.floor(source).astype(jnp.int32)
            weight = source - low.astype(jnp.float32)
            return ((low, 1 - weight), (jnp.minimum(low + 1, side - 1), weight))

        return sum(
            table[r, c] * (wr * wc)[:, None]
            for r, wr in corners(row, size[0])
            for c, wc in corners(col, size[1])
        )


class VisionLayer(nnx.Module):
    """x += λ1 · attention(LN(x)); x += λ2 · mlp(LN(x))."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike):
        hidden, mlp = config.hidden_size, config.intermediate_size
        self.ln_1 = LayerNorm(hidden, config.layer_norm_eps, dtype)
        self.ln_2 = LayerNorm(hidden, config.layer_norm_eps, dtype)
        self.ls_1 = param((hidden,), ("vision_embed",), dtype, "ones")
        self.ls_2 = param((hidden,), ("vision_embed",), dtype, "ones")
        self.attn = VisionAttention(config, dtype)
        self.mlp = VisionMlp(hidden, mlp, dtype)

    def __call__(self, x: Float[Array, "n D"], rope: Float[Array, "n d"], count: Int[Array, ""]):
        x = x + self.ls_1[...] * self.attn(self.ln_1(x), rope, count)
        return x + self.ls_2[...] * self.mlp(self.ln_2(x))


class VisionMlp(nnx.Module):
    """proj · gelu(fc · x)."""

    def __init__(self, hidden: int, inner: int, dtype: DTypeLike):
        self.fc = Linear((inner, hidden), ("vision_mlp", "vision_embed"), dtype, bias=True)
        self.proj = Linear((hidden, inner), ("vision_embed", "vision_mlp"), dtype, bias=True)

    def __call__(self, x: Float[Array, "n D"]) -> Float[Array, "n D"]:
        return self.proj(jax.nn.gelu(self.fc(x), approximate=False))


class VisionAttention(nnx.Module):
    """Attention of one image's tokens over each other, q and k rotated by their place."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike):
        self.heads = config.num_attention_heads
        shape = (config.hidden_size, config.hidden_size)
        axes = ("vision_heads", "vision_embed")
        self.q, self.k, self.v = (Linear(shape, axes, dtype, bias=True) for _ in range(3))
        self.out = Linear(shape, (axes[1], axes[0]), dtype, bias=True)

    def __call__(self, x: Float[Array, "n D"], rope: Float[Array, "n d"], count: Int[Array, ""]):
        """Attends over the first `count` of the n tokens."""
        n = x.shape[0]
        q, k, v = (f(x).reshape(n, self.heads, -1) for f in (self.q, self.k, self.v))
        q, k = _rotate(q, rope), _rotate(k, rope)
        attend = _attend_by_cudnn if _takes_cudnn(q) else _attend
        return self.out(attend(q, k, v, count).astype(x.dtype).reshape(n, -1))


def _attend(q, k, v, count):
    """Attention to the first `count` tokens, float32, a block of queries at a time."""
    n = q.shape[0]

    def one_block(q):
        scores = einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        scores = jnp.where(jnp.arange(n) < count, scores, -jnp.inf)
        return einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)

    if n <= QUERY_BLOCK:
        return one_block(q)
    pad = -n % QUERY_BLOCK
    blocks = jnp.pad(q, ((0, pad), (0, 0), (0, 0))).reshape(-1, QUERY_BLOCK, *q.shape[1:])
    return jax.lax.map(one_block, blocks).reshape(n + pad, *q.shape[1:])[:n]


def _takes_cudnn(q: Float[Array, "n h d"]) -> bool:
    """Tells whether cuDNN attends within pictures."""
    refusal = None
    if q.shape[2] % 8:
        refusal = f"head size {q.shape[2]} is not a multiple of 8"
    if q.dtype != jnp.bfloat16:
        refusal = f"activations are {q.dtype.name}, not bfloat16"
    return kernel_choice.choose(ops.IMAGE, refusal)


def _attend_by_cudnn(q, k, v, count):
    """The same by cuDNN, in the dtype of q."""
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    return attend(q[None], k[None], v[None], key_value_seq_lengths=count[None])[0]


def _patch_positions(n_tiles: int, merge: int, columns: Int[Array, ""]):
    """Returns (row, column) of every patch, tile by tile, each tile's patches in raster order."""
    tile = jnp.arange(n_tiles)
    inner = jnp.arange(merge)
    row = (tile // columns)[:, None, None] * merge + inner[:, None]
    col = (tile % columns)[:, None, None] * merge + inner
    shape = (n_tiles, merge, merge)
    return tuple(jnp.broadcast_to(x, shape).reshape(-1) for x in (row, col))


def _axial_angles(
    row: Int[Array, " n"], col: Int[Array, " n"], config: VisionConfig
) -> Float[Array, "n d"]:
    """Angles [column · freqs, row · freqs], each for an interleaved pair of channels."""
    half = config.head_dim // 2
    freqs = config.rope_theta ** -(jnp.arange(0, half, 2, dtype=jnp.float32) / half)
    angles = [x[:, None].astype(jnp.float32) * freqs for x in (col, row)]
    return jnp.repeat(jnp.concatenate(angles, axis=-1), 2, axis=-1)


def _rotate(x: Float[Array, "n h d"], angle: Float[Array, "n d"]) -> Float[Array, "n h d"]:
    """Rotates interleaved pairs (x1, x2) by their angle, in float32."""
    y = x.astype(jnp.float32)
    pairs = y.reshape(*y.shape[:-1], -1, 2)
    turned = jnp.stack((-pairs[..., 1], pairs[..., 0]), axis=-1).reshape(y.shape)
    return (y * jnp.cos(angle)[:, None] + turned * jnp.sin(angle)[:, None]).astype(x.dtype)
