"""The one place that chooses between a kernel of `pallas_kernels` and its plain version.

A choice depends on the device, the dtypes and the shapes alone, is made while a function is traced
and is logged once: as a warning where a GPU has the kernel and the kernel refuses.
"""

import functools
import logging
import os

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from inkling_jax.quant import QuantTensor, Weights
from pallas_kernels import conv_mix as conv_mix_kernel
from pallas_kernels import moe_experts, rel_attention_decode
from pallas_kernels.conv_mix import ConvMix
from pallas_kernels.moe_experts import PackedExperts

EXPERTS, ATTENTION, MIX = "moe_experts", "rel_attention_decode", "conv_mix"
KERNEL = "kernel"
SWITCH = "INKLING_JAX_KERNELS"  # 0 turns the kernels off, to compare with the plain versions
CAPABILITY = 9.0  # Hopper; newer devices run the same code
MAX_QUERIES = 8  # longer calls are prefill, which attends in plain JAX

# Traced and lowered once for all layers of the same shapes.
_conv_mix = jax.jit(conv_mix_kernel.conv_mix, static_argnames=("dtype", "eps", "norm_eps"))

_log = logging.getLogger(__name__)
_chosen: dict[str, str] = {}


def chosen() -> dict[str, str]:
    """Returns what decodes with each operation traced so far: "kernel", or why it does not."""
    return dict(_chosen)


def device_refusal() -> str | None:
    """Says why no kernel can run on the device that functions are traced for, or None."""
    if target := jax.sharding.get_abstract_mesh().abstract_device:  # a build for another machine
        platform, capability = target.platform, None
    else:
        device = _default_device()
        platform = getattr(device, "platform", device)
        capability = getattr(device, "compute_capability", None)
    if platform not in ("gpu", "cuda"):
        return f"the platform is {platform}"
    if capability is not None and float(capability) < CAPABILITY:
        return f"the compute capability is {capability}, kernels need {CAPABILITY}"
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    return None


def _default_device():
    return jax.config.jax_default_device or jax.devices()[0]  # pyright: ignore[reportAttributeAccessIssue]


def packs_experts(hidden: int, width: int, dtype: DTypeLike) -> bool:
    """Tells whether experts of these sizes are to be packed, for activations of `dtype`."""
    return device_refusal() is None and not moe_experts.unsupported(1, hidden, width, dtype)


def pack_experts(weights: Weights, interleaved: bool) -> PackedExperts:
    """Reorders a layer's experts [n, R, C] for the kernel; every value stays what it is.

    Args:
      weights: quantized or bfloat16.
      interleaved: rows run gate0, up0, gate1, … (w13).
    """
    if not isinstance(weights, QuantTensor):
        assert not isinstance(weights, PackedExperts)
        return moe_experts.pack_bfloat16(weights, interleaved=interleaved)
    values, scales, outer = weights.values, weights.scales, weights.outer
    if outer is None:
        return moe_experts.pack_mxfp8(values, scales, interleaved=interleaved)
    return moe_experts.pack_nvfp4(values, scales, outer, interleaved=interleaved)


def takes_experts(z: Float[Array, "N D"], w13: Weights, w2: Weights) -> bool:
    """Tells whether the kernel computes the experts of so few tokens."""
    tokens, hidden = z.shape
    if tokens > moe_experts.MAX_TOKENS:
        return False
    refusal = moe_experts.unsupported(tokens, hidden, w2.shape[2], z.dtype)
    if not (isinstance(w13, PackedExperts) and isinstance(w2, PackedExperts)):
        refusal = refusal or "the experts were not packed by `load`"
    return _choose(EXPERTS, refusal)


def experts(
    z: Float[Array, "N D"],
    picks: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    w13: Weights,
    w2: Weights,
    gate_cap: float,
    up_cap: float,
) -> Float[Array, "N D"]:
    """`moe.experts` by the kernel."""
    assert isinstance(w13, PackedExperts) and isinstance(w2, PackedExperts)
    return moe_experts.moe_experts(
        z, picks, weights, w13, w2, gate_softcap=gate_cap, up_softcap=up_cap
    )


