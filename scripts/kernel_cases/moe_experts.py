"""Expert rows: formats, tokens, valid rows, a TP4 rank's width."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import moe_experts
from pallas_kernels.moe_experts import reference
from pallas_kernels.moe_experts.shapes import (
    EXPERTS,
    GATE_SOFTCAP,
    HIDDEN,
    PICKS,
    UP_SOFTCAP,
    WIDTH,
    WIDTH_TP4,
)
from scripts.kernel_cases.case import CALLS, Case, all_of

CAPS = {"gate_softcap": GATE_SOFTCAP, "up_softcap": UP_SOFTCAP}


def cases() -> Iterator[Case]:
    """Yields the rows; the last is what XLA makes of gather, dequantize and two products."""
    for tokens in (1, 8):
        yield _case("nvfp4", tokens)
        yield _case("nvfp4", tokens, inner=WIDTH_TP4)
        yield _case("mxfp8", tokens, experts=128)
        yield _case("mxfp8", tokens, inner=WIDTH_TP4)
    for valid in (1, 2, 4, 6):
        yield _case("nvfp4", 8, valid=valid)
    for tokens in (2, 4, 6, 64):
        yield _case("nvfp4", tokens)
    yield _case("bfloat16", 1, experts=64)
    yield _case("nvfp4", 1, combine=False)
    for tokens, inner in ((1, WIDTH), (8, WIDTH), (1, WIDTH_TP4)):
        yield _case("nvfp4", tokens, inner, peer="jax-triton")
    yield _plain(1, experts=64)


def _case(format, tokens, inner=None, experts=None, valid=None, combine=True, peer=None):
    inner, experts, valid = inner or WIDTH, experts or EXPERTS, valid or tokens
    distinct = min(valid * PICKS, 61 if tokens <= 8 else 286)

    @jax.jit
    def run(*inputs):
        if peer:
            from scripts.kernel_cases import triton_experts as peers  # needs its package

            return peers.moe_experts_slots(*inputs, **CAPS)
        return moe_experts.moe_experts_slots(*inputs, **CAPS)

    def step(call, x, weights, picked, plans, w13, w2):
        y = run(x, weights, plans[call], w13, w2)
        if combine:
            return y.sum(axis=1).astype(x.dtype)
        return x.at[0, 0].set(all_of(y).astype(x.dtype))

    def result(x, weights, picked, plans, w13, w2):
        return run(x, weights, plans[0], w13, w2)[:valid].sum(axis=1)

    def expected(x, weights, picked, plans, w13, w2):
        return expert_by_expert(x[:valid], weights, picked, w13, w2)

    note = f"{tokens} tok, {valid} valid" if valid < tokens else f"{tokens} tok"
    return Case(
        "moe_experts", f"{format} {peer}" if peer else format + ("" if combine else ", no combine"),
        f"{note}, {distinct} experts, I {inner}",
        step, _setup(format, tokens, distinct, inner, experts, valid),
        distinct * expert_bytes(format, inner), CALLS,
        result=result, expected=expected, tolerance=5e-3, compared=peer is not None or not combine,
    )  # fmt: skip


def expert_by_expert(x, weights, picked, w13, w2):
    """The reference with one packed expert at a time: all of them in float32 are too large."""

    def one(i):
        token, pick = i // PICKS, i % PICKS
        w = (moe_experts.unpack(w[picked[token, pick][None]]) for w in (w13, w2))
        first, weight = jnp.zeros((1, 1), jnp.int32), weights[token, pick][None, None]
        return reference.moe_experts(x[token][None], first, weight, *w, **CAPS)[0]

    tokens = x.shape[0]
    return lax.map(one, jnp.arange(tokens * PICKS)).reshape(tokens, PICKS, -1).sum(axis=1)


@functools.cache
def _setup(*shape):
    return functools.partial(_inputs, *shape)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def _inputs(format, tokens, distinct, inner, experts, valid, key):
    keys = jax.random.split(key, 4)
    w13 = random_packed(keys[0], format, 2 * inner, HIDDEN, experts, interleaved=True)
    w2 = random_packed(keys[1], format, HIDDEN, inner, experts, interleaved=False)
    x = jax.random.normal(keys[2], (tokens, HIDDEN)).astype(jnp.bfloat16)
    weights = jax.random.uniform(keys[3], (tokens, PICKS))
    # Each call takes the next experts; its first rows share them until `distinct` is met. Plans are
    # arrays of their own, made once: cutting them out of one would be a launch within each call.
    # The fewest bytes of a trip, of one token at a rank's width, are 287 MB: cold.
    pick = (jnp.arange(tokens * PICKS) % distinct).reshape(tokens, PICKS).astype(jnp.int32)
    real = (jnp.arange(tokens) < valid)[:, None]
    picked = [jnp.where(real, (call * distinct + pick) % experts, experts) for call in range(CALLS)]
    plans = [moe_experts.make_plan(p, experts) for p in picked]
    return x, (weights, picked[0], plans, w13, w2)


def random_packed(key, format, rows, columns, experts, interleaved):
    """Packed weights straight from random bits, free of NaN codes."""
    loads, steps = moe_experts.pack.LOADS[format], -(-columns // 64)
    shape = (experts, rows // 32, steps, 2, loads, 128)
    keys = jax.random.split(key, 2)
    words = lax.bitcast_convert_type(jax.random.bits(keys[0], shape, jnp.uint32), jnp.int32)
    if format == "mxfp8":
        words &= ~0x22002200  # no exponent of all ones
        scales = jax.random.randint(keys[1], (*shape[:3], 64), 220, 240, jnp.uint8)
        outer = jnp.full(experts, 2.0**-4)
    elif format == "nvfp4":
        scales = jax.random.randint(keys[1], (*shape[:3], 128), 16, 64, jnp.uint8)
        outer = jnp.full(experts, 2.0**22)
    else:
        words &= ~0x40004000  # below 2
        scales, outer = None, jnp.ones(experts)
    return moe_experts.PackedExperts(words, scales, outer, columns, interleaved)


def expert_bytes(format, inner):
    """Published bytes of one expert: values and scales, each once."""
    bits = {"nvfp4": 4.5, "mxfp8": 8.25, "bfloat16": 16}[format]
    return 3 * inner * HIDDEN * bits / 8


def _plain(tokens, experts):
    def setup(key):
        keys = jax.random.split(key, 3)

        def nvfp4(key, rows, columns):
            values = jax.random.bits(key, (experts, rows, columns // 2), jnp.uint8)
            return values, jnp.ones((experts, rows, columns // 16), jnp.float8_e4m3fn)

        w13, w2 = nvfp4(keys[0], 2 * WIDTH, HIDDEN), nvfp4(keys[1], HIDDEN, WIDTH)
        return jax.random.normal(keys[2], (tokens, HIDDEN)).astype(jnp.bfloat16), (w13, w2)

    def layer(x, pick, w13, w2):
        def expand(w):
            outer = jnp.full(tokens * PICKS, 1 / 64)
            full = reference.dequantize_nvfp4(*(a[pick.reshape(-1)] for a in w), outer)
            return full.astype(jnp.bfloat16).reshape(tokens, PICKS, *full.shape[1:])

        both = jnp.einsum("td,tkrd->tkr", x, expand(w13), preferred_element_type=jnp.float32)
        gate, up = both[..., ::2], both[..., 1::2]
        act = GATE_SOFTCAP * jnp.tanh(gate / GATE_SOFTCAP) * jax.nn.sigmoid(gate)
        act = (act * UP_SOFTCAP * jnp.tanh(up / UP_SOFTCAP)).astype(jnp.bfloat16)
        y = jnp.einsum("tkr,tkdr->td", act, expand(w2), preferred_element_type=jnp.float32)
        return y.astype(jnp.bfloat16)

    def step(call, x, w13, w2):
        first = call * PICKS * tokens
        pick = (first + jnp.arange(tokens * PICKS).reshape(tokens, PICKS)) % experts
        return layer(x, pick, w13, w2)

    return Case(
        "moe_experts", "nvfp4 plain xla", f"{tokens} tok, {PICKS * tokens} experts, I {WIDTH}",
        step, setup, PICKS * tokens * expert_bytes("nvfp4", WIDTH), compared=True,
    )  # fmt: skip
