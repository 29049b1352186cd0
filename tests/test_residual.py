import jax.numpy as jnp
import numpy as np

from inkling_jax.residual import mix


def sources(n):
    x = np.random.default_rng(1).normal(size=(n, 1, 3, 8))
    unit = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return jnp.asarray(x, jnp.float32), unit


def test_equal_scores_give_the_mean_of_the_normalised_states():
    x, unit = sources(4)
    np.testing.assert_allclose(mix(jnp.zeros(8), list(x[:3]), x[3]), unit.mean(0), atol=1e-6)


def test_a_large_score_selects_its_state():
    x = jnp.broadcast_to(jnp.eye(3, 8)[:, None, None], (3, 1, 3, 8))  # source i has channel i
    mixed = mix(jnp.zeros(8).at[1].set(50.0), list(x[:2]), x[2])
    want = np.zeros(8)
    want[1] = 1 / np.sqrt(1 / 8 + 1e-6)
    np.testing.assert_allclose(mixed[0, 0], want, atol=1e-6)


def test_several_queries_give_several_mixes():
    x, _ = sources(3)
    queries = jnp.asarray(np.random.default_rng(2).normal(size=(3, 8)), jnp.float32)
    together = mix(queries, list(x[:2]), x[2])
    for i in range(3):
        np.testing.assert_allclose(together[i], mix(queries[i], list(x[:2]), x[2]), atol=1e-6)
