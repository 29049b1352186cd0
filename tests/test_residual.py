import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from inkling_jax.layers import RMSNorm
from inkling_jax.residual import Reader, Residual, advance, mix
from inkling_jax.short_conv import ShortConv
from sharding.collectives import ALONE


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


def test_a_sublayer_may_give_summands_of_which_those_of_padding_hold_anything():
    draw = np.random.default_rng(3).normal
    x, _ = sources(2)
    conv, norm = ShortConv((8,), ("embed",), 4), RMSNorm(8, 1e-6, jnp.float32)
    conv.weight = nnx.Param(jnp.asarray(draw(size=(8, 4)), jnp.float32))
    norm.weight = nnx.Param(jnp.ones(8))
    reader = Reader(jnp.ones((1, 8)), (norm,), (jnp.float32, jnp.bfloat16))
    where = (conv, jnp.zeros((1, 6, 8)), reader, jnp.array([2]), jnp.array([2]), ALONE)
    u = jnp.asarray(draw(size=(1, 3, 4, 8)), jnp.float32).at[:, 2].set(0)
    expected = advance(residual(*x), u.sum(axis=2), (), *where)
    found = advance(residual(*x), u.at[:, 2].set(jnp.nan), (), *where)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [z.dtype for z in found[1]] == [jnp.float32, jnp.bfloat16]
