"""Mixture of experts: sigmoid router and softcapped SwiGLU experts (spec: inkling2.md, "MoE")."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from inkling_jax import ops
from inkling_jax.config import TextConfig
from inkling_jax.layers import einsum, param, softcap
from inkling_jax.quant import Weights, split_outer
from pallas_kernels.moe_experts import Plan
from sharding.collectives import Collectives

GATHER_PICKS = 64  # up to here each pick fetches its expert; beyond, tokens are sorted by expert
ROWS_PER_BLOCK = 64


Experts = Callable[..., Float[Array, "N *k D"]]  # computes routed experts as `experts` below does


class Moe(nnx.Module):
    """Router and routed experts of one layer."""

    def __init__(self, config: TextConfig, dtype: DTypeLike):
        self.config = config
        n, hidden, width = (
            config.n_routed_experts,
            config.hidden_size,
            config.moe_intermediate_size,
        )
        self.gate = param((n, hidden), (None, "embed"), jnp.float32)
        self.bias = param((n,), (None,), jnp.float32, "zeros")
        self.w13 = param((n, 2 * width, hidden), ("experts", "expert_width", "embed"), dtype)
        self.w2 = param((n, hidden, width), ("experts", "embed", "expert_width"), dtype)

    def __call__(
        self,
        z: Float[Array, "B t D"],
        rounded: Float[Array, "B t D"],
        count: Int[Array, " B"],
        experts: Experts,
        collectives: Collectives,
    ) -> Float[Array, "B T *k D"]:
        """Returns the device's share of the weighted sum of each real token's experts, float32.

        Padding gives zeros. Where the router's kernel has made the plan and the device has all
        experts, the k summands instead, and those of padding may hold anything.

        Args:
          z: the device's own tokens, as the router reads them.
          rounded: the same in the dtype of products, for the experts.
          count: how many tokens of each row are real.
        """
        config = self.config
        every = collectives.gather_tokens(rounded)
        flat = every.reshape(-1, z.shape[-1])
        real = (jnp.arange(every.shape[1]) < count[:, None]).reshape(-1)
        w13, w2 = self.w13.get_value(), self.w2.get_value()
        router = (self.gate[...], self.bias[...])
        n, k, scale = config.n_routed_experts, config.num_experts_per_tok, config.route_scale
        if z.shape == every.shape and ops.takes_router(flat, w13, w2, k):
            picks, weights, plan = ops.route(z.reshape(flat.shape), *router, real, k=k, scale=scale)
            if w13.shape[0] == n:  # else it lists other devices' experts too
                experts = functools.partial(experts, plan=plan)
        else:
            picks, weights = (
                collectives.gather_tokens(x.reshape(*z.shape[:2], k)).reshape(-1, k)
                for x in route(z.reshape(-1, z.shape[-1]), *router, k, scale)
            )
            picks = jnp.where(real[:, None], picks, n)
            weights = jnp.where(real[:, None], weights, 0.0)
        caps = (config.mlp_gate_softcap, config.mlp_up_softcap)
        own = collectives.own_experts(experts)
        y = own(flat, picks, weights, w13, w2, *caps)
        return y.reshape(*every.shape[:2], *y.shape[1:])


def route(
    z: Float[Array, "N D"],
    gate: Float[Array, "n D"],
    bias: Float[Array, " n"],
    k: int,
    scale: float,
) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
    """Picks the k experts of the largest sigmoid(gate · z) + bias, ties to the lower index.

    Returns them with their weights s / (Σ s + 1e-20) · scale; the bias takes no part in these.
    """
    scores = jax.nn.sigmoid(einsum("td,nd->tn", z.astype(jnp.float32), gate))
    picks = jax.lax.top_k(scores + bias, k)[1]
    weights = jnp.take_along_axis(scores, picks, axis=-1)
    return picks, weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20) * scale


def swiglu(gate_up: Float[Array, "... F"], gate_cap: float, up_cap: float) -> Float[Array, "... I"]:
    """softcap(g) · sigmoid(g) · softcap(u) in float32, of F = 2 I interleaved rows g0, u0, g1, …"""
    pairs = gate_up.astype(jnp.float32).reshape(*gate_up.shape[:-1], -1, 2)
    g, u = pairs[..., 0], pairs[..., 1]
    return softcap(g, gate_cap) * jax.nn.sigmoid(g) * softcap(u, up_cap)


def experts(
    z: Float[Array, "N D"],
    picks: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    w13: Weights,
    w2: Weights,
    gate_cap: float,
    up_cap: float,
    plan: Plan | None = None,
) -> Float[Array, "N *k D"]:
    """Returns Σ_k weights · expert_picks(z) per token in float32; a pick of n is no expert.

    Packed experts are dequantized as they are used, never all at once. With the `plan` of the
    picks, where the router's kernel has made it, the kernel leaves the sum to what follows: its k
    summands hold anything in tokens that pick no expert.
    """
    if ops.takes_experts(z, w13, w2):
        return ops.experts(z, picks, weights, w13, w2, gate_cap, up_cap, plan)
    compute = _gathered if picks.size <= GATHER_PICKS else _by_expert
    swish = functools.partial(swiglu, gate_cap=gate_cap, up_cap=up_cap)
    return compute(z, picks, weights, w13, w2, swish)


def _gathered(z, picks, weights, w13, w2, swish):
    """Every pick multiplies with its own copy of the expert it names."""
    flat = jnp.minimum(picks.reshape(-1), w13.shape[0] - 1)
    x = jnp.repeat(z, picks.shape[1], axis=0)
    (w13, scale13), (w2, scale2) = (split_outer(w[flat], z.dtype) for w in (w13, w2))
    act = swish(scale13[:, None] * einsum("nd,nfd->nf", x, w13)).astype(z.dtype)
    y = scale2[:, None] * einsum("nf,ndf->nd", act, w2)
    return einsum("tk,tkd->td", weights, y.reshape(*picks.shape, -1))


def _by_expert(z, picks, weights, w13, w2, swish):
    """Tokens sorted by expert, in blocks of one expert each; only blocks with tokens are visited.

    The number of blocks depends on the picks, so this path has no gradient.
    """
    n, k = w13.shape[0], picks.shape[1]
    order = jnp.argsort(picks.reshape(-1), stable=True)
    expert = picks.reshape(-1)[order]
    sizes = jnp.bincount(picks.reshape(-1), length=n)
    begins = jnp.cumsum(sizes) - sizes
    blocks = -(-sizes // ROWS_PER_BLOCK)
    last_block = jnp.cumsum(blocks)

    def visit(i, out):
        e = jnp.searchsorted(last_block, i, side="right")
        rank = (i - (last_block[e] - blocks[e])) * ROWS_PER_BLOCK + jnp.arange(ROWS_PER_BLOCK)
        at = jnp.minimum(begins[e] + rank, expert.size - 1)
        assignment, mine = order[at], rank < sizes[e]
        token = jnp.where(mine, assignment // k, z.shape[0])
        x = z.at[token].get(mode="fill", fill_value=0)
        (own13, scale13), (own2, scale2) = (split_outer(w[e[None]], z.dtype) for w in (w13, w2))
        act = swish(scale13[:, None] * einsum("nd,fd->nf", x, own13[0])).astype(z.dtype)
        y = scale2[:, None] * einsum("nf,df->nd", act, own2[0])
        return out.at[token].add(weights.reshape(-1)[assignment, None] * y, mode="drop")

    return jax.lax.fori_loop(0, last_block[-1], visit, jnp.zeros(z.shape, jnp.float32))
