"""Adaptive widths: the rule itself, and what it earns on tables of real costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax.widths import choose_widths

# Floors of a TP4 rank at the reading rate that was measured, by tokens verified.
FULL_SIZE = np.interp(range(1, 9), (1, 4, 6, 8), (1.23, 2.58, 3.44, 4.26)).tolist()


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


@pytest.mark.parametrize("cost", [FULL_SIZE, [1.0, 1.02, 1.04, 1.06, 1.07, 1.09, 1.11, 1.12]])
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
