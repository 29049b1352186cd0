"""Experts of many tokens: rows sorted by expert, the two kernels, the sum over a token's picks."""

import jax
import jax.numpy as jnp

from pallas_kernels.moe_experts import kernel_many_sm90, tiles
from pallas_kernels.moe_experts.pack import PackedExperts, column_order
from pallas_kernels.moe_experts.plan import make_plan


def moe_experts(
    x: jax.Array,
    picked: jax.Array,
    weights: jax.Array,
    w13: PackedExperts,
    w2: PackedExperts,
    *,
    gate_softcap: float,
    up_softcap: float,
) -> jax.Array:
    """`moe_experts` of the package, for so many tokens that an expert has several."""
    experts, k = w13.shape[0], picked.shape[1]
    tokens = tiles.choose_tokens(picked.size, experts)
    plan = make_plan(picked, experts, tokens, align=kernel_many_sm90.ALIGN)
    rows = column_order(x)[plan.order // k]
    h = kernel_many_sm90.gate_up(rows, plan, w13, tokens, gate_softcap, up_softcap)
    y = kernel_many_sm90.down(h, plan, w2, tokens, picked.size)
    y = y.reshape(*picked.shape, -1)
    scale = weights * w2.outer[jnp.minimum(picked, experts - 1)]
    return jnp.where((picked < experts)[..., None], scale[..., None] * y, 0).sum(axis=1)
