"""conv_mix rows: numbers of rows and of queries; those of a prefill."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels import conv_mix
from pallas_kernels.conv_mix import reference
from pallas_kernels.conv_mix.shapes import BLOCKS, HIDDEN, TAPS
from scripts.kernel_cases.case import SHORT_CALLS as CALLS
from scripts.kernel_cases.case import Case, all_of

LONG = 8192  # rows of a chunk of a prompt
OPTIONS = {"dtypes": (jnp.bfloat16,), "eps": 1e-6, "norm_eps": 1e-6}


def cases() -> Iterator[Case]:
    """Yields the rows."""
    yield _case(1, 1)
    yield _case(1, 1, queries=3)
    yield _case(1, 8)
    yield _case(8, 8)
    yield _long(1)
    yield _long(3)
    yield _case(1, 1, plain=True)
    yield _long(1, plain=True)


def _case(batch, tokens, queries=1, plain=False):
    run = reference.conv_mix if plain else conv_mix.conv_mix
    run = jax.jit(functools.partial(run, **OPTIONS))

    def step(call, carry, shared):
        z, u, scale, state = run(**carry, **shared)
        if plain:  # a kernel is made whole
            u = u.at[0, 0, 0].set(all_of(*jax.tree.leaves(z), scale))
        return {"u": u, "state": state}  # a chain: the next output is what this one left

    return Case(
        "conv_mix", "plain xla" if plain else "default",
        f"{batch} x {tokens} rows, {BLOCKS + 1} sources, {queries} queries",
        step, _setup(batch, tokens, queries), _size(batch * tokens, queries), CALLS,
        result=lambda carry, shared: tuple(run(**carry, **shared)),
        expected=lambda carry, shared: tuple(reference.conv_mix(**carry, **shared, **OPTIONS)),
        tolerance=5e-3, compared=plain,
    )  # fmt: skip


def _long(queries, plain=False):
    run = reference.conv_mix_long if plain else conv_mix.conv_mix_long
    run = jax.jit(functools.partial(run, **OPTIONS))

    def step(call, partial, shared):
        z, partial, scale = run(partial=partial, **shared)
        # What one call adds to, the next one adds to again.
        return partial.at[0, 0, 0].set(all_of(*jax.tree.leaves(z), scale))

    row = HIDDEN * (4 * (BLOCKS + 3) + 2 * queries)
    return Case(
        "conv_mix", "plain xla, long" if plain else "long",
        f"{LONG} rows, {BLOCKS + 1} sources, {queries} queries",
        step, _long_setup(queries), LONG * row,
        result=lambda partial, shared: tuple(run(partial=partial, **shared)),
        expected=lambda partial, shared: reference.conv_mix_long(
            partial=partial, **shared, **OPTIONS
        ),
        tolerance=5e-3, compared=plain, ceiling="copy",
    )  # fmt: skip


def _size(rows, queries):
    """Bytes read and written: float32 but for the norms and the inputs of what follows."""
    shared = HIDDEN * (4 * TAPS + (4 + 2) * queries)
    row = HIDDEN * (4 * BLOCKS + 4 * TAPS + 4 * 3 + 2 * queries)  # taps: the ring and u
    return shared + rows * row


@functools.cache
def _setup(*shape):
    return functools.partial(inputs, *shape)


@functools.cache
def _long_setup(queries):
    @jax.jit
    def setup(key):
        carry, (shared,) = inputs(1, LONG, queries, key, hidden=HIDDEN)
        before = carry["state"][:, : TAPS - 1]
        rest = {name: shared[name] for name in ("blocks", "scales", "queries", "norms", "weight")}
        return shared["partial"], ({"u": carry["u"], "before": before} | rest,)

    return setup


@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames="hidden")
def inputs(
    batch: int, tokens: int, queries: int, key: jax.Array, hidden: int = HIDDEN
) -> tuple[dict, tuple[dict]]:
    """Draws the arguments of conv_mix: what a call changes (u and the ring), and the rest."""
    keys = iter(jax.random.split(key, 9 + BLOCKS))

    def normal(*shape, dtype=jnp.float32):
        return jax.random.normal(next(keys), shape, dtype)

    blocks = tuple(normal(batch, tokens, hidden) for _ in range(BLOCKS))
    carry = {"u": normal(batch, tokens, hidden), "state": normal(batch, tokens + 10, hidden)}
    shared = {
        "partial": normal(batch, tokens, hidden),
        "blocks": blocks,
        "scales": tuple(reference.inverse_rms(block, 1e-6) for block in blocks),
        "queries": normal(queries, hidden),
        "norms": tuple(normal(hidden, dtype=jnp.bfloat16) for _ in range(queries)),
        "weight": normal(hidden, TAPS) / 8,  # a chain of convolutions that does not grow
        "start": jnp.full(batch, 100, jnp.int32),
        "lengths": jnp.full(batch, tokens, jnp.int32),
    }
    return carry, (shared,)
