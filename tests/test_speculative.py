"""The speculative loop: the target's own output, whatever is drafted, accepted or refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_params, visible
from helpers_dspark import (
    DRAFTER,
    GREEDY,
    TARGET,
    VOCAB,
    drafted,
    only_width,
    plain,
    run,
    speculator,
)

from inkling_jax import speculative
from inkling_jax.cache import init_cache
from inkling_jax.draft_layers import init_context
from inkling_jax.generation import Requests
from inkling_jax.model import abstract_params, forward, unembed
from inkling_jax.proposing import Speculator
from inkling_jax.sampling import Sampling, keys_from_seeds
from inkling_jax.sampling_params import SamplingParams

DRAFTS, ROWS, NEW = 4, 4, 40
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (ROWS, 11), dtype=np.int32)
LENGTHS = [11, 4, 7, 1]
COST = np.array([1.0, 1.1, 1.2, 1.3, 1.4])
SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=9),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.05),
]
DRAWN = Sampling.stack(SETTINGS)
# Filters change nothing where the temperature is 0: these rows share the programs of the others.
FROZEN = dataclasses.replace(DRAWN, temperature=jnp.zeros(ROWS))


def auto(cost=COST, budget=(NEW,) * ROWS):
    """A drafter and each row's budget, which is always given, so that runs share programs."""
    return {"drafter": (speculator(DRAFTS, cost),), "budget": jnp.array(budget, jnp.int32)}


@functools.cache
def greedy():
    tokens, _ = run(plain, PROMPTS, GREEDY, NEW, lengths=LENGTHS)
    return jax.device_get(tokens)


@pytest.mark.parametrize("width", range(DRAFTS + 1))
def test_greedy_text_is_that_of_plain_decoding(width):  # SP-05, SP-07
    """The window of 8 wraps several times; every number of drafts gets accepted somewhere."""
    options = auto(only_width(width, DRAFTS))
    tokens, state, rounds = run(drafted, PROMPTS, GREEDY, NEW, lengths=LENGTHS, **options)
    np.testing.assert_array_equal(tokens.ids, greedy().ids)
    np.testing.assert_allclose(tokens.logprobs, greedy().logprobs, atol=1e-4)
    proposed, accepted = np.asarray(rounds.proposed), np.asarray(rounds.accepted)
    assert set(proposed[proposed >= 0]) == {width}
    assert set(accepted[accepted >= 0]) == set(range(width + 1))
    assert (np.where(accepted >= 0, accepted + 1, 0).sum(axis=1) >= NEW - 1).all()
    assert np.asarray(state.base.done).all() and (np.asarray(state.base.count) == NEW).all()


def test_a_stop_id_ends_a_row_inside_an_accepted_run():
    options = auto(only_width(DRAFTS, DRAFTS))
    inside = 0
    for stop in np.unique(greedy().ids)[:12]:
        want, _ = run(plain, PROMPTS, GREEDY, NEW, lengths=LENGTHS, stop=(stop,))
        got, state, rounds = run(
            drafted, PROMPTS, GREEDY, NEW, lengths=LENGTHS, stop=(stop,), **options
        )
        np.testing.assert_array_equal(got.ids, want.ids)
        np.testing.assert_array_equal(state.base.count, (np.asarray(want.ids) >= 0).sum(axis=1))
        emitted = (np.asarray(got.ids) >= 0).sum(axis=1) - 1
        accepted = np.asarray(rounds.accepted)
        in_rounds = np.where(accepted >= 0, accepted + 1, 0).sum(axis=1)
        inside += (in_rounds > emitted).sum()  # the last token was a draft, not the one after
    assert inside > 0


def test_budgets_end_rows_on_the_token():
    budget = np.array([1, 40, 9, 0])
    options = auto(only_width(DRAFTS, DRAFTS), budget)
    tokens, _, rounds = run(drafted, PROMPTS, GREEDY, NEW, lengths=LENGTHS, **options)
    want = np.where(np.arange(NEW) < budget[:, None], greedy().ids, -1)
    np.testing.assert_array_equal(tokens.ids, want)
    assert (np.asarray(rounds.proposed)[[0, 3]] == -1).all()


