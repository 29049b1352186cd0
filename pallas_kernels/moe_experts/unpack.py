"""Reads matrices back out of the kernels' order, for whatever computes without the kernels.

Prefill and tests need plain matrices, and memory has no room for a second copy in published order.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.moe_experts.pack import (
    MXFP8_TOP,
    NVFP4_BITS,
    NVFP4_REPAIR,
    PackedExperts,
)
from pallas_kernels.moe_experts.reference import E2M1


def unpack(packed: PackedExperts) -> Float[Array, "n R C"]:
    """Returns the float32 matrices, exactly as the published format means them, rows in order."""
    n, tiles, steps, fragments, loads, _ = packed.words.shape
    word = lax.bitcast_convert_type(packed.words, jnp.uint32)
    word = word.reshape(n, tiles, steps, fragments, loads, 8, 4, 4).transpose(
        0, 1, 2, 3, 5, 6, 4, 7
    )
    word = word.reshape(*word.shape[:6], 4, loads)  # n tile step f g t j, words of an MMA
    values = {"nvfp4": _nvfp4, "mxfp8": _mxfp8, "bfloat16": _bfloat16}[packed.format](word)
    # n tile step f g t j kk h b -> n tile f h g step t j kk b
    values = values.transpose(0, 1, 3, 8, 4, 2, 5, 6, 7, 9)
    if packed.scales is not None:
        values = values * _scales(packed)[..., None, None, None]
    values = values.reshape(*values.shape[:5], -1)
    if packed.interleaved:  # rows run g of a half, then fragment: gate and up side by side
        values = values.transpose(0, 1, 3, 4, 2, 5)
    values = values.reshape(*packed.shape[:2], packed.parts, -1)
    return values[..., : packed.columns].reshape(packed.shape)


def _nvfp4(word: jax.Array) -> jax.Array:
    table = jnp.array(E2M1, jnp.float32)
    pairs = []
    for pair, (sign, *bits) in enumerate(NVFP4_BITS):
        halves = []
        for b in range(2):
            sign_half = 1 - b if pair == 2 else b
            code = sum((word >> (bit + 16 * b) & 1) << (2 - i) for i, bit in enumerate(bits))
            negative = (word >> (sign + 16 * sign_half) & 1) == 1
            halves.append(jnp.where(negative, -table[code], table[code]))
        pairs.append(jnp.stack(halves, axis=-1))
    values = jnp.stack(pairs, axis=-2)  # ... j 1 (kk h) b
    return values.reshape(*word.shape[:-1], 2, 2, 2)


def _mxfp8(word: jax.Array) -> jax.Array:
    columns = []  # of kk
    for b in range(2):
        half = word >> (16 * b)
        first = (half >> 15 & 1) << 7 | half >> 4 & 127
        second = (half >> 11 & 1) << 7 | (half >> 12 & 7) << 4 | half & 15
        codes = jnp.stack([first, second], axis=-1).astype(jnp.uint8)
        columns.append(lax.bitcast_convert_type(codes, jnp.float8_e4m3fn))
    return jnp.stack(columns, axis=-1).astype(jnp.float32)  # ... j kk h b


def _bfloat16(word: jax.Array) -> jax.Array:
    halves = jnp.stack([word & 0xFFFF, word >> 16], axis=-1).astype(jnp.uint16)
    values = lax.bitcast_convert_type(halves, jnp.bfloat16).astype(jnp.float32)
    return values.reshape(*word.shape[:-1], 2, 2, 2)


def _scales(packed: PackedExperts) -> jax.Array:
    """The scale of each lane's 16 columns: [n, tile, f, h, g, step, t]."""
    assert packed.scales is not None
    n, tiles, steps, lanes = packed.scales.shape
    code = packed.scales.reshape(n, tiles, steps, 8, lanes // 32, 2, 2)  # ... g blocks f h
    code = code.transpose(0, 1, 5, 6, 3, 2, 4).astype(jnp.int32)
    outer = packed.outer.reshape(n, *(1,) * 6)
    if packed.format == "nvfp4":
        scale = jnp.ldexp((8 + (code & 7)).astype(jnp.float32), (code >> 3) - 13)
        return scale * (outer / NVFP4_REPAIR)
    scale = jnp.ldexp(outer, code - (MXFP8_TOP + 7))
    return jnp.repeat(scale, 2, axis=-1)
