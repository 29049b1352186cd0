"""Rows of qkv_prep: one and eight tokens of a sliding and of a full layer, and of a prefill."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.qkv_prep import qkv_prep, qkv_prep_long, reference
from pallas_kernels.qkv_prep.shapes import (
    BLOCK,
    DIM,
    HEADS,
    KV_HEADS,
    LOG_SCALING,
    OPTIONS,
    RANKS,
    TAPS,
)
from scripts.kernel_cases.case import SHORT_CALLS as CALLS
from scripts.kernel_cases.case import Case, all_of

LONG = 8192  # tokens of a chunk of a prompt
SLOTS = 1024 + BLOCK
RINGS = ("k_cache", "v_cache", "k_state", "v_state")


def cases() -> Iterator[Case]:
    """Yields the rows."""
    for tokens, full in ((1, False), (8, False), (1, True), (8, True)):
        yield _case(tokens, full)
    yield _long(False)
    yield _long(True)
    yield _case(1, False, plain=True)
    yield _long(False, plain=True)


def _case(tokens, full, plain=False):
    options = OPTIONS | ({"log_scaling": LOG_SCALING} if full else {})
    run = jax.jit(functools.partial(reference.qkv_prep if plain else qkv_prep, **options))

    def step(call, carry, shared):
        q, r, *rings = run(**shared | carry)
        q = q.astype(jnp.float32)
        if plain:  # a kernel is made whole
            q = q.at[0, 0, 0, 0].set(all_of(r))
        return dict(zip(RINGS, rings, strict=True), q=q)

    vectors = tokens * (HEADS * (DIM + RANKS) + 2 * KV_HEADS * DIM)
    return Case(
        "qkv_prep", "plain xla" if plain else "default",
        f"{tokens} tok, {'full' if full else 'sliding'} layer",
        step, _setup(tokens, full), 4 * vectors, CALLS,
        result=lambda carry, shared: tuple(run(**shared | carry)),
        expected=lambda carry, shared: reference.qkv_prep(**shared | carry, **options),
        tolerance=5e-3,  # of bfloat16: a sum of another order may fall on the other side
        compared=plain,
    )  # fmt: skip


def _long(full, plain=False):
    options = OPTIONS | {"log_scaling": LOG_SCALING if full else None, "dtype": jnp.bfloat16}
    run = reference.qkv_prep_long if plain else qkv_prep_long
    run = jax.jit(functools.partial(run, **options))

    def step(call, products, shared):
        last = all_of(*run(**products, **shared))
        return products | {"q": products["q"].at[0, 0, 0, 0].set(last)}

    vectors = LONG * (HEADS * (DIM + RANKS) + 2 * KV_HEADS * DIM)
    return Case(
        "qkv_prep", "plain xla, long" if plain else "long",
        f"{LONG} tok, {'full' if full else 'sliding'} layer", step, _long_setup(full),
        (4 + 2) * vectors,
        result=lambda products, shared: tuple(run(**products, **shared)),
        expected=lambda products, shared: reference.qkv_prep_long(**products, **shared, **options),
        tolerance=5e-3, compared=plain, ceiling="copy",
    )  # fmt: skip


@functools.cache
def _long_setup(full):
    @jax.jit
    def setup(key):
        carry, (shared,) = _inputs(LONG, full, key)
        before = {f"{name}_before": carry[f"{name}_state"][:, : TAPS - 1] for name in "kv"}
        products = {"q": carry["q"]} | {name: shared.pop(name) for name in "rkv"}
        return products, (shared | before,)

    return setup


@functools.cache
def _setup(*shape):
    return functools.partial(_inputs, *shape)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _inputs(tokens, full, key):
    keys = iter(jax.random.split(key, 12))

    def normal(*shape, dtype=jnp.float32):
        return jax.random.normal(next(keys), (1, *shape), dtype)

    def taps():
        if full:
            static = jax.random.normal(next(keys), (TAPS, KV_HEADS, DIM))
            return static, normal(tokens, KV_HEADS, TAPS)
        return jax.random.normal(next(keys), (KV_HEADS, DIM, TAPS))

    heads, ring = (KV_HEADS, DIM), (TAPS - 1 + BLOCK, KV_HEADS, DIM)
    shared = {
        "r": normal(tokens, HEADS, RANKS),
        "k": normal(tokens, *heads),
        "v": normal(tokens, *heads),
        "q_scale": jnp.ones((HEADS, DIM), jnp.bfloat16),
        "r_scale": jnp.ones((HEADS, RANKS), jnp.bfloat16),
        "k_taps": taps(),
        "v_taps": taps(),
        "start": jnp.full(1, 10 * LOG_SCALING[0], jnp.int32),
        "lengths": jnp.full(1, tokens, jnp.int32),
    }
    cache = functools.partial(normal, SLOTS, *heads, dtype=jnp.bfloat16)
    rings = (cache(), cache(), normal(*ring), normal(*ring))
    carry = dict(zip(RINGS, rings, strict=True), q=normal(tokens, HEADS, DIM))
    return carry, (shared,)
