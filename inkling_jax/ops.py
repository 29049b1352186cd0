"""The one place that chooses between a kernel of `pallas_kernels` and its plain version.

A choice depends on the dtypes and shapes here, and on the device by `kernel_choice`.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from inkling_jax import kernel_choice
from inkling_jax.cache import LayerCache
from inkling_jax.kernel_choice import choose
from inkling_jax.quant import QuantTensor, Weights
from pallas_kernels import allreduce_conv_mix as allreduce_conv_mix_kernel
from pallas_kernels import conv_mix as conv_mix_kernel
from pallas_kernels import (
    draft_attention,
    moe_experts,
    projections,
    qkv_prep,
    rel_attention_decode,
    rel_attention_prefill,
    router,
    sampling,
)
from pallas_kernels.conv_mix import ConvMix
from pallas_kernels.moe_experts import PackedExperts, Plan

EXPERTS, ATTENTION, ROUTER = "moe_experts", "rel_attention_decode", "router"
SAMPLING, DRAFT, IMAGE = "sampling", "draft_attention", "image_attention"
MIX, REDUCE_MIX = "conv_mix", "allreduce_conv_mix"
MIX_LONG, PREPARE_LONG, PREFILL = "conv_mix_long", "qkv_prep_long", "rel_attention_prefill"
OPERATIONS = (
    *(EXPERTS, ATTENTION, ROUTER, SAMPLING, MIX, REDUCE_MIX, DRAFT),
    *(MIX_LONG, PREPARE_LONG, PREFILL, IMAGE),
)
# Of 64, NCCL's sum in front of conv_mix is faster (scripts/results/sharded_h200.json); what lies
# between was not measured.
REDUCED_ROWS = 8
MAX_QUERIES = 8  # longer calls are prefill

# Kernels, which `pallas_kernels` documents, jitted: tracing and lowering them is slow, and so done
# once for layers of the same shapes.
_CAPS = ("gate_softcap", "up_softcap")
_moe_experts = jax.jit(moe_experts.moe_experts, static_argnames=_CAPS)
_moe_experts_slots = jax.jit(moe_experts.moe_experts_slots, static_argnames=_CAPS)
route = jax.jit(router.route, static_argnames=("k", "scale"))
_project = jax.jit(projections.project)
_OF_QKV = ("qk_threshold", "rel_threshold", "eps", "log_scaling")
prepare = jax.jit(qkv_prep.qkv_prep, static_argnames=_OF_QKV)
prepare_long = jax.jit(qkv_prep.qkv_prep_long, static_argnames=(*_OF_QKV, "dtype"))
attend = jax.jit(rel_attention_decode.rel_attention_decode, static_argnames="window")
attend_prefill = jax.jit(rel_attention_prefill.rel_attention_prefill, static_argnames="window")
attend_draft = jax.jit(draft_attention.draft_attention, static_argnames=("layer", "eps"))
_OF_MIX = ("dtypes", "eps", "norm_eps")
_conv_mix = jax.jit(conv_mix_kernel.conv_mix, static_argnames=_OF_MIX)
_allreduce_conv_mix = jax.jit(
    allreduce_conv_mix_kernel.allreduce_conv_mix, static_argnames=("axes", *_OF_MIX)
)
conv_mix_long = jax.jit(conv_mix_kernel.conv_mix_long, static_argnames=_OF_MIX)
prefix_end = sampling.prefix_end


def packs_experts(hidden: int, width: int, dtype: DTypeLike) -> bool:
    """Tells whether experts of these sizes are to be packed, for activations of `dtype`."""
    refusal = kernel_choice.device_refusal() or moe_experts.unsupported(hidden, width, dtype)
    return refusal is None


def pack_experts(weights: Weights, interleaved: bool, axes: tuple[str, ...] = ()) -> PackedExperts:
    """Reorders a layer's experts [n, R, C] for the kernel; every value stays what it is.

    Args:
      weights: quantized or bfloat16.
      interleaved: rows run gate0, up0, gate1, … (w13).
      axes: mesh axes over which R or C is split.
    """
    if not isinstance(weights, QuantTensor):
        assert not isinstance(weights, PackedExperts)
        return moe_experts.pack_bfloat16(weights, interleaved=interleaved)
    values, scales, outer = weights.values, weights.scales, weights.outer
    if outer is None:
        return moe_experts.pack_mxfp8(values, scales, interleaved=interleaved, axes=axes)
    return moe_experts.pack_nvfp4(values, scales, outer, interleaved=interleaved)


def takes_experts(z: Float[Array, "N D"], w13: Weights, w2: Weights) -> bool:
    """Tells whether a kernel computes the experts, of few tokens or of many."""
    tokens, hidden = z.shape
    refusal = moe_experts.unsupported(hidden, w2.shape[2], z.dtype)
    if tokens > moe_experts.MAX_TOKENS:
        refusal = refusal or kernel_choice.hopper_refusal()
    if not (isinstance(w13, PackedExperts) and isinstance(w2, PackedExperts)):
        refusal = refusal or "the experts were not packed by `load`"
    return choose(EXPERTS, refusal)


def experts(
    z: Float[Array, "N D"],
    picks: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    w13: Weights,
    w2: Weights,
    gate_cap: float,
    up_cap: float,
    plan: Plan | None,
) -> Float[Array, "N *k D"]:
    """`moe.experts` by a kernel."""
    assert isinstance(w13, PackedExperts) and isinstance(w2, PackedExperts)
    caps = {"gate_softcap": gate_cap, "up_softcap": up_cap}
    if plan is None:
        return _moe_experts(z, picks, weights, w13, w2, **caps)
    return _moe_experts_slots(z, weights, plan, w13, w2, **caps)


def takes_router(z: Float[Array, "N D"], w13: Weights, w2: Weights, k: int) -> bool:
    """Tells whether the kernel routes so few tokens, to experts that a kernel computes from `z`."""
    tokens, hidden = z.shape
    if tokens > router.MAX_TOKENS:
        return False
    refusal = router.unsupported(tokens, hidden, k)
    if not takes_experts(z, w13, w2):
        refusal = refusal or "the experts take no plan"
    return choose(ROUTER, refusal)


def takes_attention(
    z: Float[Array, "B T D"],
    cache: LayerCache,
    heads: int,
    d_rel: int,
    taps: int,
    window: int | None,
    ring: int,
) -> bool:
    """Tells whether kernels project, prepare and attend from so few tokens, writing the cache.

    Args:
      z: an input of the projections.
      cache: of the layer.
      heads, d_rel, taps, window: query heads, size of r, convolution kernel, reach.
      ring: slots of the whole cache, those of `cache` unless it is split over devices.
    """
    _, tokens, hidden = z.shape
    if tokens > MAX_QUERIES:
        return False
    slots, kv_heads, dim = cache.k.shape[1:]
    refusal = (
        projections.unsupported(1, hidden)
        or projections.unsupported(1, heads * dim)
        or qkv_prep.unsupported(tokens, dim, d_rel, slots, cache.conv.k.shape[1], taps)
        or rel_attention_decode.unsupported(tokens, heads, kv_heads, dim, d_rel, slots, window)
    )
    if z.dtype != jnp.bfloat16 or cache.k.dtype != jnp.bfloat16:
        refusal = f"activations and keys are {z.dtype.name} and {cache.k.dtype.name}, not bfloat16"
    if slots != ring:
        refusal = f"each device has {slots} of the {ring} slots of full layers (cp)"
    return choose(ATTENTION, refusal)


def takes_preparation(z: Float[Array, "B T D"], cache: LayerCache, d_rel: int) -> bool:
    """Tells whether a kernel makes q, r, k and v of more tokens than `takes_attention` takes."""
    if z.shape[1] <= MAX_QUERIES:
        return False
    refusal = qkv_prep.unsupported_long(cache.k.shape[3], d_rel)
    if z.dtype != cache.k.dtype:
        refusal = f"activations are {z.dtype.name}, keys {cache.k.dtype.name}"
    return choose(PREPARE_LONG, refusal)


def project(
    products: Sequence[tuple[Float[Array, "B T _"], Float[Array, "..."]]],
) -> list[Float[Array, "B T ..."]]:
    """Multiplies each input by its weight [..., D]; float32 [B, T, ...].

    Up to 64 rows take one launch of the kernel; more are left to XLA's products.
    """
    flat = [(x.reshape(-1, x.shape[2]), w.reshape(-1, w.shape[-1])) for x, w in products]
    if flat[0][0].shape[0] <= projections.MAX_TOKENS:
        outs = _project(flat)
    else:
        outs = [jnp.dot(x, w.T, preferred_element_type=jnp.float32) for x, w in flat]
    return [
        y.reshape(*x.shape[:2], *w.shape[:-1]) for y, (x, w) in zip(outs, products, strict=True)
    ]


def takes_prefill(
    q: Float[Array, "B T H d"],
    cache: Float[Array, "B S K d"],
    proj: Float[Array, "R E"],
    window: int | None,
    ring: int,
) -> bool:
    """Tells whether the kernel attends from so many tokens; `ring` as in `takes_attention`."""
    if q.shape[1] <= MAX_QUERIES:
        return False
    (heads, _), (slots, kv_heads, dim), (d_rel, extent) = q.shape[2:], cache.shape[1:], proj.shape
    sizes = (heads, kv_heads, dim, d_rel, extent, slots, window)
    refusal = rel_attention_prefill.unsupported(*sizes) or kernel_choice.hopper_refusal()
    if not q.dtype == cache.dtype == proj.dtype == jnp.bfloat16:
        refusal = f"activations and keys are {q.dtype.name} and {cache.dtype.name}, not bfloat16"
    if slots != ring:
        refusal = f"each device has {slots} of the {ring} slots of full layers (cp)"
    return choose(PREFILL, refusal)


def takes_draft(z: Float[Array, "B T D"], context: Float[Array, "B S L 2 K d"], heads: int) -> bool:
    """Tells whether kernels project a drafter's block and attend from it to its context."""
    (_, tokens, hidden), (kv_heads, dim) = z.shape, context.shape[4:]
    refusal = (
        projections.unsupported(1, hidden)
        or projections.unsupported(1, heads * dim)
        or draft_attention.unsupported(tokens, heads, kv_heads, dim)
    )
    if z.dtype != jnp.bfloat16:
        refusal = f"activations are {z.dtype.name}, not bfloat16"
    return choose(DRAFT, refusal)


