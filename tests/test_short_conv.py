import jax.numpy as jnp
import numpy as np

from inkling_jax.short_conv import DynamicShortConv, ShortConv

ONE = jnp.ones(1, jnp.int32)


def static_conv(taps):
    conv = ShortConv((1,), ("embed",), len(taps))
    conv.weight.set_value(jnp.array([taps], jnp.float32))
    return conv


def test_last_tap_weighs_the_current_token_and_the_input_is_added():  # CM-04
    u = jnp.arange(1.0, 6.0)[None, :, None]
    y, _ = static_conv([1, 10, 100, 1000])(u, jnp.zeros((1, 4, 1)), 0 * ONE, 5 * ONE)
    sums = np.array([1001, 2102, 3213, 4325, 5437])
    np.testing.assert_allclose(y[0, :, 0], sums / np.sqrt(5), rtol=1e-6)


def test_one_token_at_a_time_equals_the_whole():
    u = jnp.arange(1.0, 8.0)[None, :, None]
    conv, state, got = static_conv([1, 10, 100, 1000]), jnp.zeros((1, 5, 1)), []
    for i in range(7):
        y, state = conv(u[:, i : i + 1], state, i * ONE, ONE)
        got.append(y[0, 0, 0])
    whole, _ = conv(u, jnp.zeros((1, 5, 1)), 0 * ONE, 7 * ONE)
    np.testing.assert_array_equal(got, whole[0, :, 0])


def test_padding_and_rejected_tokens_leave_nothing_behind():
    conv = static_conv([1, 10, 100, 1000])
    u = jnp.array([1.0, 2, 3, 77, 88])[None, :, None]
    _, padded = conv(u, jnp.zeros((1, 5, 1)), 0 * ONE, 3 * ONE)
    _, rejected = conv(u, jnp.zeros((1, 5, 1)), 0 * ONE, 5 * ONE)
    following = jnp.array([4.0, 5.0])[None, :, None]
    expected = conv(jnp.arange(1.0, 6.0)[None, :, None], jnp.zeros((1, 5, 1)), 0 * ONE, 5 * ONE)[0]
    for state in (padded, rejected):  # both rows have three tokens, whatever the slots hold
        y, _ = conv(following, state, 3 * ONE, 2 * ONE)
        np.testing.assert_array_equal(y[0, :, 0], expected[0, 3:, 0])


def test_dynamic_taps_come_from_the_current_token_by_backward_distance():
    conv = DynamicShortConv(2, 3, 4, 2, jnp.float32)
    rng = np.random.default_rng(0)
    static, dynamic = rng.normal(size=(2, 2, 3)), rng.normal(size=(2, 2, 4))
    conv.static.set_value(jnp.asarray(static, jnp.float32))
    conv.dynamic.set_value(jnp.asarray(dynamic, jnp.float32))
    u, z = rng.normal(size=(1, 6, 2, 3)), rng.normal(size=(1, 6, 4))
    y, _ = conv(
        jnp.asarray(u, jnp.float32), jnp.asarray(z, jnp.float32), jnp.zeros((1, 3, 2, 3)),
        0 * ONE, 6 * ONE,
    )  # fmt: skip
    for t in range(6):
        for head in range(2):
            want = u[0, t, head].copy()
            for lag in range(min(2, t + 1)):
                tap = static[lag, head] + dynamic[head, lag] @ z[0, t]
                want += tap * u[0, t - lag, head]
            np.testing.assert_allclose(y[0, t, head], want / np.sqrt(5), rtol=1e-5, atol=1e-6)