def takes_attention(
    q: Float[Array, "B T H d"],
    r: Float[Array, "B T H R"],
    k: Float[Array, "B S K d"],
    window: int | None,
    ring: int,
) -> bool:
    """Tells whether the kernel attends from so few tokens to the cache `k`, which has them.

    Args:
      ring: slots of the whole cache, S unless it is split over devices.
    """
    _, tokens, heads, dim = q.shape
    if tokens > MAX_QUERIES:
        return False
    slots, kv_heads = k.shape[1:3]
    refusal = rel_attention_decode.unsupported(
        tokens, heads, kv_heads, dim, r.shape[3], slots, window
    )
    if q.dtype != jnp.bfloat16 or k.dtype != jnp.bfloat16:
        refusal = f"queries and keys are {q.dtype.name} and {k.dtype.name}, not bfloat16"
    if slots != ring:
        refusal = f"each device has {slots} of the {ring} slots of full layers (cp)"
    return _choose(ATTENTION, refusal)


def attend(
    q: Float[Array, "B T H d"],
    r: Float[Array, "B T H R"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K d"],
    proj: Float[Array, "R E"],
    sink: Float[Array, "B T H"],
    gate: Float[Array, "B T H d"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    window: int | None,
) -> Float[Array, "B T H d"]:
    """Gated attention to the cache by the kernel, in q's dtype; `gate` before its sigmoid."""
    return rel_attention_decode.rel_attention_decode(
        q, r, k, v, proj, sink, gate, start, count, window=window
    )


def takes_mix(
    u: Float[Array, "B T D"],
    blocks: tuple[Float[Array, "B T D"], ...],
    weight: Float[Array, "D c"],
    state: Float[Array, "B S D"],
) -> bool:
    """Tells whether the kernel ends a sublayer of so few tokens, above these finished blocks."""
    batch, tokens, hidden = u.shape
    reach = weight.shape[1] - 1 + tokens
    if batch * tokens > conv_mix_kernel.MAX_ROWS or reach > state.shape[1]:
        return False
    return _choose(MIX, conv_mix_kernel.unsupported(batch * tokens, hidden, len(blocks)))


def conv_mix(
    u: Float[Array, "B T D"],
    partial: Float[Array, "B T D"] | None,
    blocks: tuple[Float[Array, "B T D"], ...],
    scales: tuple[Float[Array, "B T"], ...],
    queries: Float[Array, "n D"],
    norms: tuple[Float[Array, " D"], ...],
    weight: Float[Array, "D c"],
    state: Float[Array, "B S D"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    dtype: DTypeLike,
    eps: float,
    norm_eps: float,
) -> ConvMix:
    """`residual.advance` by the kernel; `partial` is None where a block starts."""
    return _conv_mix(
        u, partial, blocks, scales, queries, norms, weight, state, start, count,
        dtype=dtype, eps=eps, norm_eps=norm_eps,
    )  # fmt: skip


def _choose(op: str, refusal: str | None) -> bool:
    """Tells whether the kernel runs; remembers the choice and logs it."""
    device, mesh = device_refusal(), jax.sharding.get_abstract_mesh()
    if mesh.size > 1 and not mesh.are_all_axes_manual:
        refusal = f"the model is spread over {mesh.size} devices"
    choice = device or refusal or KERNEL
    _chosen[op] = choice
    _announce(op, choice, logging.INFO if device or not refusal else logging.WARNING)
    return choice == KERNEL


@functools.cache
def _announce(op: str, choice: str, level: int) -> None:
    """Logs a choice the first time that it is made."""
    _log.log(level, "%s: %s", op, choice if choice == KERNEL else f"plain JAX, {choice}")