@pytest.mark.parametrize("cost", [None, COST], ids=["fixed", "auto"])
def test_a_seed_gives_the_same_text_in_any_company(cost):  # SP-09
    if cost is None:
        cost = only_width(DRAFTS, DRAFTS)
    seeds = [11, 12, 13, 14]
    tokens, _, rounds = run(drafted, PROMPTS, SETTINGS, NEW, seeds, LENGTHS, **auto(cost))
    order = [2, 0, 3, 1]
    budget = [NEW, 3, NEW, 17]
    moved, _, _ = run(
        drafted,
        PROMPTS[order],
        [SETTINGS[i] for i in order],
        NEW,
        [seeds[i] for i in order],
        [LENGTHS[i] for i in order],
        **auto(cost, budget),
    )
    for place, row in enumerate(order):
        n = budget[place]
        np.testing.assert_array_equal(moved.ids[place, :n], tokens.ids[row, :n])
    other, _, _ = run(drafted, PROMPTS, SETTINGS, NEW, [15, 15, 13, 99], LENGTHS, **auto(cost))
    same = (np.asarray(other.ids) == np.asarray(tokens.ids)).all(axis=1)
    assert same.tolist() == [False, False, True, False]
    widths = {int(w) for w in np.unique(rounds.proposed)} - {-1}
    assert len(widths) > 1 if cost is COST else widths == {DRAFTS}


# Of all rows' tokens, each beyond five costs 0.05: some drafts pay, in company fewer than alone.
SHARED = np.array([1.0, 1.05, 1.1, 1.15, 1.2])


def test_rows_that_share_a_budget_give_their_greedy_text():
    options = auto(SHARED) | {"pooled": jnp.ones(ROWS, bool)}
    tokens, _, rounds = run(drafted, PROMPTS, GREEDY, NEW, lengths=LENGTHS, **options)
    np.testing.assert_array_equal(tokens.ids, greedy().ids)
    _, _, own = run(drafted, PROMPTS, GREEDY, NEW, lengths=LENGTHS, **auto(SHARED))
    assert len(set(np.unique(rounds.proposed)) - {-1}) > 2
    assert np.maximum(rounds.proposed, 0).sum() < np.maximum(own.proposed, 0).sum()


@pytest.mark.long
def test_a_row_with_a_seed_does_not_notice_rows_that_share():
    alone, _, rounds = run(drafted, PROMPTS, SETTINGS, NEW, range(4), LENGTHS, **auto(SHARED))
    pooled = jnp.array([True, False, True, True])
    options = auto(SHARED) | {"pooled": pooled}
    for seeds in ([0, 1, 2, 3], [7, 1, 8, 9]):
        got, _, found = run(drafted, PROMPTS, SETTINGS, NEW, seeds, LENGTHS, **options)
        np.testing.assert_array_equal(got.ids[1], alone.ids[1])
        np.testing.assert_array_equal(found.proposed[1], rounds.proposed[1])
    assert not np.array_equal(found.proposed, rounds.proposed)


@functools.cache
def programs():
    """prefill, begin and a block of one round, the state donated."""
    static = ("config", "alternatives", "rounds")
    return (
        jax.jit(speculative.prefill, static_argnames="config"),
        jax.jit(speculative.begin),
        jax.jit(
            functools.partial(speculative.decode_block, rounds=1),
            static_argnames=static,
            donate_argnames="state",
        ),
    )


def read_all(ids, lengths):
    """Cache and context after reading given tokens at once."""
    prefill, _, _ = programs()
    spec = speculator(DRAFTS, COST)
    cache = init_cache(TARGET.text, ROWS, 64, DRAFTS + 1, jnp.float32)
    context = init_context(DRAFTER, ROWS, 64, jnp.float32)
    padded = np.zeros((ROWS, 64), np.int32)
    for row, n in enumerate(lengths):
        padded[row, :n] = ids[row][:n]
    params = tiny_params(TARGET)
    return prefill(params, TARGET, spec, padded, jnp.asarray(lengths, jnp.int32), cache, context)


