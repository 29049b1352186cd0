"""Prefill attention rows: lengths, with and without a window, and what leaves the bias out."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from inkling_jax.attention import attend
from pallas_kernels.rel_attention_prefill import reference, rel_attention_prefill
from pallas_kernels.rel_attention_prefill.shapes import (
    CONTINUED,
    DIM,
    EXTENT,
    FULL,
    HEADS,
    KV_HEADS,
    RANKS,
    SLIDING,
    WINDOW,
)
from scripts.kernel_cases.case import IN_TURN, Case

PART = 256  # queries that are compared at either end, as scores of all would not fit


def cases() -> Iterator[Case]:
    """Yields the rows."""
    yield _case(SLIDING, WINDOW)
    for tokens in FULL:
        yield _case(tokens)
    yield _case(*CONTINUED)
    for tokens, window in ((SLIDING, WINDOW), (FULL[0], None)):
        yield _case(tokens, window, variant="cudnn, no bias", run=_by_cudnn)
        yield _case(tokens, window, variant="plain xla", run=_plainly)


def _case(tokens, window=None, before=0, variant="default", run=rel_attention_prefill):
    attending = jax.jit(functools.partial(run, window=window))
    part = min(PART, tokens)

    def ends(q, shared):
        out = attending(q, **shared)
        return out[:, :part], out[:, -part:]

    def expected(q, shared):
        return tuple(_reference(q, shared, window, at, part) for at in (0, tokens - part))

    seen = before + 1 + np.arange(tokens)
    pairs = int((np.minimum(seen, window) if window else seen).sum())
    size = 2 * DIM * (2 * tokens * HEADS + 2 * (tokens + before) * KV_HEADS)
    biased = run is not _by_cudnn
    return Case(
        "prefill", variant,
        f"{tokens} q" + (f" after {before}" if before else "")
        + (f", window {window}" if window else ""),
        lambda i, q, shared: attending(q, **shared).astype(q.dtype),
        _setup(tokens, window, before), size, IN_TURN,
        result=ends if biased else None, expected=expected if biased else None,
        tolerance=5e-3, compared=variant != "default", flops=4 * DIM * HEADS * pairs,
    )  # fmt: skip


def _plainly(q, r, k, v, proj, sink, gate, start, lengths, window):
    """The model's plain path: a window's keys without the first, which no query sees."""
    k, v = (x if window is None else x[:, 1:] for x in (k, v))
    return jax.nn.sigmoid(gate.astype(jnp.float32)) * attend(q, k, v, r, proj, sink, start, window)


def _by_cudnn(q, r, k, v, proj, sink, gate, start, lengths, window):
    """What JAX offers: the same pairs, without bias, sink and gate."""
    if jax.default_backend() != "gpu":
        raise ImportError("cuDNN runs on a GPU")
    k, v = (x[:, -q.shape[1] :] for x in (k, v))
    reach = window and (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=reach, implementation="cudnn"
    )


def _reference(q, shared, window, at, count):
    """The reference for `count` queries from the one at `at` on."""
    cut = {name: shared[name][:, at : at + count] for name in ("r", "sink", "gate")}
    if window:
        cut |= {name: shared[name][:, at : at + window + count] for name in ("k", "v")}
    where = {"start": shared["start"] + at, "lengths": jnp.full_like(shared["lengths"], count)}
    cut = shared | cut | where
    return reference.rel_attention_prefill(q[:, at : at + count], **cut, window=window)


@functools.cache
def _setup(*shape):
    return functools.partial(_inputs, *shape)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _inputs(tokens, window, before, key):
    keys = iter(jax.random.split(key, 7))

    def normal(*shape, dtype=jnp.bfloat16):
        return jax.random.normal(next(keys), shape, dtype)

    slots = tokens + (window or before)
    shared = {
        "r": normal(1, tokens, HEADS, RANKS),
        # A bias of deviation 1: the keys beyond the extent keep most of the weight.
        "proj": (normal(RANKS, EXTENT, dtype=jnp.float32) / RANKS**0.5).astype(jnp.bfloat16),
        "k": normal(1, slots, KV_HEADS, DIM),
        "v": normal(1, slots, KV_HEADS, DIM),
        "sink": normal(1, tokens, HEADS, dtype=jnp.float32),
        "gate": normal(1, tokens, HEADS, DIM),
        "start": jnp.full(1, before, jnp.int32),
        "lengths": jnp.full(1, tokens, jnp.int32),
    }
    return normal(1, tokens, HEADS, DIM), (shared,)
