"""Rows of thin products: a layer's input projections, whole and under TP4, `wo` and the head."""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels import projections
from pallas_kernels.projections import reference
from pallas_kernels.projections.shapes import FULL, HEAD_ROWS, HIDDEN, RANK, SLIDING, WO
from scripts.kernel_cases.case import CALLS, ROTATE, SHORT_CALLS, Case, all_of


def cases() -> Iterator[Case]:
    """Yields the rows."""
    for plain, tokens in itertools.product((False, True), (1, 8)):
        yield _case("in", tokens, SLIDING, HIDDEN, plain=plain)
        yield _case("in, TP4", tokens, RANK, HIDDEN, plain=plain)
        yield _case("wo", tokens, WO[:1], WO[1], plain=plain)
        yield _case("head", tokens, (HEAD_ROWS,), HIDDEN, plain=plain)
    yield _case("in, full layer", 1, FULL, HIDDEN)


def _case(name, tokens, rows, columns, plain=False):
    size = 2 * sum(rows) * columns
    copies = max(round(ROTATE / size), 1)
    calls = SHORT_CALLS if copies > 1 else CALLS

    @jax.jit
    def products(x, weights):
        if plain:
            return [jnp.dot(x, w.T, preferred_element_type=jnp.float32) for w in weights]
        return projections.project([(x, w) for w in weights])

    def step(call, x, *weights):
        y = products(x, weights[call % copies])
        return x.at[0, 0].set(all_of(*y).astype(x.dtype))

    return Case(
        "project", "plain xla" if plain else "default",
        f"{name} {sum(rows)} x {columns}, {tokens} tok",
        step, _setup(tokens, rows, columns, copies), size, calls,
        result=lambda x, *weights: products(x, weights[0]),
        expected=lambda x, *weights: reference.project([(x, w) for w in weights[0]]),
        tolerance=1e-4, compared=plain,
    )  # fmt: skip


@functools.cache
def _setup(*shape):
    return functools.partial(_inputs, *shape)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _inputs(tokens, rows, columns, copies, key):
    keys = iter(jax.random.split(key, copies * len(rows) + 1))
    x = jax.random.normal(next(keys), (tokens, columns)).astype(jnp.bfloat16)
    weights = [
        [jax.random.normal(next(keys), (n, columns), jnp.bfloat16) for n in rows]
        for _ in range(copies)
    ]
    return x, tuple(weights)