def start(sampling):
    logits, cache, context = read_all(list(PROMPTS), LENGTHS)
    requests = Requests(
        sampling,
        keys_from_seeds(range(ROWS)),
        jnp.full((ROWS, 1), -1, jnp.int32),
        jnp.full(ROWS, NEW, jnp.int32),
    )
    return programs()[1](logits, cache, context, requests)


def test_the_state_after_each_round_is_that_of_reading_its_tokens_one_by_one():
    """Also: rounds taken singly, their state donated, give the text of one loop."""
    state, first = start(DRAWN)
    block, spec, params = programs()[2], speculator(DRAFTS, COST), tiny_params(TARGET)
    ids = [[*PROMPTS[row, :n], int(first.ids[row, 0])] for row, n in enumerate(LENGTHS)]
    for turn in range(9):
        state, tokens, _ = block(params, TARGET, spec, state)
        for row in range(ROWS):
            ids[row] += [t for t in np.asarray(tokens.ids[row]).tolist() if t >= 0]
        lengths = [len(row) - 1 for row in ids]  # all but the last token are in the cache
        np.testing.assert_array_equal(state.base.cache.length, lengths)
        np.testing.assert_array_equal(state.base.token, [row[-1] for row in ids])
        np.testing.assert_array_equal(state.base.count, np.array(lengths) - LENGTHS + 1)
        if turn % 4:
            continue
        _, cache, context = read_all(ids, lengths)
        for row, n in enumerate(lengths):
            for a, b in zip(seen(state.base.cache, row), seen(cache, row), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-4)
            pairs = zip(jax.tree.leaves(state.context), jax.tree.leaves(context), strict=True)
            for a, b in pairs:
                np.testing.assert_allclose(a[row, :n], b[row, :n], atol=1e-4)
    seeds = range(ROWS)
    whole, _, _ = run(drafted, PROMPTS, SETTINGS, NEW, seeds, LENGTHS, **auto())
    for row, n in enumerate(LENGTHS):
        new = ids[row][n : n + NEW]
        np.testing.assert_array_equal(whole.ids[row, : len(new)], new)


def seen(cache, row):
    return visible(jax.tree.map(lambda x: x[row : row + 1], cache), TARGET)


def test_refused_drafts_leave_the_same_bits_as_drafts_never_made():  # CS-04
    params, block = tiny_params(TARGET), programs()[2]
    found = []
    for width in (DRAFTS, 0):
        state, _ = start(FROZEN)
        spec = speculator(DRAFTS, only_width(width, DRAFTS))
        state, _, rounds = block(params, TARGET, spec, state)
        found.append((state, np.asarray(rounds.accepted[:, 0])))
    (a, accepted), (b, _) = found
    refused = [row for row in range(ROWS) if accepted[row] == 0]
    assert refused
    for row in refused:
        n = int(a.base.cache.length[row])
        assert a.base.token[row] == b.base.token[row]
        for x, y in zip(seen(a.base.cache, row), seen(b.base.cache, row), strict=True):
            np.testing.assert_array_equal(x, y)
        for x, y in zip(jax.tree.leaves(a.context), jax.tree.leaves(b.context), strict=True):
            np.testing.assert_array_equal(x[row, :n], y[row, :n])


def test_the_loop_is_one_while_without_branches():
    state, _ = jax.eval_shape(lambda: start(DRAWN))
    pooled = dataclasses.replace(state.base.requests, pooled=jnp.ones(ROWS, bool))
    state = dataclasses.replace(state, base=dataclasses.replace(state.base, requests=pooled))
    spec = speculator(DRAFTS, COST)
    text = str(
        jax.make_jaxpr(
            lambda params, state: speculative.decode_block(params, TARGET, spec, state, 8)
        )(tiny_params(TARGET), state)
    )
    assert text.count("while[") == 1 and "cond[" not in text and "scan[" not in text


def test_logits_that_are_not_finite_end_the_row():
    params = tiny_params(TARGET)
    broken = jax.tree.map(lambda x: x, params)
    weight = broken["embed"]["weight"]
    third = int(greedy().ids[0, 3])
    broken["embed"]["weight"] = weight.replace(weight[...].at[third].set(jnp.nan))
    state, _ = start(FROZEN)
    spec = speculator(DRAFTS, only_width(DRAFTS, DRAFTS))
    count = 1
    while not bool(state.base.done[0]):
        state, tokens, _ = programs()[2](broken, TARGET, spec, state)
        count += int((np.asarray(tokens.ids[0]) >= 0).sum())
    assert count == int(state.base.count[0]) == np.flatnonzero(greedy().ids[0] == third)[0] + 1
    assert not bool(state.base.finite[0])


