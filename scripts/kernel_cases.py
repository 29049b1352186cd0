"""What bench_kernels.py times: one dictionary per row, the fields of its `Case`."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import conv_mix, moe_experts, projections, rel_attention_decode
from pallas_kernels.conv_mix import reference as conv_mix_reference
from pallas_kernels.conv_mix.shapes import BLOCKS, TAPS
from pallas_kernels.moe_experts import reference as moe_reference
from pallas_kernels.moe_experts.shapes import (
    EXPERTS,
    GATE_SOFTCAP,
    HIDDEN,
    PICKS,
    UP_SOFTCAP,
    WIDTH,
    WIDTH_TP4,
)
from pallas_kernels.projections.shapes import HEAD_ROWS, INPUT_ROWS, WO
from pallas_kernels.rel_attention_decode import reference as attention_reference
from pallas_kernels.rel_attention_decode.shapes import (
    CONTEXTS,
    DIM,
    EXTENT,
    HEADS,
    KV_HEADS,
    RANKS,
    WINDOW,
)

CAPS = {"gate_softcap": GATE_SOFTCAP, "up_softcap": UP_SOFTCAP}
ROTATE = 250e6  # bytes: more than 4 x L2
CALLS = (
    8  # at least, per trip: few launches are not captured, and a trip then costs 27 us by itself
)


def trivial_kernel(x):
    """One block that adds 1."""

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    return pl.pallas_call(
        body, out_shape=x, compiler_params=plt.CompilerParams(num_warps=4, num_stages=1)
    )(x)


def cases() -> list[dict]:
    """Returns all rows."""
    return [*moe_cases(), *attention_cases(), *conv_mix_cases(), *projection_cases()]


# --- moe_experts


def random_packed(key, format, rows, columns, experts):
    """Packed weights straight from random bits, free of NaN codes."""
    loads, steps = moe_experts.pack.LOADS[format], -(-columns // 64)
    shape = (experts, rows // 32, steps, 2, loads, 128)
    words = lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint32), jnp.int32)
    if format == "mxfp8":
        words &= ~0x22002200  # no exponent of all ones
        scales = jax.random.randint(key, (*shape[:3], 64), 220, 240, jnp.uint8)
        outer = jnp.full(experts, 2.0**-4)
    elif format == "nvfp4":
        scales = jax.random.randint(key, (*shape[:3], 128), 16, 64, jnp.uint8)
        outer = jnp.full(experts, 2.0**22)
    else:
        words &= ~0x40004000  # below 2
        scales, outer = None, jnp.ones(experts)
    # Which rows are gate rows makes no difference to the kernels.
    return moe_experts.PackedExperts(words, scales, outer, columns, interleaved=False)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def _moe_inputs(format, tokens, distinct, inner, experts, valid):
    keys = jax.random.split(jax.random.key(0), 5)
    w13 = random_packed(keys[0], format, 2 * inner, HIDDEN, experts)
    w2 = random_packed(keys[1], format, HIDDEN, inner, experts)
    x = jax.random.normal(keys[2], (tokens, HIDDEN)).astype(jnp.bfloat16)
    weights = jax.random.uniform(keys[3], (tokens, PICKS))
    # Each trip takes the next experts; the first rows of a trip share them until `distinct` is met.
    trips = 16
    pick = jnp.arange(tokens * PICKS) % distinct
    offset = (jnp.arange(trips) * distinct)[:, None]
    picked = ((offset + pick) % experts).reshape(trips, tokens, PICKS).astype(jnp.int32)
    picked = jnp.where((jnp.arange(tokens) < valid)[:, None], picked, experts)
    plans = jax.vmap(lambda p: moe_experts.make_plan(p, experts))(picked)
    return x, (weights, plans, w13, w2)


def moe_cases():
    """Yields the expert rows: formats, tokens, valid rows, a TP4 rank's width."""

    def case(format, tokens, inner=WIDTH, experts=EXPERTS, valid=None, combine=False):
        valid = valid or tokens
        distinct = min(valid * PICKS, 61 if tokens <= 8 else 286)

        def step(i, x, weights, plans, w13, w2):
            for call in range(CALLS):
                plan = jax.tree.map(lambda a, n=call: a[(CALLS * i + n) % a.shape[0]], plans)
                y = moe_experts.moe_experts_slots(x, weights, plan, w13, w2, **CAPS)
                if combine:
                    x = y.sum(axis=1).astype(x.dtype)
                else:  # the next call must wait for this one; a sliver of it costs no bandwidth
                    x = x.at[:, :128].set(y[:, 0, :128].astype(x.dtype))
            return x

        setup = _setup(format, tokens, distinct, inner, experts, valid)
        per_expert = moe_bytes(format, inner)
        note = f"{tokens} tok, {valid} valid" if valid < tokens else f"{tokens} tok"
        return {
            "op": "moe", "variant": format + (" + combine" if combine else ""),
            "shape": f"{note}, {distinct} experts, I {inner}",
            "step": step, "setup": setup, "bytes": distinct * per_expert, "calls": CALLS,
        }  # fmt: skip

    yield case("nvfp4", 1)
    yield case("nvfp4", 1, combine=True)
    yield case("nvfp4", 8)
    yield case("nvfp4", 8, valid=1)
    yield case("nvfp4", 8, valid=4)
    yield case("nvfp4", 4)
    yield case("nvfp4", 64)
    yield case("nvfp4", 1, inner=WIDTH_TP4)
    yield case("nvfp4", 8, inner=WIDTH_TP4)
    yield case("mxfp8", 1, experts=128)
    yield case("mxfp8", 8, experts=128)
    yield case("mxfp8", 1, inner=WIDTH_TP4)
    yield case("mxfp8", 8, inner=WIDTH_TP4)
    yield case("bfloat16", 1, experts=64)
    yield _moe_peer(1)


