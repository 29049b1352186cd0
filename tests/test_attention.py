import math

import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax import attention
from inkling_jax.attention import attend


def oracle(q, k, v, r, proj, sink, position, key_position, window):
    """One query at a time in float64, straight from the spec."""
    out = np.zeros(q.shape)
    batch, t, heads, d = q.shape
    for b in range(batch):
        for i in range(t):
            for h in range(heads):
                kv = h // (heads // k.shape[2])
                logits, values = [sink[b, i, h]], [np.zeros(d)]
                for s in range(k.shape[1]):
                    delta = position[b, i] - key_position[b, s]
                    if key_position[b, s] < 0 or delta < 0 or (window and delta >= window):
                        continue
                    bias = r[b, i, h] @ proj[:, delta] if delta < proj.shape[1] else 0.0
                    logits.append(q[b, i, h] @ k[b, s, kv] / math.sqrt(d) + bias)
                    values.append(v[b, s, kv])
                weights = np.exp(np.array(logits) - max(logits))
                out[b, i, h] = weights / weights.sum() @ np.array(values)
    return out


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("block", [3, 256])
def test_attend_equals_the_definition(window, block, monkeypatch):
    monkeypatch.setattr(attention, "MAX_QUERY_BLOCK", block)
    rng = np.random.default_rng(3)
    start = np.array([0, 3, 9])
    t, heads, kv_heads, d, rel, extent = 7, 6, 2, 4, 3, window or 6
    keys = 20 if window is None else window - 1 + t
    shapes = [(3, t, heads, d), (3, keys, kv_heads, d), (3, keys, kv_heads, d)]
    shapes += [(3, t, heads, rel), (rel, extent), (3, t, heads)]
    arrays = [rng.normal(size=s) for s in shapes]
    offset = 0 if window is None else start[:, None] - (window - 1)
    key_position = offset + np.tile(np.arange(keys), (3, 1))
    got = attend(*(jnp.asarray(a, jnp.float32) for a in arrays), jnp.asarray(start), window)
    want = oracle(*arrays, start[:, None] + np.arange(t), key_position, window)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_bias_reaches_its_extent_and_no_farther():  # CM-02
    """Reach 4, q · k zero, bias ln 2 at distance 3: 2/9 there, 1/9 elsewhere, sink too."""
    zeros, identity = jnp.zeros((1, 7, 1, 8)), jnp.eye(7, 8)[None, :, None]
    proj = jnp.zeros((1, 4)).at[0, 3].set(math.log(2))
    weights = attend(
        zeros, zeros, identity, jnp.ones((1, 7, 1, 1)), proj, jnp.zeros((1, 7, 1)),
        jnp.zeros(1, jnp.int32), None,
    )[0, 6, 0]  # fmt: skip
    np.testing.assert_allclose(weights[:7], np.array([1, 1, 1, 2, 1, 1, 1]) / 9, atol=1e-6)


def test_query_heads_share_the_kv_head_of_their_group():
    value = jnp.zeros((1, 1, 2, 4)).at[:, :, 1].set(1.0)
    out = attend(
        jnp.zeros((1, 1, 12, 4)), jnp.zeros((1, 1, 2, 4)), value, jnp.zeros((1, 1, 12, 1)),
        jnp.zeros((1, 3)), jnp.full((1, 1, 12), -1e9), jnp.zeros(1, jnp.int32), None,
    )[0, 0, :, 0]  # fmt: skip
    np.testing.assert_allclose(out, [0.0] * 6 + [1.0] * 6, atol=1e-6)
