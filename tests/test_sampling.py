"""Sampling against plain sorted definitions in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax.errors import InputError
from inkling_jax.sampling import (
    Filters,
    Sampling,
    accept,
    distributions,
    filtered_logits,
    finite,
    gumbel,
    keys_from_seeds,
    logprobs,
    sample,
)
from inkling_jax.sampling_params import SamplingParams

filtered, spread = jax.jit(filtered_logits), jax.jit(distributions)
draw = jax.jit(sample)
verify = jax.jit(accept)


def settings(**columns) -> Sampling:
    """A `Sampling` from columns; a column that is not given filters nothing."""
    rows = len(next(iter(columns.values())))
    temperature = jnp.asarray(columns.pop("temperature", [1.0] * rows), jnp.float32)
    full = {"top_k": [0] * rows, "top_p": [1.0] * rows, "min_p": [0.0] * rows, **columns}
    kinds = {"top_k": jnp.int32}
    filters = Filters(**{k: jnp.asarray(v, kinds.get(k, jnp.float32)) for k, v in full.items()})
    return Sampling(temperature, filters)


def expected_kept(logits: np.ndarray, temperature, top_k, top_p, min_p) -> np.ndarray:
    """The kept ids of one row by the definition: sort, cut, renormalise, cut, cut."""
    if temperature < 1e-5:
        return np.asarray([int(np.argmax(logits))])
    scaled = logits / np.float32(temperature)
    order = np.argsort(-scaled, kind="stable")[: top_k or None]
    p = np.exp((scaled[order] - scaled.max()).astype(np.float64))
    before = np.concatenate([[0], np.cumsum(p / p.sum())[:-1]])
    keep = (before < top_p) | (top_p >= 1)
    keep[0] = True
    return np.sort(order[keep & (p >= min_p)])


CASES = [
    (t, k, p, m)
    for t in (0.0, 1e-8, 0.3, 1.0, 2.5)
    for k in (0, 1, 2, 7, 50, 10**6)
    for p in (0.0, 1e-9, 0.4371, 0.91234, 1.0)
    for m in (0.0, 0.0517, 1.0)
]


@pytest.mark.parametrize("vocab", [5, 300])
@pytest.mark.parametrize("kind", ["distinct", "ties", "flat"])
def test_filters_equal_the_sorted_definition(vocab, kind):  # AP-01
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=(len(CASES), vocab)).astype(np.float32) * 3
    if kind == "ties":  # both zeros too
        logits = np.round(logits) * rng.choice(np.float32([-1, 1]), logits.shape)
    if kind == "flat":
        logits[:] = -2.5
    t, k, p, m = zip(*CASES, strict=True)
    sampling = settings(temperature=t, top_k=k, top_p=p, min_p=m)
    out = np.asarray(filtered(logits, sampling))
    drawn = np.asarray(spread(out[:, None], sampling))[:, 0]
    for row, case in enumerate(CASES):
        kept = np.flatnonzero(drawn[row] if case[0] < 1e-5 else np.isfinite(out[row]))
        np.testing.assert_array_equal(kept, expected_kept(logits[row], *case), str(case))
        scale = np.float32(1.0 if case[0] < 1e-5 else case[0])
        np.testing.assert_allclose(out[row, kept], logits[row, kept] / scale, rtol=1e-6)


def test_nucleus_acts_after_temperature_and_keeps_its_boundary():  # AP-01
    logits = np.full((4, 50), -99, np.float32)  # one shape for most tests: compiling takes long
    logits[:, :4] = np.log(np.float32([0.05, 0.50, 0.15, 0.30]))
    sampling = settings(temperature=[1.0, 10.0, 0.1, 1.0], top_p=[0.9, 0.9, 0.9, 1e-9])
    kept = [np.flatnonzero(row).tolist() for row in np.isfinite(filtered(logits, sampling))]
    assert kept == [[1, 2, 3], [0, 1, 2, 3], [1], [1]]


def test_greedy_rows_in_a_mixed_batch_take_the_lowest_of_the_largest():  # AP-01
    logits = np.float32([[1, 3, 3, 2] + [-99] * 46] * 4)
    keys = keys_from_seeds(range(4))
    sampling = settings(temperature=[0.0, 1.0, 1e-8, 0.0], top_p=[1.0, 1.0, 0.0, 0.5])
    tokens = np.stack([draw(logits, sampling, keys, jnp.full(4, i))[0] for i in range(60)])
    assert (tokens[:, [0, 2, 3]] == 1).all()
    assert set(tokens[:, 1]) == {0, 1, 2, 3}


def test_a_batch_without_filters_draws_what_filters_that_keep_all_would():
    t = [0.0, 0.5, 1.0, 2.0]
    logits = np.random.default_rng(4).normal(size=(4, 50)).astype(np.float32)
    all_kept, keys = settings(temperature=t), keys_from_seeds(range(4))
    bare = Sampling.stack([SamplingParams(temperature=x, top_k=9 if x == 0 else 0) for x in t])
    assert bare.filters is None
    for i in range(20):
        at = jnp.full(4, i)
        pairs = zip(draw(logits, bare, keys, at), draw(logits, all_kept, keys, at), strict=True)
        for a, b in pairs:
            np.testing.assert_array_equal(a, b)
    a, b = (spread(filtered(logits, s)[:, None], s) for s in (bare, all_kept))
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_large_vocabulary_keeps_exactly_k():
    logits = np.random.default_rng(0).normal(size=(2, 200_058)).astype(np.float32)
    logits[:, 777::1000] = 5.0  # 200 equal ones at the top
    out = filtered(logits, settings(top_k=[50, 300], top_p=[1.0, 1.0]))
    np.testing.assert_array_equal(np.flatnonzero(np.isfinite(out[0])), 777 + 1000 * np.arange(50))
    np.testing.assert_array_equal(
        np.flatnonzero(np.isfinite(out[1])), expected_kept(logits[1], 1.0, 300, 1.0, 0.0)
    )


def test_same_request_gives_the_same_tokens_in_every_slot():  # SP-09
    logits = np.tile(np.random.default_rng(3).normal(size=50).astype(np.float32), (4, 1))
    keys = keys_from_seeds([7, 8, 7, 2**40 + 7])
    batch, single = settings(temperature=[1.0] * 4), settings(temperature=[1.0])
    out = np.stack([draw(logits, batch, keys, jnp.full(4, i))[0] for i in range(64)])
    alone = [draw(logits[:1], single, keys[:1], jnp.full(1, i))[0][0] for i in range(64)]
    np.testing.assert_array_equal(out[:, 0], alone)
    np.testing.assert_array_equal(out[:, 0], out[:, 2])
    assert (out[:, 0] != out[:, 1]).any() and (out[:, 0] != out[:, 3]).any()


def test_seeds_make_the_keys_that_jax_makes():
    seeds = [0, 1, 2**32 - 1]
    theirs = [jax.random.key_data(jax.random.key(np.uint32(s))) for s in seeds]
    np.testing.assert_array_equal(jax.random.key_data(keys_from_seeds(seeds)), np.stack(theirs))


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """Pearson's statistic over its 99.9 % bound; above 1 means another distribution."""
    seen = p > 0
    assert (counts[~seen] == 0).all()
    expected = p[seen] * counts.sum()
    freedom = seen.sum() - 1
    statistic = ((counts[seen] - expected) ** 2 / expected).sum()
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
    return statistic / bound


