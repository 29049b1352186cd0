import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax.layers import l2_clip, log_scale, rms, softcap


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_clip_only_shortens(dtype):  # CM-07
    direction = np.random.default_rng(0).normal(size=64)
    direction /= np.linalg.norm(direction)
    for norm in (0.0, 1e-6, 1.0, 1.999):
        x = jnp.asarray(norm * direction, dtype)
        assert (l2_clip(x, 2.0).astype(dtype) == x).all()
    clipped = l2_clip(jnp.asarray(4 * direction, jnp.float32), 2.0)
    np.testing.assert_allclose(clipped, 2 * direction, rtol=2e-6)


def test_clip_has_a_finite_gradient_at_zero():
    gradient = jax.grad(lambda x: l2_clip(x, 2.0).sum())(jnp.zeros(64))
    np.testing.assert_array_equal(gradient, 1.0)


def test_log_scale_starts_at_the_floor():  # CM-03
    scale = log_scale(jnp.arange(12)[None], 4, 0.1)[0]
    np.testing.assert_array_equal(scale[:4], 1.0)
    np.testing.assert_allclose(scale[4:], 1 + 0.1 * np.log(np.arange(5, 13) / 4), rtol=1e-6)


def test_softcap_values():  # CM-10
    capped = softcap(jnp.array([0.0, 30.0, 50.0, 2000.0, -2000.0]), 30.0)
    np.testing.assert_allclose(capped, [0, 22.8478, 27.9333, 30, -30], atol=1e-4)


def test_rms_adds_epsilon_to_the_mean():
    x = jnp.array([3.0, 4.0])
    np.testing.assert_allclose(rms(x, 0.5), x / np.sqrt(12.5 + 0.5), rtol=1e-6)
