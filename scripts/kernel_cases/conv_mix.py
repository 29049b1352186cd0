"""conv_mix rows: tiles and numbers of rows."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels import conv_mix
from pallas_kernels.conv_mix import reference
from pallas_kernels.conv_mix.shapes import BLOCKS, HIDDEN, TAPS
from pallas_kernels.conv_mix.tiles import SLOTS
from scripts.kernel_cases.case import CALLS, Case

PARTS = 8  # summands of an expert layer's output: the picks of a token


def cases() -> Iterator[Case]:
    """Yields the rows."""
    for columns, warps in ((256, 4), (128, 1), (128, 4), (512, 4), (256, 8), (256, 2)):
        yield _case(1, conv_mix.TileConfig(columns, warps))
    yield _case(1, plain=True)
    yield _case(8)
    yield _case(64)


def _case(tokens, config=None, plain=False):
    kernel = functools.partial(conv_mix.conv_mix, config=config)
    run = reference.conv_mix if plain else kernel

    def step(i, carry, u, shared):
        for _ in range(CALLS // 2):
            carry = _layer(run, carry, u, shared)
        return carry

    def written(run, carry, u, shared):
        z, sources, gram, state = _layer(run, carry, u, shared)
        return z, sources[BLOCKS], gram[..., : BLOCKS + 1, : BLOCKS + 1], state

    variant = f"c{config.columns} w{config.warps}" if config else "default"
    return Case(
        "conv_mix", "plain xla" if plain else variant, f"{tokens} rows, 9 sources",
        step, _setup(tokens), tokens * HIDDEN * (2 * 9 + 16 + 8 + 4 * 8 / 2),
        result=functools.partial(written, run),
        expected=functools.partial(written, reference.conv_mix), tolerance=5e-3,
    )  # fmt: skip


def _layer(run, carry, u, shared):
    """The two conv_mix of a layer in a chain; the second adds up eight experts."""
    z, sources, gram, state = carry
    shared = {**shared, "eps": 1e-6, "count": BLOCKS}
    z, partial, sources, gram, state = run(
        u=z[0][:, :, None].astype(jnp.float32), partial=sources[BLOCKS], sources=sources, gram=gram,
        state=state, keep=False, **shared,
    )  # fmt: skip
    z, _, sources, gram, state = run(
        u=u, partial=partial, sources=sources, gram=gram, state=state, keep=True, **shared
    )
    return z, sources, gram, state


@functools.cache
def _setup(*shape):
    return functools.partial(_inputs, *shape)


@functools.partial(jax.jit, static_argnums=0)
def _inputs(tokens, key):
    keys = iter(jax.random.split(key, 7))
    sources = jax.random.normal(next(keys), (BLOCKS + 1, 1, tokens, HIDDEN)).astype(jnp.bfloat16)
    wide = sources.astype(jnp.float32)
    products = jnp.einsum("nbtd,mbtd->btnm", wide, wide, precision="highest")
    gram = jnp.zeros((1, tokens, SLOTS, SLOTS)).at[..., : BLOCKS + 1, : BLOCKS + 1].set(products)
    state = jax.random.normal(next(keys), (1, tokens + 10, HIDDEN))
    u = jax.random.normal(next(keys), (1, tokens, PARTS, HIDDEN))
    shared = {
        "queries": jax.random.normal(next(keys), (1, HIDDEN)),
        "norms": jax.random.normal(next(keys), (1, HIDDEN)).astype(jnp.bfloat16),
        "weight": jax.random.normal(next(keys), (HIDDEN, TAPS)),
        "start": jnp.full(1, 100, jnp.int32),
        "lengths": jnp.full(1, tokens, jnp.int32),
    }
    z = jax.random.normal(next(keys), (1, 1, tokens, HIDDEN)).astype(jnp.bfloat16)
    return (z, sources, gram, state), (u, shared)
