"""Sampling rows: where the filters end 1 and 8 rows, and what XLA does with it."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from inkling_jax import sampling as model
from pallas_kernels import sampling
from pallas_kernels.sampling import reference
from pallas_kernels.sampling.shapes import VOCABULARY
from scripts.kernel_cases.case import Case


def cases() -> Iterator[Case]:
    """Yields the rows; the last is the rest of `sample`: noise, choice and log probability."""
    for rows in (1, 8):
        yield _ends("default", sampling.prefix_end, rows, 50, 0.95)
    # Every token is among the k, and many are in the nucleus: the kernel reads the row again.
    yield _ends("default", sampling.prefix_end, 8, VOCABULARY, 0.95)
    for rows in (1, 8):
        yield _ends("jax-triton", _peer, rows, 50, 0.95)
    yield _ends("plain xla", model.prefix_end, 8, 50, 0.95)
    yield _draws(8)


def _peer(*inputs):
    from scripts.kernel_cases import triton_sampling as peer  # needs its package

    return peer.prefix_end(*inputs)


def _ends(variant, find, rows, k, p):
    find = jax.jit(find)

    def step(call, logits, top_k, top_p):
        value, token = find(logits, top_k, top_p)
        # The next call must wait for this one; that costs a launch more.
        return logits.at[:, 0].set(jnp.minimum(value, token.astype(jnp.float32) - 99))

    # In a large nucleus the last token is one of many that rounding may choose.
    judged = 2 if k < VOCABULARY else 1
    return Case(
        "sampling", variant, f"{rows} rows, top-k {k}, top-p {p}",
        step, _setup(rows, k, p), 4 * rows * VOCABULARY,
        result=lambda *inputs: find(*inputs)[:judged],
        expected=lambda *inputs: reference.prefix_end(*inputs)[:judged], tolerance=1e-4,
        compared=variant != "default",
    )  # fmt: skip


def _draws(rows):
    def step(call, logits, top_k, top_p):
        keys = model.keys_from_seeds(range(rows))
        each = model.Sampling(jnp.ones(rows))
        token, logprob = model.sample(logits, each, keys, jnp.full(rows, call))
        return logits.at[:, 0].set(logprob + token.astype(jnp.float32) * 1e-9 - 99)

    return Case(
        "sampling", "xla draw", f"{rows} rows", step, _setup(rows, 1, 1.0), 4 * rows * VOCABULARY,
        compared=True,
    )  # fmt: skip


@functools.cache
def _setup(*shape):
    return functools.partial(_inputs, *shape)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _inputs(rows, k, p, key):
    logits = 3 * jax.random.normal(key, (rows, VOCABULARY))
    return logits, (jnp.full(rows, k, jnp.int32), jnp.full(rows, p, jnp.float32))
