"""project against its plain reference, in Pallas' interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.projections import TileConfig, project
from pallas_kernels.projections.reference import project as reference


@pytest.mark.parametrize(("tokens", "parts"), [(1, 2), (5, 1), (17, 2)])
def test_three_groups_and_a_ragged_end(tokens, parts):
    keys = jax.random.split(jax.random.key(tokens), 2)
    x = jax.random.normal(keys[0], (3, tokens, 128))
    weight = jax.random.normal(keys[1], (200, 128))
    out = project(x, weight, (64, 128), config=TileConfig(columns=32, parts=parts), interpret=True)
    assert out.shape == (tokens, parts, 200)
    np.testing.assert_allclose(out.sum(axis=1), reference(x, weight, (64, 128)), atol=1e-4)


def test_refusals_name_the_value():
    x, weight = jnp.zeros((2, 1, 64)), jnp.zeros((128, 64))
    with pytest.raises(ValueError, match="boundary 65 is not a multiple of 64"):
        project(x, weight, (65,))
    with pytest.raises(ValueError, match="2 inputs for 1 groups"):
        project(x, weight)
