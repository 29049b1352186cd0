"""Router rows: scores, picks and plan, for 1...64 tokens."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels import router
from pallas_kernels.router import TileConfig, reference
from pallas_kernels.router.shapes import EXPERTS, HIDDEN, PICKS, SCALE
from scripts.kernel_cases.case import CALLS, ROTATE, Case, all_of


def cases() -> Iterator[Case]:
    """Yields the rows."""
    for tokens in (1, 8, 64):
        yield _case(tokens)
    for tiles in ((2, 256, 4, 2), (4, 128, 4, 4)):
        yield _case(1, TileConfig(*tiles))
    for tiles in ((4, 512, 8, 1), (8, 256, 8, 2), (8, 128, 4, 4)):
        yield _case(8, TileConfig(*tiles))
    yield _case(1, plain=True)
    yield _case(8, plain=True)


def _case(tokens, config=None, plain=False):
    size = 4 * EXPERTS * HIDDEN
    calls = max(round(ROTATE / size), CALLS)
    how = {"k": PICKS, "scale": SCALE}

    def expected(z, bias, real, *gates):
        return reference.select(reference.scores(z, gates[0]), bias, real, **how)

    @jax.jit
    def route(z, gate, bias, real):
        if plain:
            return expected(z, bias, real, gate)
        return router.route(z, gate, bias, real, config=config, **how)

    def step(call, z, bias, real, *gates):
        last = all_of(*jax.tree.leaves(route(z, gates[call], bias, real)))
        return z.at[0, 0].set(last)  # waiting for it costs a launch more

    variant = f"e{config.experts} s{config.splits} w{config.warps}" if config else "default"
    return Case(
        "router", "plain xla" if plain else variant, f"{tokens} tok, {EXPERTS} experts",
        step, _setup(tokens, calls), size, calls,
        result=lambda z, bias, real, *gates: route(z, gates[0], bias, real),
        expected=expected, tolerance=1e-5, compared=plain or config is not None,
    )  # fmt: skip


@functools.cache
def _setup(*shape):
    return functools.partial(_inputs, *shape)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _inputs(tokens, copies, key):
    keys = jax.random.split(key, copies + 2)
    z = jax.random.normal(keys[0], (tokens, HIDDEN))
    gates = [jax.random.normal(key, (EXPERTS, HIDDEN)) / HIDDEN**0.5 for key in keys[2:]]
    return z, (jax.random.normal(keys[1], (EXPERTS,)) / 4, jnp.ones(tokens, bool), *gates)