def takes_sampling(vocabulary: int) -> bool:
    """Tells whether the kernel finds where the filters end a row of so many logits."""
    return choose(SAMPLING, sampling.unsupported(vocabulary))


def takes_mix(
    u: Float[Array, "B T *n D"],
    blocks: tuple[Float[Array, "B T D"], ...],
    weight: Float[Array, "D c"],
    state: Float[Array, "B S D"],
) -> bool:
    """Tells whether a kernel ends a sublayer of so few tokens, above these finished blocks."""
    batch, tokens, *_, hidden = u.shape
    if not _few(u, weight, state):
        return False
    return choose(MIX, conv_mix_kernel.unsupported(batch * tokens, hidden, len(blocks)))


def takes_long_mix(
    u: Float[Array, "B T D"], split: bool, weight: Float[Array, "D c"], state: Float[Array, "B S D"]
) -> bool:
    """Tells whether a kernel ends a sublayer of more tokens, or of a part of them if `split`."""
    batch, tokens, hidden = u.shape
    if not split and _few(u, weight, state):
        return False
    return choose(MIX_LONG, conv_mix_kernel.unsupported_long(batch * tokens, hidden))


def _few(u, weight, state) -> bool:
    """Tells whether the ring has room for the new inputs beside what the convolution needs."""
    reach = weight.shape[1] - 1 + u.shape[1]
    return u.shape[0] * u.shape[1] <= conv_mix_kernel.MAX_ROWS and reach <= state.shape[1]


def conv_mix(
    u: Float[Array, "B T *n D"],
    axes: tuple[str, ...],
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
    dtypes: tuple[DTypeLike, ...],
    eps: float,
    norm_eps: float,
) -> ConvMix:
    """`residual.advance` by a kernel of what is added up over `axes`, of few rows within it.

    `partial` is None where a block starts; `u` is in summands only where there are no axes.
    """
    run = _conv_mix
    if axes:
        sizes = {axis: jax.lax.axis_size(axis) for axis in axes}
        refusal = allreduce_conv_mix_kernel.unsupported(sizes, axes)
        if u.shape[0] * u.shape[1] <= REDUCED_ROWS and choose(REDUCE_MIX, refusal):
            run = functools.partial(_allreduce_conv_mix, axes=axes)
        else:
            u = jax.lax.psum(u, axes)
    return run(
        u, partial, blocks, scales, queries, norms, weight, state, start, count,
        dtypes=dtypes, eps=eps, norm_eps=norm_eps,
    )  # fmt: skip
