"""Rows of qkv_prep: one and eight tokens of a sliding and of a full layer, in a chain."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.qkv_prep import qkv_prep, reference
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
from scripts.kernel_cases.case import Case

SLOTS = 1024 + BLOCK
RINGS = ("k_cache", "v_cache", "k_state", "v_state")


def cases() -> Iterator[Case]:
    """Yields the rows."""
    for tokens, full in ((1, False), (8, False), (1, True), (8, True)):
        yield _case(tokens, full)
    yield _case(1, False, plain=True)


def _case(tokens, full, plain=False):
    options = OPTIONS | ({"log_scaling": LOG_SCALING} if full else {})
    run = jax.jit(functools.partial(reference.qkv_prep if plain else qkv_prep, **options))

    def step(i, carry, shared):
        for _ in range(CALLS):
            q, _, *rings = run(**shared | carry)
            carry = dict(zip(RINGS, rings, strict=True), q=q.astype(jnp.float32))
        return carry

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
