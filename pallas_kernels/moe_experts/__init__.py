"""Experts: both projections of a mixture-of-experts layer, from packed weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels.moe_experts import kernel_sm90, many, tiles
from pallas_kernels.moe_experts.pack import (
    PackedExperts,
    pack_bfloat16,
    pack_mxfp8,
    pack_nvfp4,
)
from pallas_kernels.moe_experts.plan import Plan, make_plan, work_items
from pallas_kernels.moe_experts.unpack import unpack

__all__ = [
    "PackedExperts",
    "Plan",
    "make_plan",
    "moe_experts",
    "moe_experts_slots",
    "pack_bfloat16",
    "pack_mxfp8",
    "pack_nvfp4",
    "unpack",
    "unsupported",
    "work_items",
]

MAX_TOKENS = 64  # of the decode kernel; more take that for many tokens


def unsupported(hidden: int, inner: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Says why no kernel can run these shapes (activations [T, hidden]), or None."""
    if hidden % 64:
        return f"hidden size {hidden} is not a multiple of 64"
    if inner % 16:
        return f"expert width {inner} is not a multiple of 16"
    if dtype != jnp.bfloat16:
        return f"activations are {jnp.dtype(dtype).name}, not bfloat16"
    return None


def moe_experts_slots(
    x: BFloat16[Array, "T D"],
    weights: Float[Array, "T k"],
    plan: Plan,
    w13: PackedExperts,
    w2: PackedExperts,
    *,
    gate_softcap: float,
    up_softcap: float,
) -> Float[Array, "T k D"]:
    """Runs the planned experts of few tokens; leaves the sum over a token's picks to the consumer.

    Args:
      x: activations; rows outside the plan are not read.
      weights: float32 routing weights.
      plan: the work, from `make_plan`.
      w13: packed [N, 2 I, D], interleaved.
      w2: packed [N, D, I].
      gate_softcap, up_softcap: c in c tanh(x / c).

    Returns:
      float32, weighted; slots outside the plan hold anything.

    Raises:
      ValueError: a shape or dtype that the kernel does not take.
    """
    tokens, hidden = x.shape
    inner = w2.columns
    if reason := unsupported(hidden, inner, x.dtype):
        raise ValueError(f"moe_experts: {reason}")
    if tokens > MAX_TOKENS:
        raise ValueError(f"moe_experts: {tokens} tokens, slots are of at most {MAX_TOKENS}")
    if weights.shape[0] * weights.shape[1] != plan.order.shape[0]:
        raise ValueError(f"moe_experts: weights {weights.shape} do not fit {plan.order.shape[0]}")
    items = plan.count.shape[0]
    warps = tiles.choose_warps(2 * inner, hidden, items)
    h = kernel_sm90.gate_up(x, plan, w13, warps, gate_softcap, up_softcap)
    y = kernel_sm90.down(h, weights, plan, w2, tiles.choose_warps(hidden, inner, items))
    return y.reshape(*weights.shape, hidden)


def moe_experts(
    x: BFloat16[Array, "T D"],
    picked: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    w13: PackedExperts,
    w2: PackedExperts,
    *,
    gate_softcap: float,
    up_softcap: float,
) -> Float[Array, "T D"]:
    """The float32 sum of a token's experts by their weights; a pick of N or more is no expert.

    A row that picks none gives zeros, whatever it holds. The other arguments are those of
    `moe_experts_slots`.
    """
    experts = w13.shape[0]
    softcaps = dict(gate_softcap=gate_softcap, up_softcap=up_softcap)
    if x.shape[0] > MAX_TOKENS:
        if reason := unsupported(x.shape[1], w2.columns, x.dtype):
            raise ValueError(f"moe_experts: {reason}")
        return many.moe_experts(x, picked, weights, w13, w2, **softcaps)
    y = moe_experts_slots(x, weights, make_plan(picked, experts), w13, w2, **softcaps)
    return jnp.where((picked < experts)[..., None], y, 0).sum(axis=1)
