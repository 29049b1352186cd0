import jax.numpy as jnp
import numpy as np

from inkling_jax.residual import Residual, mix


def sources(n):
    x = np.random.default_rng(1).normal(size=(n, 1, 3, 8))
    unit = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return jnp.asarray(x, jnp.float32), unit


def residual(*x):
    """The last source is the running sum; scales as they are kept."""
    scales = tuple(1 / jnp.sqrt(jnp.mean(s**2, axis=-1) + 1e-6) for s in x)
    return Residual(x[:-1], x[-1], scales)


def test_equal_scores_give_the_mean_of_the_normalised_states():  # CM-11
    x, unit = sources(4)
    np.testing.assert_allclose(mix(jnp.zeros(8), residual(*x)), unit.mean(0), atol=1e-6)


def test_a_large_score_selects_its_state():
    x = jnp.broadcast_to(jnp.eye(3, 8)[:, None, None], (3, 1, 3, 8))  # source i has channel i
    mixed = mix(jnp.zeros(8).at[1].set(50.0), residual(*x))
    want = np.zeros(8)
    want[1] = 1 / np.sqrt(1 / 8 + 1e-6)
    np.testing.assert_allclose(mixed[0, 0], want, atol=1e-6)


def test_several_queries_give_several_mixes():
    x, _ = sources(3)
    queries = jnp.asarray(np.random.default_rng(2).normal(size=(3, 8)), jnp.float32)
    together = mix(queries, residual(*x))
    for i in range(3):
        np.testing.assert_allclose(together[i], mix(queries[i], residual(*x)), atol=1e-6)
