"""Packed expert weights: NVFP4 and MXFP8 (spec: checkpoint.md, "Expert formats")."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt8

from pallas_kernels.moe_experts import PackedExperts, unpack

Format = Literal["bf16", "f32", "mxfp8", "nvfp4"]
NVFP4_BLOCK, MXFP8_BLOCK = 16, 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*E2M1, *(-v for v in E2M1))
NVFP4_DENOMINATOR = 6.0 * 448.0  # the largest e2m1 times the largest e4m3


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "scales", "outer"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class QuantTensor:
    """A stack of n matrices [R, C], packed in blocks along C.

    values: NVFP4 uint8 [n, R, C/2], two e2m1 codes a byte, the even column in the low nibble;
      MXFP8 float8_e4m3fn [n, R, C].
    scales: NVFP4 float8_e4m3fn [n, R, C/16]; MXFP8 uint8 [n, R, C/32], value 2^(byte - 127).
    outer: NVFP4 float32 [n], amax / denominator; None for MXFP8.
    """

    values: Shaped[Array, "n R Cv"]
    scales: Shaped[Array, "n R Cs"]
    outer: Float[Array, " n"] | None

    @property
    def format(self) -> Format:
        """Which of the two packings this is; NVFP4 alone has an outer scale."""
        return "mxfp8" if self.outer is None else "nvfp4"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape counted in weights, [n, R, C]."""
        n, r, c = self.values.shape
        return (n, r, 2 * c if self.format == "nvfp4" else c)

    def __getitem__(self, index) -> "QuantTensor":
        """Selects along the leading axis; an array of indices gives as many matrices."""
        return jax.tree.map(lambda a: a[index], self)


Weights = Float[Array, "_ _ _"] | QuantTensor | PackedExperts  # the last: in a kernel's order


def abstract(shape: tuple[int, int, int], fmt: Format) -> QuantTensor:
    """Returns the shapes and dtypes of a packed [n, R, C] stack in `fmt`, without values."""
    n, r, c = shape
    spec: Any = jax.ShapeDtypeStruct
    if fmt == "nvfp4":
        scales = spec((n, r, c // NVFP4_BLOCK), jnp.float8_e4m3fn)
        return QuantTensor(spec((n, r, c // 2), jnp.uint8), scales, spec((n,), jnp.float32))
    scales = spec((n, r, c // MXFP8_BLOCK), jnp.uint8)
    return QuantTensor(spec((n, r, c), jnp.float8_e4m3fn), scales, None)


def e8m0(code: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Decodes power-of-two scales: 2^(code - 127) in float32; 255 is NaN."""
    # ldexp of 1 flushes 2^-127, a subnormal, on some backends: its bits are written instead.
    bits = jnp.where(code == 0, jnp.uint32(1 << 22), code.astype(jnp.uint32) << 23)
    bits = jnp.where(code == 255, jnp.uint32(0x7FC00000), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def e2m1(packed: UInt8[Array, "... C"]) -> Float[Array, "... 2*C"]:
    """Decodes two 4-bit codes a byte to float32, the low nibble first."""
    codes = jnp.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)
    return jnp.array(E2M1_VALUES, jnp.float32)[codes]


def dequantize(weights: Weights, dtype: DTypeLike) -> Float[Array, "_ _ _"]:
    """Returns the weights as a plain array of `dtype`; the product is formed in float32."""
    if isinstance(weights, PackedExperts):
        return unpack(weights).astype(dtype)
    if not isinstance(weights, QuantTensor):
        return weights.astype(dtype)
    if weights.outer is not None:
        values, scales = e2m1(weights.values), weights.scales.astype(jnp.float32)
        scales = scales * weights.outer[..., None, None]
    else:
        values, scales = weights.values.astype(jnp.float32), e8m0(weights.scales)
    blocks = values.reshape(*scales.shape, -1) * scales[..., None]
    return blocks.reshape(values.shape).astype(dtype)


def split_outer(
    weights: Weights, dtype: DTypeLike
) -> tuple[Float[Array, "n _ _"], Float[Array, " n"]]:
    """Returns matrices of `dtype` and the float32 factors that finish their products.

    As in the kernel: packed values times block scales are exact in bfloat16, times `outer` not.
    """
    if not isinstance(weights, QuantTensor | PackedExperts) or weights.outer is None:
        return dequantize(weights, dtype), jnp.ones(weights.shape[0], jnp.float32)
    inner = dataclasses.replace(weights, outer=jnp.ones_like(weights.outer))
    return dequantize(inner, dtype), weights.outer


def quantize_mxfp8(w: Float[Array, "n R C"]) -> QuantTensor:
    """Rounds to MXFP8 with the scale that puts each block's largest value in e4m3's top binade."""
    blocks = w.astype(jnp.float32).reshape(*w.shape[:-1], -1, MXFP8_BLOCK)
    amax = jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1), 1e-30)
    exponent = jnp.clip(jnp.floor(jnp.log2(amax)) - 8, -127, 127)
    scaled = jnp.clip(blocks / jnp.exp2(exponent)[..., None], -448, 448)
    values = scaled.astype(jnp.float8_e4m3fn).reshape(w.shape)
    return QuantTensor(values, (exponent + 127).astype(jnp.uint8), None)


def quantize_nvfp4(w: Float[Array, "n R C"]) -> QuantTensor:
    """Rounds to NVFP4: one float32 scale per matrix, one e4m3 scale per 16 columns."""
    w = w.astype(jnp.float32)
    outer = jnp.maximum(jnp.max(jnp.abs(w), axis=(1, 2)), 1e-30) / NVFP4_DENOMINATOR
    blocks = w.reshape(*w.shape[:-1], -1, NVFP4_BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=-1) / E2M1[-1] / outer[:, None, None]
    scales = jnp.clip(scales, 2**-9, 448).astype(jnp.float8_e4m3fn)
    scaled = blocks / (scales.astype(jnp.float32) * outer[:, None, None])[..., None]
    midpoints = (jnp.array(E2M1[1:]) + jnp.array(E2M1[:-1])) / 2
    code = jnp.searchsorted(midpoints, jnp.abs(scaled)).astype(jnp.uint8)
    code = (code + jnp.where(scaled < 0, jnp.uint8(8), jnp.uint8(0))).reshape(w.shape)
    return QuantTensor(code[..., 0::2] | (code[..., 1::2] << 4), scales, outer)
