import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax import moe, quant
from inkling_jax.moe import experts, route, swiglu

PACK = {"f32": lambda w: w, "mxfp8": quant.quantize_mxfp8, "nvfp4": quant.quantize_nvfp4}


def test_ties_go_to_the_lower_index_and_the_bias_takes_no_part_in_weights():
    gate = jnp.zeros((5, 4))
    picks, weights = route(jnp.ones((1, 4)), gate, jnp.array([0.0, 0.2, 0.0, 0.0, 0.2]), 3, 8.0)
    np.testing.assert_array_equal(picks, [[1, 4, 0]])
    np.testing.assert_allclose(weights, np.full((1, 3), 8 / 3), rtol=1e-6)


@pytest.mark.parametrize("fmt", PACK)
@pytest.mark.parametrize("gather_picks", [0, 1000])  # tokens sorted by expert, or experts fetched
def test_swiglu_caps_on_every_path(fmt, gather_picks, monkeypatch):  # CM-09
    monkeypatch.setattr(moe, "GATHER_PICKS", gather_picks)
    gate_cap, up_cap, hidden, width = 4.0, 25.0, 32, 32
    gates, ups = (-50, -gate_cap, 0, gate_cap, 50), (-50, -up_cap, 0, up_cap, 50)
    pairs = np.array(list(itertools.product(gates, ups)), np.float32)
    w13 = jnp.zeros((1, 2 * width, hidden)).at[0, 0, 0].set(1.0).at[0, 1, 1].set(1.0)
    w2 = jnp.zeros((1, hidden, width)).at[0, 0, 0].set(1.0)
    z = jnp.zeros((25, hidden)).at[:, :2].set(pairs)  # input 0 is g, input 1 is u
    picks, weights = jnp.zeros((25, 1), jnp.int32), jnp.ones((25, 1))
    out = experts(z, picks, weights, PACK[fmt](w13), PACK[fmt](w2), gate_cap, up_cap)
    for got, (g, u) in zip(out[:, 0], pairs.tolist(), strict=True):
        gate = gate_cap * math.tanh(g / gate_cap) / (1 + math.exp(-g))
        want = gate * up_cap * math.tanh(u / up_cap)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fmt", PACK)
@pytest.mark.parametrize("skew", ["even", "one", "empty"])
def test_both_paths_equal_the_sum_over_picks(fmt, skew, monkeypatch):
    rng = np.random.default_rng(4)
    n, width, hidden, rows, k = 6, 32, 32, 150, 2
    w13, w2 = (
        PACK[fmt](jnp.asarray(rng.normal(size=s), jnp.float32))
        for s in ((n, 2 * width, hidden), (n, hidden, width))
    )
    z = jnp.asarray(rng.normal(size=(rows, hidden)), jnp.float32)
    picks = np.stack([rng.permutation(n)[:k] for _ in range(rows)])
    if skew == "one":
        picks[:, 0], picks[:, 1] = 3, 5
    if skew == "empty":
        picks[100:] = n  # padding
    weights = np.where(picks < n, rng.uniform(size=(rows, k)), 0.0)
    plain13, plain2 = (np.asarray(quant.dequantize(w, jnp.float32)) for w in (w13, w2))
    want = np.zeros((rows, hidden))
    act = np.asarray(swiglu(jnp.asarray(np.einsum("nfd,td->tnf", plain13, z)), 4.0, 25.0))
    for t, j in itertools.product(range(rows), range(k)):
        if (e := picks[t, j]) < n:
            want[t] += weights[t, j] * (plain2[e] @ act[t, e])
    args = (z, jnp.asarray(picks), jnp.asarray(weights, jnp.float32), w13, w2)
    for limit in (0, 10**6):
        monkeypatch.setattr(moe, "GATHER_PICKS", limit)
        run = jax.jit(functools.partial(experts, gate_cap=4.0, up_cap=25.0))
        np.testing.assert_allclose(run(*args), want, rtol=1e-4, atol=1e-4)