def softmax(x) -> np.ndarray:
    e = np.exp(np.asarray(x, np.float64) - np.max(x, -1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_draws_follow_the_filtered_distribution():
    rows, p = 20_000, np.float32([0.4, 0.25, 0.2, 0.1, 0.05])
    sampling = settings(temperature=[0.8] * rows, top_k=[4] * rows, top_p=[0.9] * rows)
    keys = keys_from_seeds(range(rows))
    tokens, _ = draw(np.tile(np.log(p), (rows, 1)), sampling, keys, jnp.full(rows, 5))
    counts = np.bincount(tokens, minlength=5)
    sharper = np.where(np.arange(5) < 3, p ** (1 / 0.8), 0)  # the fourth is past 0.9 of the four
    assert chi_square(counts, sharper / sharper.sum()) < 1
    assert chi_square(counts[:3], p[:3] / p[:3].sum()) > 1


def test_softcap_comes_before_temperature_and_logprobs():  # CM-10
    raw = jnp.asarray([0.0, 30.0, 50.0, 2000.0] + [-2000.0] * 46)
    capped = jnp.tile(30 * jnp.tanh(raw / 30), (4, 1))
    np.testing.assert_allclose(capped[0, :4], [0, 22.8478, 27.9333, 30], rtol=1e-5)
    sampling = settings(temperature=[0.0, 0.5, 1.0, 2.0])
    tokens, got = draw(capped, sampling, keys_from_seeds(range(4)), jnp.zeros(4, jnp.int32))
    assert tokens[0] == 3
    want = np.log(softmax(capped))[np.arange(4), tokens]  # not those of the tempered rows
    np.testing.assert_allclose(got, want, rtol=1e-5)
    halved = np.asarray(capped)[3] / 2
    np.testing.assert_allclose(filtered(capped, sampling)[3], halved)


def test_logprobs_list_alternatives_from_the_top():
    logits = jnp.asarray([[1.0, 2, 2, -4], [0, 0, 0, 0]])
    chosen, ids, values = logprobs(logits, jnp.asarray([3, 2]), 3)
    log_p = np.log(softmax(logits))
    np.testing.assert_array_equal(ids, [[1, 2, 0], [0, 1, 2]])
    np.testing.assert_allclose(chosen, [log_p[0, 3], log_p[1, 2]], rtol=1e-6)
    np.testing.assert_allclose(values, np.take_along_axis(log_p, np.asarray(ids), 1), rtol=1e-6)
    assert logprobs(logits, jnp.asarray([3, 2]), 0)[1].shape == (2, 0)


def test_non_finite_logits_are_reported():
    logits = jnp.asarray([[0, 1.0], [jnp.nan, 1], [0, jnp.inf], [-jnp.inf, 0]])
    np.testing.assert_array_equal(finite(logits), [True, False, False, False])


def speculate(p: jax.Array, q: jax.Array, n_valid: int, rows: int = 30_000):
    """Drafts from q and checks against p: accepted counts, drafts and following tokens of rows."""
    shape = (rows, q.shape[0])
    drafts = jax.random.categorical(jax.random.key(0), jnp.log(q), shape=shape).astype(jnp.int32)
    q, p = (jnp.broadcast_to(x, (rows, *x.shape)) for x in (q, p))
    uniform = jax.random.uniform(jax.random.key(1), drafts.shape)
    noise = gumbel(jax.random.key(2), (rows, p.shape[-1]))
    accepted, following = verify(drafts, q, p, jnp.full(rows, n_valid), uniform, noise)
    return np.asarray(accepted), np.asarray(drafts), np.asarray(following)


@pytest.mark.parametrize("n_valid", [0, 1, 2])
def test_speculation_keeps_the_target_distribution(n_valid):
    p = jnp.asarray([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]])
    q = jnp.asarray([[0.2, 0.3, 0.1, 0.4], [0.4, 0.3, 0.2, 0.1]])
    accepted, drafts, following = speculate(p, q, n_valid)
    assert accepted.max() == n_valid
    for j in range(n_valid + 1):  # given that position j was reached, its token follows p[j]
        token = np.where(accepted > j, drafts[:, min(j, 1)], following)[accepted >= j]
        assert chi_square(np.bincount(token, minlength=4), np.asarray(p[j])) < 1, j
    if n_valid:
        overlap = float(np.minimum(p[0], q[0]).sum())
        assert abs((accepted > 0).mean() - overlap) < 0.015


def test_greedy_speculation_accepts_while_equal():
    one_hot = np.eye(5, dtype=np.float32)
    p = one_hot[np.asarray([[1, 2, 3, 4]] * 4)]
    drafts = jnp.asarray([[1, 2, 3], [1, 0, 3], [0, 2, 3], [1, 2, 3]])
    n_valid = jnp.asarray([3, 3, 3, 1])
    chance = jnp.full((4, 3), 0.5), jnp.zeros((4, 5))
    accepted, following = verify(drafts, one_hot[np.asarray(drafts)], p, n_valid, *chance)
    np.testing.assert_array_equal(accepted, [3, 1, 0, 1])
    np.testing.assert_array_equal(following, [4, 2, 1, 2])


def test_equal_distributions_accept_everything():
    p = jnp.asarray([[0.25, 0.25, 0.5, 0], [0.1, 0.8, 0.1, 0], [0.3, 0.3, 0.3, 0.1]])
    assert (speculate(p, p[:2], 2)[0] == 2).all()


BAD_OPTIONS = [
    *({"temperature": t} for t in (-0.1, float("nan"), float("inf"), 1e300, "1", True)),
    *({"top_k": k} for k in (-1, 2.0)),
    *({"top_p": p} for p in (1.1, -0.1, float("nan"))),
    *({"min_p": p} for p in (2, -1)),
    *({"seed": s} for s in (-1, 2**63)),
    *({"stop": s} for s in ("", 3, (3,), b"x", "a\udcff")),
    *({"logprobs": 21}, {"prompt_logprobs": -1}, {"max_tokens": 0}, {"stop_token_ids": (-1,)}),
    *({"n": 2}, {"presence_penalty": 0.5}, {"logit_bias": {}}, {"repetition_penalty": 1.1}),
    *({"ignore_eos": 1}, {"temperatur": 1.0}),
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_bad_options_are_refused_by_name(options):  # AP-01, AP-02
    (name,) = options
    with pytest.raises(InputError, match=name):
        SamplingParams(**options)


def test_numbers_of_numpy_are_numbers():
    of_numpy = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint8(7))
    assert repr(of_numpy) == repr(SamplingParams(temperature=0.5, top_k=3, seed=7))


def test_arguments_override_the_generation_config():
    config = {"do_sample": True, "temperature": 0.7, "top_k": 20, "eos_token_id": [1, 2]}
    defaults = SamplingParams.from_generation_config(config)
    merged = SamplingParams(temperature=0.2, max_tokens=3, stop="x").over(defaults)
    assert (merged.temperature, merged.top_k, merged.max_tokens) == (0.2, 20, 3)
    assert merged.stop == ("x",)
    assert SamplingParams(stop=None, stop_token_ids=[5]).stop_token_ids == (5,)
    for ids in (np.array([5, 6]), jnp.array([5, 6]), {5, 6}):
        assert SamplingParams(stop_token_ids=ids).stop_token_ids == (5, 6)
    assert SamplingParams.from_generation_config({"temperature": 0.7}).temperature == 0
    rows = Sampling.stack([merged, SamplingParams(), dataclasses.replace(merged, top_k=10**12)])
    np.testing.assert_allclose(rows.temperature, [0.2, 1, 0.2])
    assert rows.filters is not None
    np.testing.assert_array_equal(rows.filters.top_k, [20, 0, 2**31 - 1])
    np.testing.assert_array_equal(rows.filters.top_p, [1, 1, 1])


def test_nothing_sorts_loops_or_branches():
    rows = settings(temperature=[1.0] * 4)
    program = str(jax.make_jaxpr(filtered_logits)(jnp.zeros((4, 50)), rows))
    assert "reduce_sum" in program
    for primitive in ("sort", "top_k", "while", "scan", "cond", "cumsum"):
        assert f" {primitive}[" not in program, primitive