@pytest.mark.long
@pytest.mark.parametrize("drafts", range(1, 9))
def test_every_width_of_a_fixed_loop_gives_the_greedy_text(drafts):  # SP-05
    options = {"drafter": (speculator(drafts),)}
    tokens, _, rounds = run(drafted, PROMPTS, GREEDY, NEW, lengths=LENGTHS, **options)
    np.testing.assert_array_equal(tokens.ids, greedy().ids)
    assert set(np.unique(rounds.proposed)) <= {-1, drafts}


@pytest.mark.long
def test_a_seed_gives_the_same_text_alone():
    tokens, _, _ = run(drafted, PROMPTS, SETTINGS, NEW, [5, 6, 7, 8], LENGTHS, **auto())
    for row in (0, 2):
        n = LENGTHS[row]
        alone, _, _ = run(
            *(drafted, PROMPTS[row : row + 1], SETTINGS[row], NEW, [5 + row], [n]),
            **auto(budget=[NEW]),
        )
        np.testing.assert_array_equal(alone.ids[0], tokens.ids[row])


@pytest.mark.gpu  # products of bfloat16 are not implemented on CPUs
def test_in_bfloat16_each_token_is_within_one_step_of_the_most_probable():  # SP-07
    """The verified block and single tokens round differently, so near ties may fall otherwise."""
    kinds = abstract_params(TARGET, jnp.bfloat16)
    half = jax.tree.map(lambda x, y: x.astype(y.dtype), tiny_params(TARGET), kinds)
    spec = speculator(DRAFTS)
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), spec.params)
    spec = Speculator(weights, spec.config, spec.drafts)
    new = 200
    tokens, _, rounds = drafted(
        half, TARGET, spec, jnp.asarray(PROMPTS), jnp.asarray(LENGTHS, jnp.int32),
        Sampling.stack([GREEDY] * ROWS), keys_from_seeds(range(ROWS)), new,
        stop_ids=jnp.full((ROWS, 1), -1, jnp.int32),
    )  # fmt: skip
    assert (np.asarray(rounds.accepted) > 0).any()
    for row, n in enumerate(LENGTHS):
        ids = np.concatenate([PROMPTS[row, :n], np.asarray(tokens.ids[row])])[None]
        cache = init_cache(TARGET.text, 1, ids.shape[1], 1, jnp.bfloat16)
        count = jnp.array([ids.shape[1]], jnp.int32)
        hidden = jax.jit(forward, static_argnums=1)(half, TARGET, jnp.asarray(ids), count, cache)
        logits = np.asarray(unembed(half, TARGET, hidden.hidden))[0, n - 1 : -1]
        top = logits.max(axis=1)
        chosen = np.take_along_axis(logits, ids[0, n:, None], axis=1)[:, 0]
        step = 2.0 ** (np.floor(np.log2(np.abs(top))) - 7)
        assert (top - chosen <= step).all()


@pytest.mark.long
def test_a_picture_in_the_prompt_changes_nothing_about_it():
    rng = np.random.default_rng(5)
    features = jnp.asarray(rng.normal(size=(4, 32)), jnp.float32)
    index = np.full(PROMPTS.shape, -1, np.int32)
    index[0, 2:6] = range(4)
    index[2, 1:3] = (3, 0)
    options = {"features": features, "image_index": jnp.asarray(index), "lengths": LENGTHS}
    want, _ = run(plain, PROMPTS, GREEDY, NEW, **options)
    assert (np.asarray(want.ids)[[0, 2]] != greedy().ids[[0, 2]]).any()
    got, _, rounds = run(drafted, PROMPTS, GREEDY, NEW, **options, **auto())
    np.testing.assert_array_equal(got.ids, want.ids)
    assert (np.asarray(rounds.accepted) > 0).any()