def _moe_peer(tokens):
    """What XLA makes of gather, dequantize and two products."""
    experts = 64

    def setup():
        bits = functools.partial(jax.random.bits, dtype=jnp.uint8)
        keys = jax.random.split(jax.random.key(3), 3)

        def nvfp4(key, rows, columns):
            values = bits(key, (experts, rows, columns // 2))
            return values, jnp.ones((experts, rows, columns // 16), jnp.float8_e4m3fn)

        w13, w2 = nvfp4(keys[0], 2 * WIDTH, HIDDEN), nvfp4(keys[1], HIDDEN, WIDTH)
        x = jax.random.normal(keys[2], (tokens, HIDDEN)).astype(jnp.bfloat16)
        return jnp.zeros((tokens, HIDDEN), jnp.float32), (x, w13, w2)

    def step(i, carry, x, w13, w2):
        pick = (jnp.arange(tokens * PICKS).reshape(tokens, PICKS) + PICKS * i) % experts

        def expand(w):
            outer = jnp.ones(tokens * PICKS)
            full = moe_reference.dequantize_nvfp4(*(a[pick.reshape(-1)] for a in w), outer)
            return full.astype(jnp.bfloat16).reshape(tokens, PICKS, *full.shape[1:])

        both = jnp.einsum("td,tkrd->tkr", x, expand(w13), preferred_element_type=jnp.float32)
        gate, up = both[..., ::2], both[..., 1::2]
        act = 4 * jnp.tanh(gate / 4) * jax.nn.sigmoid(gate) * 25 * jnp.tanh(up / 25)
        act = act.astype(jnp.bfloat16)
        return jnp.einsum("tkr,tkdr->td", act, expand(w2), preferred_element_type=jnp.float32)

    return {
        "op": "moe", "variant": "nvfp4 plain xla",
        "shape": f"{tokens} tok, {PICKS * tokens} experts",
        "step": step, "setup": setup, "bytes": PICKS * tokens * moe_bytes("nvfp4", WIDTH),
    }  # fmt: skip


@functools.cache
def _setup(*shape):
    return lambda: _moe_inputs(*shape)


def moe_bytes(format, inner):
    """Published bytes of one expert: values and scales, each once."""
    bits = {"nvfp4": 4.5, "mxfp8": 8.25, "bfloat16": 16}[format]
    return 3 * inner * HIDDEN * bits / 8


# --- rel_attention_decode


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _attention_inputs(tokens, context, window, copies):
    keys = iter(jax.random.split(jax.random.key(1), 7))

    def normal(*shape, dtype=jnp.bfloat16):
        return jax.random.normal(next(keys), shape, dtype)

    slots = window + 8 if window else context + 8
    shared = {
        "r": normal(1, tokens, HEADS, RANKS),
        "proj": normal(RANKS, EXTENT),
        "sink": normal(1, tokens, HEADS, dtype=jnp.float32),
        "gate": normal(1, tokens, HEADS, DIM),
        "start": jnp.full(1, context - tokens, jnp.int32),
        "lengths": jnp.full(1, tokens, jnp.int32),
    }
    # Values do not matter for time, and random ones of this size would take longer than the run.
    ramp = jnp.arange(slots * KV_HEADS * DIM, dtype=jnp.uint32).reshape(1, slots, KV_HEADS, DIM)
    caches = []
    for n in range(2 * copies):
        noise = (ramp * jnp.uint32(2654435761 + 2 * n)) >> 16
        caches.append((noise.astype(jnp.float32) / 2.0**15 - 1).astype(jnp.bfloat16))
    return normal(1, tokens, HEADS, DIM), (shared, tuple(caches))


def attention_cases():
    """Yields the attention rows: contexts, queries, tiles."""

    def case(tokens, context, window=None, config=None, plain=False):
        reach = min(window, context) if window else context
        size = 2 * reach * KV_HEADS * DIM * 2
        copies = min(max(round(ROTATE / size), 1), 16)
        calls = max(copies, CALLS)

        def step(i, q, shared, caches):
            run = attention_reference.rel_attention_decode
            if not plain:
                run = functools.partial(rel_attention_decode.rel_attention_decode, config=config)
            for call in range(calls):
                k, v = caches[2 * (call % copies) :][:2]
                q = run(q=q, k=k, v=v, window=window, **shared).astype(jnp.bfloat16)
            return q

        variant = "plain xla" if plain else "default"
        if config:
            variant = f"n{config.splits} k{config.keys} w{config.warps} s{config.stages}"
        return {
            "op": "attention", "variant": variant,
            "shape": f"{tokens} q, {context}" + (f", window {window}" if window else ""),
            "step": step, "setup": _attention_setup(tokens, context, window, copies),
            "bytes": size, "calls": calls,
        }  # fmt: skip

    tile = rel_attention_decode.TileConfig
    short, context, longest = CONTEXTS
    for config in (None, tile(16, 128, 8, 3)):
        yield case(1, context, config=config)
    yield case(1, context, plain=True)
    # One program per multiprocessor: a deeper pipeline costs nothing but shared memory.
    for config in (None, *(tile(16, 64, 4, stages) for stages in (4, 5))):
        yield case(8, context, config=config)
    yield case(1, short)
    for config in (None, tile(16, 64, 4, 5)):
        yield case(8, short, config=config)
    for tokens in (1, 8):
        yield case(tokens, short, WINDOW)
    yield case(1, longest)


@functools.cache
def _attention_setup(*shape):
    return lambda: _attention_inputs(*shape)


# --- conv_mix


@functools.partial(jax.jit, static_argnums=(0, 1))
def _conv_mix_inputs(tokens, parts):
    keys = iter(jax.random.split(jax.random.key(2), 9))
    sources = jax.random.normal(next(keys), (BLOCKS + 1, 1, tokens, HIDDEN)).astype(jnp.bfloat16)
    gram = jnp.einsum("nbtd,mbtd->btnm", *[sources.astype(jnp.float32)] * 2)
    gram = jnp.zeros((1, tokens, 16, 16)).at[..., : BLOCKS + 1, : BLOCKS + 1].set(gram)
    state = jax.random.normal(next(keys), (1, tokens + 10, HIDDEN))
    u = jax.random.normal(next(keys), (1, tokens, parts, HIDDEN))
    shared = {
        "queries": jax.random.normal(next(keys), (3, HIDDEN)),
        "norms": jax.random.normal(next(keys), (3, HIDDEN)).astype(jnp.bfloat16),
        "weight": jax.random.normal(next(keys), (HIDDEN, TAPS)),
        "start": jnp.full(1, 100, jnp.int32),
        "lengths": jnp.full(1, tokens, jnp.int32),
    }
    z = jnp.zeros((1, 1, tokens, HIDDEN), jnp.bfloat16)
    return (z, sources, gram, state), (u, shared)


def conv_mix_cases():
    """Yields the conv_mix rows."""

    def case(tokens, columns=256, warps=4, plain=False):
        """The two conv_mix of a layer in a chain; the second adds up eight experts."""

        def step(i, carry, u, shared):
            for _ in range(CALLS // 2):
                carry = layer(carry, u, shared)
            return carry

        def layer(carry, u, shared):
            z, sources, gram, state = carry
            options = {"eps": 1e-6, "count": BLOCKS}
            one = {**shared, "queries": shared["queries"][:1], "norms": shared["norms"][:1]}
            run = conv_mix_reference.conv_mix
            if not plain:
                tiles = conv_mix.TileConfig(columns, warps)
                run = functools.partial(conv_mix.conv_mix, config=tiles)
            z, partial, sources, gram, state = run(
                u=z[0][:, :, None], partial=sources[BLOCKS], sources=sources, gram=gram,
                state=state, keep=False, **one, **options,
            )  # fmt: skip
            z, _, sources, gram, state = run(
                u=u, partial=partial, sources=sources, gram=gram, state=state,
                keep=True, **one, **options,
            )  # fmt: skip
            return z, sources, gram, state

        size = tokens * HIDDEN * (2 * 9 + 16 + 8 + 4 * 8 / 2)
        return {
            "op": "conv_mix", "variant": "plain xla" if plain else f"c{columns} w{warps}",
            "shape": f"{tokens} rows, 9 sources", "step": step,
            "setup": _conv_mix_setup(tokens, 8), "bytes": size, "calls": CALLS,
        }  # fmt: skip

    for columns, warps in ((256, 4), (128, 1), (128, 4), (512, 4), (256, 8), (256, 2)):
        yield case(1, columns, warps)
    yield case(1, plain=True)
    yield case(8)
    yield case(64)


@functools.cache
def _conv_mix_setup(*shape):
    return lambda: _conv_mix_inputs(*shape)


# --- projections


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _projection_inputs(tokens, rows, columns, copies):
    keys = jax.random.split(jax.random.key(4), copies + 1)
    x = jax.random.normal(keys[0], (1, tokens, columns)).astype(jnp.bfloat16)
    weights = [jax.random.normal(key, (rows, columns), jnp.bfloat16) for key in keys[1:]]
    return x, tuple(weights)


def projection_cases():
    """Yields the input projections of a sliding layer, `wo` and the head."""

    def case(name, tokens, rows, columns, config=None, plain=False):
        size = 2 * rows * columns
        copies = max(round(ROTATE / size), 1)
        calls = max(copies, CALLS)

        def step(i, x, *weights):
            for call in range(calls):
                weight = weights[call % copies]
                if plain:
                    y = jnp.dot(x[0], weight.T, preferred_element_type=jnp.float32)
                else:
                    y = projections.project(x, weight, config=config)[:, 0]
                # The next product must wait for this one; a sliver of it costs no bandwidth.
                x = x.at[:, :, :128].set(y[None, :, :128].astype(x.dtype))
            return x

        variant = "plain xla" if plain else "default"
        if config:
            variant = f"r{config.rows} k{config.columns} p{config.parts} s{config.stages}"
        return {
            "op": "project", "variant": variant,
            "shape": f"{name} {rows} x {columns}, {tokens} tok",
            "step": step, "setup": _projection_setup(tokens, rows, columns, copies),
            "bytes": size, "calls": calls,
        }  # fmt: skip

    tile = projections.TileConfig
    for tokens in (1, 8):
        for plain in (False, True):
            yield case("in", tokens, INPUT_ROWS, HIDDEN, plain=plain)
            yield case("wo", tokens, *WO, plain=plain)
            yield case("head", tokens, HEAD_ROWS, HIDDEN, plain=plain)
    yield case("in", 1, INPUT_ROWS, HIDDEN, tile(parts=2))
    yield case("in", 1, INPUT_ROWS, HIDDEN, tile(columns=256, stages=3))
    yield case("wo", 1, *WO, tile(parts=4))
    yield case("wo", 1, *WO, tile(parts=8))
    yield case("wo", 1, *WO, tile(rows=32, parts=4))


@functools.cache
def _projection_setup(*shape):
    return lambda: _projection_inputs(*shape)
