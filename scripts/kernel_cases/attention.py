"""Decode attention rows: contexts, queries, tiles."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels import rel_attention_decode
from pallas_kernels.rel_attention_decode import reference
from pallas_kernels.rel_attention_decode.shapes import (
    CONTEXTS,
    DIM,
    EXTENT,
    HEADS,
    KV_HEADS,
    RANKS,
    WINDOW,
)
from scripts.kernel_cases import flex_attention, tokamax_attention
from scripts.kernel_cases.case import CALLS, ROTATE, Case


def cases() -> Iterator[Case]:
    """Yields the rows."""
    tile = rel_attention_decode.TileConfig
    short, context, longest = CONTEXTS
    yield _case(1, context)
    yield _case(1, longest)
    yield _case(1, short)
    yield _case(8, context)
    yield _case(8, short)
    for tokens in (1, 8):
        yield _case(tokens, short, WINDOW)
    yield _case(1, context, plain=True)
    yield _case(1, context, config=tile(16, 128, 8, 3))
    # One program per multiprocessor: a deeper pipeline costs nothing but shared memory.
    for stages in (4, 5):
        yield _case(8, context, config=tile(16, 64, 4, stages))
    yield _case(8, short, config=tile(16, 64, 4, 5))
    for tokens, reach in ((1, short), (1, context), (8, context)):
        yield dataclasses.replace(
            _case(tokens, reach),
            variant="torch flex_attention",
            outside=flex_attention.timed,
            compared=True,
        )
    for tokens, reach in ((1, short), (1, context), (8, context)):
        yield _case(tokens, reach, tokamax={"implementation": "mosaic"})  # its own first choice
        # 8 KV heads x 16 parts: about one program per multiprocessor.
        for implementation in ("mosaic", "triton"):
            yield _case(tokens, reach, tokamax={"implementation": implementation, "splits": 16})


def _case(tokens, context, window=None, config=None, plain=False, tokamax=None):
    reach = min(window, context) if window else context
    size = 2 * reach * KV_HEADS * DIM * 2
    copies = min(max(round(ROTATE / size), 1), 16)
    calls = max(copies, CALLS)

    @jax.jit
    def attend(q, shared, k, v):
        if tokamax:
            return tokamax_attention.attend(q=q, k=k, v=v, **shared, **tokamax)
        if plain:
            return reference.rel_attention_decode(q=q, k=k, v=v, window=window, **shared)
        return rel_attention_decode.rel_attention_decode(
            q=q, k=k, v=v, window=window, config=config, **shared
        )

    def step(call, q, shared, caches):
        return attend(q, shared, *caches[call % copies]).astype(jnp.bfloat16)

    def expected(q, shared, caches):
        k, v = caches[0]
        return reference.rel_attention_decode(q=q, k=k, v=v, window=window, **shared)

    variant = "plain xla" if plain else "default"
    if config:
        variant = f"n{config.splits} k{config.keys} w{config.warps} s{config.stages}"
    if tokamax:
        variant = " ".join(["tokamax", *(f"{value}" for value in tokamax.values())])
    return Case(
        "attention", variant,
        f"{tokens} q, {context}" + (f", window {window}" if window else ""),
        step, _setup(tokens, context, window, copies, 0 if tokamax else 8), size, calls,
        result=lambda q, shared, caches: attend(q, shared, *caches[0]),
        expected=expected, tolerance=1e-2, compared=variant != "default",
    )  # fmt: skip


@functools.cache
def _setup(*shape):
    return functools.partial(_inputs, *shape)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _inputs(tokens, context, window, copies, spare, key):
    keys = iter(jax.random.split(key, 6 + 2 * copies))

    def normal(*shape, dtype=jnp.bfloat16):
        return jax.random.normal(next(keys), shape, dtype)

    slots = (window or context) + spare
    shared = {
        "r": normal(1, tokens, HEADS, RANKS),
        # A bias of deviation 1: the keys beyond the extent keep most of the weight.
        "proj": (normal(RANKS, EXTENT, dtype=jnp.float32) / RANKS**0.5).astype(jnp.bfloat16),
        "sink": normal(1, tokens, HEADS, dtype=jnp.float32),
        "gate": normal(1, tokens, HEADS, DIM),
        "start": jnp.full(1, context - tokens, jnp.int32),
        "lengths": jnp.full(1, tokens, jnp.int32),
    }
    q = normal(1, tokens, HEADS, DIM)
    cache = (1, slots, KV_HEADS, DIM)
    return q, (shared, tuple((normal(*cache), normal(*cache)) for _ in range(copies)))
