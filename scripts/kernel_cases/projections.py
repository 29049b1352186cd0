"""Rows of thin products: the input projections of a sliding layer, `wo` and the head."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels import projections
from pallas_kernels.projections import reference
from pallas_kernels.projections.shapes import HEAD_ROWS, HIDDEN, INPUT_ROWS, WO
from scripts.kernel_cases.case import CALLS, ROTATE, Case


def cases() -> Iterator[Case]:
    """Yields the rows."""
    for tokens in (1, 8):
        for plain in (False, True):
            yield _case("in", tokens, INPUT_ROWS, HIDDEN, plain=plain)
            yield _case("wo", tokens, *WO, plain=plain)
            yield _case("head", tokens, HEAD_ROWS, HIDDEN, plain=plain)
    tile = projections.TileConfig
    yield _case("in", 1, INPUT_ROWS, HIDDEN, tile(parts=2))
    yield _case("in", 1, INPUT_ROWS, HIDDEN, tile(columns=256, stages=3))
    yield _case("wo", 1, *WO, tile(parts=4))
    yield _case("wo", 1, *WO, tile(parts=8))
    yield _case("wo", 1, *WO, tile(rows=32, parts=4))


def _case(name, tokens, rows, columns, config=None, plain=False):
    size = 2 * rows * columns
    copies = max(round(ROTATE / size), 1)
    calls = max(copies, CALLS)

    def product(x, weight):
        if plain:
            return jnp.dot(x[0], weight.T, preferred_element_type=jnp.float32)[:, None]
        return projections.project(x, weight, config=config)

    def step(i, x, *weights):
        for call in range(calls):
            y = product(x, weights[call % copies])[:, 0]
            # The next product must wait for this one; a sliver of it costs no bandwidth.
            x = x.at[:, :, :128].set(y[None, :, :128].astype(x.dtype))
        return x

    variant = "plain xla" if plain else "default"
    if config:
        variant = f"r{config.rows} k{config.columns} p{config.parts} s{config.stages}"
    return Case(
        "project", variant, f"{name} {rows} x {columns}, {tokens} tok",
        step, _setup(tokens, rows, columns, copies), size, calls,
        result=lambda x, *weights: product(x, weights[0]).sum(axis=1),
        expected=lambda x, *weights: reference.project(x, weights[0]), tolerance=1e-4,
    )  # fmt: skip


@functools.cache
def _setup(*shape):
    return functools.partial(_inputs, *shape)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _inputs(tokens, rows, columns, copies, key):
    keys = jax.random.split(key, copies + 1)
    x = jax.random.normal(keys[0], (1, tokens, columns)).astype(jnp.bfloat16)
    weights = [jax.random.normal(key, (rows, columns), jnp.bfloat16) for key in keys[1:]]
    return x, tuple(weights)
