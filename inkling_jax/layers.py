"""Small shared math of both towers, each written as in the spec (inkling2.md)."""

import zlib
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

Init = Literal["normal", "ones", "zeros"]


def param(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: DTypeLike,
    init: Init = "normal",
) -> nnx.Param:
    """Declares a tensor once: shape, dtype, the logical name of each axis and how to draw it.

    The value is abstract; loading, sharding and random initialisation fill it in.
    """
    if len(shape) != len(axes):
        raise ValueError(f"a tensor of shape {shape} cannot have the axes {axes}")
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes, init=init)


def fill_params(abstract: nnx.State, key: PRNGKeyArray) -> nnx.State:
    """Draws declared tensors: normal with variance 1 / fan-in, or as their `init` says."""

    def draw(path, variable: nnx.Param) -> nnx.Variable:
        spec = variable.get_value()
        if variable.init != "normal":
            return variable.replace(getattr(jnp, variable.init)(spec.shape, spec.dtype))
        name = "/".join(str(k) for k in path)
        leaf_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        fan_in = spec.shape[-1]
        value = jax.random.normal(leaf_key, spec.shape, jnp.float32) / fan_in**0.5
        return variable.replace(value.astype(spec.dtype))

    flat = nnx.to_flat_state(abstract)
    return nnx.from_flat_state([(path, draw(path, v)) for path, v in flat])


def einsum(equation: str, *operands: Float[Array, "..."]) -> Float[Array, "..."]:
    """Einsum with a float32 result; float32 operands are never rounded to TF32."""
    return jnp.einsum(
        equation,
        *operands,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def rounded(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """x in `dtype` for good, where a plain conversion that is converted back may be dropped.

    XLA drops it for a GPU. That does no harm where more precision is allowed and nothing else sees
    the rounded value.
    """
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


def rms(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """rms(x) = x / sqrt(mean(x²) + eps), in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def l2_clip(x: Float[Array, "... d"], threshold: float) -> Float[Array, "... d"]:
    """clip(v) = v · min(1, threshold / (‖v‖₂ + 1e-6)), in float32."""
    x = x.astype(jnp.float32)
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    # The derivative of sqrt is infinite at 0; short vectors are not clipped, so any value will do.
    norm = jnp.sqrt(jnp.where(square > 0, square, 1.0))
    norm = jnp.where(square > 0, norm, 0.0)
    return x * jnp.minimum(1.0, threshold / (norm + 1e-6))


def softcap(x: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """cap · tanh(x / cap)."""
    return cap * jnp.tanh(x / cap)


def log_scale(position: Int[Array, "B T"], floor: int, alpha: float) -> Float[Array, "B T"]:
    """τ = 1 + alpha · log(max((position + 1) / floor, 1))."""
    return 1.0 + alpha * jnp.log(jnp.maximum((position + 1).astype(jnp.float32) / floor, 1.0))


class RMSNorm(nnx.Module):
    """rmsnorm(x, w) = rms(x) · w."""

    def __init__(self, size: int, eps: float, dtype: DTypeLike):
        self.eps = eps
        self.weight = param((size,), ("embed",), dtype, "ones")

    def __call__(self, x: Float[Array, "... D"], dtype: DTypeLike) -> Float[Array, "... D"]:
        weight = self.weight[...].astype(jnp.float32)
        return (rms(x, self.eps) * weight).astype(dtype)


class LayerNorm(nnx.Module):
    """Layer norm with weight and bias (vision tower)."""

    def __init__(self, size: int, eps: float, dtype: DTypeLike):
        self.eps = eps
        self.weight = param((size,), ("vision_embed",), dtype, "ones")
        self.bias = param((size,), ("vision_embed",), dtype, "zeros")

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        weight, bias = (w[...].astype(jnp.float32) for w in (self.weight, self.bias))
        return (y * weight + bias).astype(x.dtype)


class Linear(nnx.Module):
    """y = weight · x (+ bias), weight as published: [out, in] (vision tower)."""

    def __init__(
        self,
        shape: tuple[int, int],
        axes: tuple[str | None, str | None],
        dtype: DTypeLike,
        bias: bool,
    ):
        self.weight = param(shape, axes, dtype)
        self.bias = param(shape[:1], axes[:1], dtype, "zeros") if bias else None

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        y = einsum("...i,oi->...o", x, self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)
