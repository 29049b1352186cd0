"""The router kernel against its reference, in Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe_experts import make_plan
from pallas_kernels.router import TileConfig, reference, route, tiles, unsupported
from pallas_kernels.router.shapes import EXPERTS, HIDDEN

SCALE = 8.0


def make_inputs(seed, tokens, experts, hidden, dtype=jnp.float32):
    """Activations, gate, bias, and which tokens are real: all but every fourth from the second."""
    keys = jax.random.split(jax.random.key(seed), 3)
    z = jax.random.normal(keys[0], (tokens, hidden)).astype(dtype)
    gate = jax.random.normal(keys[1], (experts, hidden)) / hidden**0.5
    bias = jax.random.normal(keys[2], (experts,)) / 4
    return z, gate, bias, jnp.arange(tokens) % 4 != 1


def assert_plan_lists(plan, picks, experts):
    """The plan is `make_plan`'s, up to what its order holds behind the planned slots."""
    expected = make_plan(picks, experts)
    planned = int(expected.count.sum())
    for name in ("expert", "start", "count"):
        np.testing.assert_array_equal(getattr(plan, name), getattr(expected, name), name)
    np.testing.assert_array_equal(plan.order[:planned], expected.order[:planned])


def assert_routed(out, z, gate, bias, real, k, tolerance):
    """Picks fall by score up to rounding, none of the others is larger; weights and plan fit."""
    picks, weights, plan = (jax.tree.map(np.asarray, part) for part in out)
    scores = np.asarray(reference.scores(jnp.nan_to_num(z), gate))
    experts, keep = gate.shape[0], np.asarray(real)
    assert (picks[~keep] == experts).all() and (weights[~keep] == 0).all()
    biased, rows = scores[keep] + np.asarray(bias), np.arange(keep.sum())[:, None]
    found = biased[rows, picks[keep]]
    np.testing.assert_allclose(found, -np.sort(-biased, axis=1)[:, :k], atol=tolerance)
    assert all(len(set(row)) == k for row in picks[keep])
    chosen = scores[keep][rows, picks[keep]]
    expected = chosen / (chosen.sum(axis=1, keepdims=True) + 1e-20) * SCALE
    np.testing.assert_allclose(weights[keep], expected, rtol=1e-5, atol=tolerance)
    assert_plan_lists(plan, jnp.asarray(picks), experts)


SHAPES = [(1, 24, 8), (5, 12, 2), (17, 6, 4), (64, 24, 8)]


@pytest.mark.parametrize(("tokens", "experts", "k"), SHAPES)
def test_matches_reference(tokens, experts, k):
    dtype = jnp.float32 if tokens == 5 else jnp.bfloat16
    z, gate, bias, real = make_inputs(tokens, tokens, experts, 96, dtype)
    z = jnp.where(real[:, None], z, jnp.nan)
    out = route(z, gate, bias, real, k=k, scale=SCALE, interpret=True)
    assert_routed(out, z, gate, bias, real, k, 1e-6)
    picks, weights, _ = reference.select(
        reference.scores(jnp.nan_to_num(z), gate), bias, real, k=k, scale=SCALE
    )
    np.testing.assert_array_equal(out[0], picks)  # no two scores of these seeds are close
    np.testing.assert_allclose(out[1], weights, rtol=1e-5)


@pytest.mark.parametrize("config", [TileConfig(4, 32, 1, 3), TileConfig(4, 16, 2, 6)])
def test_columns_in_ranges_add_up(config):
    """With rows beyond the last, with NaN in those that do not count, and with equal scores."""
    z, gate, bias, real = make_inputs(3, 11, 12, 96)
    gate, bias = gate.at[3:8].set(gate[3]), bias.at[3:8].set(1.0)  # which every token picks from
    z = jnp.where(real[:, None], z, jnp.nan)
    out = route(z, gate, bias, real, k=4, scale=SCALE, config=config, interpret=True)
    assert_routed(out, z, gate, bias, real, 4, 1e-6)
    for picks in np.asarray(out[0])[np.asarray(real)]:
        tied = picks[(picks >= 3) & (picks < 8)]
        assert len(tied) and (tied == 3 + np.arange(len(tied))).all()


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 17, 64])
def test_tiles_cover_the_product(tokens):
    for experts, hidden in ((EXPERTS, HIDDEN), (12, 96), (7, 32)):
        config = tiles.choose(tokens, experts, hidden)
        assert experts % config.experts == 0 == hidden % (config.splits * config.columns)


def test_equal_scores_go_to_the_lower_index_and_fill_an_expert():
    """All tokens want one expert, then the lowest of the rest, which are equal."""
    gate = jnp.zeros((12, 32)).at[7].set(1.0)
    real = jnp.arange(17) != 16
    run = functools.partial(route, k=4, scale=SCALE, interpret=True)
    picks, weights, plan = run(jnp.ones((17, 32)), gate, jnp.zeros(12), real)
    np.testing.assert_array_equal(picks[:16], np.tile([7, 0, 1, 2], (16, 1)))
    np.testing.assert_allclose(weights[:16].sum(axis=1), SCALE, rtol=1e-6)
    np.testing.assert_array_equal(plan.count[:9], [8] * 8 + [0])  # two items of each expert
    assert_plan_lists(plan, picks, 12)


def test_experts_that_the_bias_rules_out_are_picked_last_and_once():
    z, gate, bias, real = make_inputs(0, 3, 12, 32)
    bias = jnp.full_like(bias, -jnp.inf).at[jnp.array([3, 8])].set(bias[0])
    picks, _, plan = route(z, gate, bias, real, k=4, scale=SCALE, interpret=True)
    np.testing.assert_array_equal(np.sort(picks[0, :2]), [3, 8])
    np.testing.assert_array_equal(picks[::2, 2:], [[0, 1], [0, 1]])
    assert_plan_lists(plan, picks, 12)


def test_no_real_token_plans_nothing_and_nan_is_not_hidden():
    z, gate, bias, _ = make_inputs(0, 5, 12, 32)
    run = functools.partial(route, k=2, scale=SCALE, interpret=True)
    picks, _, plan = run(z * jnp.nan, gate, bias, jnp.zeros(5, bool))
    assert (picks == 12).all() and not plan.count.any()
    picks, weights, _ = run(z * jnp.nan, gate, bias, jnp.ones(5, bool))
    assert (picks < 12).all() and jnp.isnan(weights).all()


def test_refusals_name_the_value():
    assert "65 tokens" in unsupported(65, 4608, 8)
    assert "hidden size 40" in unsupported(1, 40, 8)
    assert "6 experts per token" in unsupported(1, 4608, 6)
    assert "256 experts per token" in unsupported(1, 4608, 256)
    assert "16 experts per token of 64 tokens" in unsupported(64, 4608, 16)
    with pytest.raises(ValueError, match="3 experts per token"):
        route(*make_inputs(0, 1, 12, 32), k=3, scale=SCALE)
