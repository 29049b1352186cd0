"""Adaptive widths: the rule itself, and what it earns on tables of real costs."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax.widths import choose_widths, share_widths, tokens_cost

# Floors of a TP4 rank at the reading rate that was measured, by tokens verified.
FULL_SIZE = np.interp(range(1, 9), (1, 4, 6, 8), (1.23, 2.58, 3.44, 4.26)).tolist()
FLAT = [1.0, 1.02, 1.04, 1.06, 1.07, 1.09, 1.11, 1.12]  # launches, which more tokens do not add to


def widths(confidence, cost, rate):
    rate = jnp.full(len(confidence), rate, jnp.float32)
    return np.asarray(choose_widths(jnp.asarray(confidence), jnp.asarray(cost), rate)).tolist()


def test_drafts_are_verified_while_they_bring_more_than_they_cost():
    sure = jnp.array([[0.9, 0.9, 0.2, 0.9], [0.4, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    cost = jnp.array([1.0, 1.3, 1.6, 1.9, 2.2])
    assert widths(sure, cost, 1.5) == [2, 0, 4]  # a draft must survive with more than 0.45


def test_free_drafts_are_all_verified_and_hopeless_ones_never():
    sure = jnp.array([[0.0, 0.0], [0.5, 0.5]])
    assert widths(sure, jnp.array([1.0, 1.0, 1.0]), 1.0) == [0, 2]
    assert widths(sure, jnp.array([1.0, 99.0, 999.0]), 1.0) == [0, 0]


def test_a_dear_first_draft_is_verified_for_the_cheap_ones_behind_it():
    cost = jnp.array([1.0, 2.2, 2.3, 2.4])  # a kernel whose tile takes four tokens
    assert widths(jnp.array([[0.9, 0.9, 0.9]]), cost, 1.0) == [3]
    assert widths(jnp.array([[0.5, 0.9, 0.9]]), cost, 1.0) == [0]


def test_a_draft_has_no_say_in_whether_it_is_verified():
    """Confidences after j come from draft j or later ones: they may not change what j gets."""
    cost = jnp.asarray(FULL_SIZE, jnp.float32)
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0.7, 1, (2, 500, 7)).astype(np.float32)
    for j in range(7):
        b[:, : j + 1] = a[:, : j + 1]
        got_a, got_b = (np.array(widths(x, cost, 1.7)) > j for x in (a, b))
        assert (got_a == got_b).all()
        assert j > 2 or 0.05 < got_a.mean() < 0.95


@functools.partial(jax.jit, static_argnames="fixed")
def simulate(confidence, luck, cost, fixed=None):
    """Returns tokens per unit of cost over rounds [R, n]; drafts survive with their confidence."""
    n = confidence.shape[1]

    def one(carry, x):
        count, spent = carry
        sure, drawn = x
        width = jnp.int32(n if fixed is None else fixed)
        if fixed is None:
            width = choose_widths(sure[None], cost, (count / (cost[0] + spent))[None])[0]
        alive = jnp.cumprod(((drawn < sure) & (jnp.arange(n) < width)).astype(jnp.int32))
        return (count + 1 + alive.sum().astype(jnp.float32), spent + cost[width]), width

    (count, spent), chosen = jax.lax.scan(one, (1.0, 0.0), (confidence, luck))
    return count / spent, chosen


@pytest.mark.parametrize("cost", [FULL_SIZE, FLAT])
@pytest.mark.parametrize("mean", [0.4, 0.7, 0.95])
def test_adaptive_widths_earn_at_least_what_the_best_fixed_one_does(cost, mean):
    rng = np.random.default_rng(3)
    text = rng.beta(6 * mean, 6 * (1 - mean), (8000, 1))  # some passages are easier than others
    confidence = rng.beta(9 * text + 0.1, 9 * (1 - text) + 0.1, (8000, 7)).astype(np.float32)
    luck = rng.uniform(size=confidence.shape).astype(np.float32)
    cost = jnp.asarray(cost, jnp.float32)
    adaptive, _ = simulate(confidence, luck, cost)
    fixed = [float(simulate(confidence, luck, cost, fixed=w)[0]) for w in range(8)]
    assert adaptive >= 0.99 * max(fixed)


def test_tokens_beyond_those_of_one_row_cost_their_average():
    found = tokens_cost(jnp.array([1, 3, 4, 14]), jnp.array([1.0, 1.0, 1.4, 1.6]))
    np.testing.assert_allclose(found, [1.0, 1.4, 1.6, 3.6], rtol=1e-6)


def shared(confidence, cost, sharing=None, read=None):
    confidence = jnp.asarray(confidence, jnp.float32)
    sharing = jnp.ones(len(confidence), bool) if sharing is None else jnp.asarray(sharing)
    read = jnp.ones(len(confidence), jnp.int32) if read is None else jnp.asarray(read, jnp.int32)
    cost = jnp.asarray(cost, jnp.float32)
    return np.asarray(share_widths(confidence, sharing, read, cost)).tolist()


def test_a_shared_budget_goes_to_the_rows_that_need_it():
    sure = [[0.9] * 4, [0.2] * 4, [0.7] * 4]
    dear = 1 + 0.2 * np.arange(5)
    assert shared(sure, np.ones(5)) == [4, 4, 4]
    assert shared(sure, dear) == [4, 0, 1]  # 7.1 tokens for 2.4: each must survive with 0.6
    # Beside a row that has ended; beside one that verifies three drafts by its own rule.
    assert shared(sure, dear, [False, True, True], [0, 1, 1]) == [0, 0, 2]
    assert shared(sure, dear, [False, True, True], [4, 1, 1]) == [0, 0, 1]


@pytest.mark.parametrize("cost", [FULL_SIZE[:4], FLAT[:4], [1.0, 2.2, 2.3, 2.4]])
def test_no_other_widths_give_more_tokens_per_time(cost):
    """Rows as sure of every draft as of their first: forecasts then hold."""
    rng = np.random.default_rng(2)
    every = np.array(list(itertools.product(range(4), repeat=3)))  # widths of three rows
    price = np.asarray(tokens_cost(jnp.asarray(3 + every.sum(axis=1)), jnp.asarray(cost)))
    chosen = set()
    for sure in rng.uniform(0.1, 0.99, (100, 3)):
        gain = [np.cumsum([1.0, *(p ** np.arange(1, 4))])[every[:, i]] for i, p in enumerate(sure)]
        rate = sum(gain) / price
        got = shared(np.repeat(sure[:, None], 3, axis=1), cost)
        assert rate[(every == got).all(axis=1)] >= rate.max() - 1e-5
        chosen.add(tuple(got))
    assert len(chosen) > 5


def test_a_draft_has_no_say_in_its_share_either():
    rng = np.random.default_rng(0)
    share = jax.jit(jax.vmap(share_widths, in_axes=(0, None, None, None)))
    rest = jnp.ones(4, bool), jnp.ones(4, jnp.int32), jnp.asarray(FULL_SIZE, jnp.float32)
    a = rng.uniform(0.6, 1, (300, 4, 7)).astype(np.float32)
    for j in range(3):
        b = a.copy()
        b[:, 0, j + 1 :] = rng.uniform(0.6, 1, b[:, 0, j + 1 :].shape)
        got_a, got_b = (np.asarray(share(x, *rest))[:, 0] > j for x in (a, b))
        assert (got_a == got_b).all()
        assert 0.02 < got_a.mean() < 0.98


@functools.partial(jax.jit, static_argnames="fixed")
def simulate_shared(confidence, luck, cost, fixed=None):
    """As `simulate`, for rounds of several rows [R, B, n] whose costs are of all their tokens."""
    rows, n = confidence.shape[1:]

    def one(carry, x):
        count, spent = carry
        sure, drawn = x
        width = jnp.full(rows, n if fixed is None else fixed)
        if fixed is None:
            sharing = jnp.ones(rows, bool)
            width = share_widths(sure, sharing, jnp.ones(rows, jnp.int32), cost)
        kept = (drawn < sure) & (jnp.arange(n) < width[:, None])
        alive = jnp.cumprod(kept.astype(jnp.int32), axis=1).sum()
        paid = tokens_cost(rows + width.sum(dtype=jnp.int32), cost)
        return (count + rows + alive.astype(jnp.float32), spent + paid), None

    start = jnp.float32(rows), tokens_cost(jnp.int32(rows), cost)
    (count, spent), _ = jax.lax.scan(one, start, (confidence, luck))
    return count / spent


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("cost", [FULL_SIZE, FLAT])
@pytest.mark.parametrize("mean", [0.4, 0.7, 0.95])
def test_a_shared_budget_earns_at_least_what_the_best_fixed_width_does(cost, mean, rows):
    rng = np.random.default_rng(3)
    text = rng.beta(6 * mean, 6 * (1 - mean), (2000, rows, 1))
    confidence = rng.beta(9 * text + 0.1, 9 * (1 - text) + 0.1, (2000, rows, 7)).astype(np.float32)
    luck = rng.uniform(size=confidence.shape).astype(np.float32)
    cost = jnp.asarray(cost, jnp.float32)
    adaptive = simulate_shared(confidence, luck, cost)
    fixed = [float(simulate_shared(confidence, luck, cost, fixed=w)) for w in range(8)]
    assert adaptive >= 0.99 * max(fixed)
