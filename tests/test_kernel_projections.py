"""project against its plain reference, in Pallas' interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.projections import project, tiles
from pallas_kernels.projections import shapes as sizes
from pallas_kernels.projections.reference import project as reference


def make_products(key, tokens, shapes, dtype=jnp.float32):
    """One random pair of input and weight per (N, K)."""
    keys = iter(jax.random.split(key, 2 * len(shapes)))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)

    return [(normal(tokens, columns), normal(rows, columns)) for rows, columns in shapes]


@pytest.mark.parametrize("tokens", [1, 5, 17])
def test_several_products_with_ragged_ends(tokens):
    """Whole shares of rows, a short one, a weight that is less than a share, another K."""
    shapes = [(64, 128), (72, 128), (3, 128), (33, 96)]
    products = make_products(jax.random.key(tokens), tokens, shapes)
    outs = project(products, interpret=True)
    for out, expected in zip(outs, reference(products), strict=True):
        np.testing.assert_allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize("rows", [29, 64])
def test_shares_of_other_sizes(monkeypatch, rows):
    """Shares that are no part of a tile, and as large as one."""
    monkeypatch.setattr(tiles, "FEWEST", rows)
    products = make_products(jax.random.key(rows), 5, [(130, 128), (70, 64)])
    outs = project(products, interpret=True)
    for out, expected in zip(outs, reference(products), strict=True):
        np.testing.assert_allclose(out, expected, atol=1e-4)


def test_padding_does_not_reach_other_rows():
    [(x, weight)] = make_products(jax.random.key(0), 5, [(40, 64)])
    [out] = project([(x.at[3].set(jnp.nan), weight)], interpret=True)
    rows = np.array([0, 1, 2, 4])
    np.testing.assert_allclose(out[rows], reference([(x, weight)])[0][rows], atol=1e-4)


@pytest.mark.parametrize(
    ("weights", "waves"),
    [(sizes.SLIDING, 2), (sizes.FULL, 2), (sizes.WO[:1], 1), (sizes.RANK, 1), ((64,) * 133, 2)],
)
def test_programs_fill_whole_waves(weights, waves):
    rows = tiles.rows(weights)
    programs = tiles.programs(weights, rows)
    assert 0 <= waves * tiles.MULTIPROCESSORS - programs <= len(weights)
    assert tiles.stages(programs) == (7 if waves == 1 else 4)


def test_refusals_name_the_value():
    x = jnp.zeros((1, 64))
    with pytest.raises(ValueError, match="64 columns for a weight of 32"):
        project([(x, jnp.zeros((8, 32)))])
    with pytest.raises(ValueError, match="65 tokens"):
        project([(jnp.zeros((65, 64)), jnp.zeros((8, 64)))])
