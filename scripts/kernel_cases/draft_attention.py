"""Draft attention rows: a block of a full-size drafter over two contexts, layer after layer."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels import draft_attention
from pallas_kernels.draft_attention import reference
from pallas_kernels.draft_attention.shapes import BLOCK, DIM, HEADS, KV_HEADS, LAYERS
from scripts.kernel_cases.case import CALLS, Case

CONTEXTS = (8192, 102400)
EPS = 1e-6


def cases() -> Iterator[Case]:
    """Yields the rows."""
    for context in CONTEXTS:
        yield _case(context)
    yield _case(CONTEXTS[0], plain=True)


def _case(context, plain=False):
    run = reference.draft_attention if plain else draft_attention.draft_attention
    calls = max(LAYERS, CALLS)

    def step(call, q, shared):
        return run(q, **shared, layer=call % LAYERS, eps=EPS).astype(jnp.float32)

    return Case(
        "draft_attention", "plain xla" if plain else "default", f"{BLOCK} tok, {context}",
        step, functools.partial(_inputs, context), 2 * 2 * context * KV_HEADS * DIM, calls,
        result=lambda q, shared: run(q, **shared, layer=0, eps=EPS),
        expected=lambda q, shared: reference.draft_attention(q, **shared, layer=0, eps=EPS),
        tolerance=1e-2, compared=plain,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def _inputs(context, key):
    keys = iter(jax.random.split(key, 7))

    def normal(*shape, dtype=jnp.float32):
        return jax.random.normal(next(keys), shape, dtype)

    angle = normal(1, BLOCK, DIM // 2)
    shared = {
        "k": normal(1, BLOCK, KV_HEADS, DIM),
        "v": normal(1, BLOCK, KV_HEADS, DIM),
        "q_norm": 1 + normal(DIM) / 4,
        "k_norm": 1 + normal(DIM) / 4,
        "cos": jnp.cos(angle),
        "sin": jnp.sin(angle),
        "context": normal(1, context, LAYERS, 2, KV_HEADS, DIM, dtype=jnp.bfloat16),
        "start": jnp.full(1, context, jnp.int32),
    }
    return normal(1, BLOCK, HEADS, DIM), (shared,)
