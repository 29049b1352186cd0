"""Serving with a drafter: the engine's replies, statistics, flags, and the costs it measures."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_params
from helpers_dspark import DRAFTER, TARGET, speculator, taught_drafter, with_heads

import inkling_jax as ij
from checkpoints.safetensors_writer import write_published
from inkling_jax import drafting, engine, reading
from inkling_jax.cli import parser
from inkling_jax.drafting import measure_costs, open_speculator, with_costs
from inkling_jax.engine import Engine
from inkling_jax.errors import InputError
from inkling_jax.load_drafter import config_json, published
from inkling_jax.outputs import round_stats

PROMPT = [35, 8, 9, 7, 9, 3, 2, 38, 4, 6]  # of two chunks
GREEDY = ij.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PREFILL_BUCKETS", (8, 32))
        patch.setattr(engine, "BLOCK_STEPS", engine.STREAM_STEPS)
        yield


@pytest.fixture(scope="module")
def plain():
    return Engine(tiny_params(TARGET), TARGET, stop_ids=TARGET.text.eos_token_id, context=64)


@pytest.fixture(scope="module")
def drafted(plain):
    return dataclasses.replace(plain, speculator=speculator(2, [1.0, 1.01, 1.02]))


def test_the_reply_to_a_chunked_prompt_is_that_without_a_drafter(plain, drafted):
    [want] = plain.generate([PROMPT], GREEDY)
    [output] = drafted.generate([PROMPT], GREEDY)
    assert output.token_ids == want.token_ids
    stats = output.stats
    assert sum(r["accepted"] + 1 for r in stats["rounds"]) >= 23
    assert stats["proposed"] == sum(r["proposed"] for r in stats["rounds"])
    assert stats["accepted"] == sum(r["accepted"] for r in stats["rounds"]) > 0
    assert sum(stats["verified_widths"]) == len(stats["rounds"]) < 23
    assert stats["acceptance_length"] == 23 / len(stats["rounds"])

    pieces = list(drafted.stream(PROMPT, GREEDY))
    assert [t for piece in pieces for t in piece.token_ids] == want.token_ids
    assert pieces[-1].output is not None
    assert pieces[-1].output.stats["rounds"] == stats["rounds"]


def test_rows_without_a_seed_share_what_pays(plain, drafted, monkeypatch):
    seen = []
    begin = engine.decoding.begin

    def note(logits, rings, requests, alternatives):
        seen.append(requests.pooled)
        return begin(logits, rings, requests, alternatives)

    monkeypatch.setattr(engine.decoding, "begin", note)
    seeded = dataclasses.replace(GREEDY, seed=1)
    prompts = [PROMPT[:3], PROMPT[:4], PROMPT[:5]]
    want = [plain.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    assert seen == [None] * 3  # no drafter
    got = drafted.generate(prompts, [GREEDY, seeded, GREEDY])
    assert [output.token_ids for output in got] == want
    np.testing.assert_array_equal(seen[3], [True, False, True, False])  # the last one is idle
    drafted.generate(prompts[:2], [dataclasses.replace(s, max_tokens=1) for s in (GREEDY, seeded)])
    assert seen[4] is None  # one row alone has no one to share with


def test_a_shorter_prompt_finds_nothing_of_the_longer_one_before(plain, drafted):  # CS-07
    [want] = plain.generate([[4, 6]], GREEDY)
    drafted.generate([PROMPT], GREEDY)
    [output] = drafted.generate([[4, 6]], GREEDY)
    assert output.token_ids == want.token_ids


def test_requests_in_rings_of_others_draw_as_in_new_ones(drafted):
    """With and without a seed of their own, alone and sharing what pays, cut off in a stream."""
    seeded = ij.SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    cold = dataclasses.replace(drafted).generate([PROMPT[:5]], seeded)[0]
    unseeded = dataclasses.replace(seeded, seed=None)
    both = [PROMPT[:5], PROMPT[:4]]
    for prompts, setting in ((both, unseeded), (both, seeded), ([PROMPT[:5]], unseeded)):
        drafted.generate(prompts, setting)
        found = drafted.generate([PROMPT[:5]], seeded)[0]
        assert found.token_ids == cold.token_ids
        assert found.stats["rounds"] == cold.stats["rounds"]
    stream = drafted.stream(PROMPT, seeded)
    next(stream)
    stream.close()
    assert drafted.generate([PROMPT[:5]], seeded)[0].stats["rounds"] == cold.stats["rounds"]


def test_drafts_may_reach_beyond_the_end_of_the_context(plain, drafted):  # JX-01
    until_full = dataclasses.replace(GREEDY, max_tokens=plain.context - len(PROMPT))
    [want] = plain.generate([PROMPT], until_full)
    [output] = drafted.generate([PROMPT], until_full)
    assert output.token_ids == want.token_ids and len(want.token_ids) == 54


def test_what_a_drafter_does_not_support_is_refused(drafted):  # AP-02
    setting = ij.SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    with pytest.raises(InputError, match="prompt_logprobs is not supported with a drafter"):
        drafted.generate([[1, 2]], setting)


def test_rounds_are_summed_up():
    rounds = [{"proposed": p, "accepted": a} for p, a in [(2, 2), (0, 0), (3, 1), (2, 0)]]
    stats = round_stats([*rounds, {"proposed": 9, "accepted": 9}], tokens=8)
    assert stats["rounds"] == rounds  # the last one came after the reply's end
    assert (stats["proposed"], stats["accepted"]) == (7, 3)
    assert stats["acceptance_length"] == 7 / 4
    assert stats["acceptance_by_position"] == [2 / 3, 1 / 3, 0.0]
    assert stats["verified_widths"] == [1, 0, 2, 1]
    assert round_stats([], tokens=1)["acceptance_length"] is None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a drafter, as of a model, one without, and one with an empty one."""
    directory = tmp_path_factory.mktemp("model")
    tensors = published(taught_drafter())
    write_published(directory / "drafter", tensors.items(), config_json(DRAFTER))
    (directory / "bare").mkdir()
    (directory / "half/drafter").mkdir(parents=True)
    return directory


def test_the_drafter_that_was_asked_for_is_opened(model):
    def opened(directory, drafter, tokens):
        return open_speculator(directory, TARGET, jnp.float32, drafter, tokens)

    found = opened(model, "auto", None)
    assert found is not None and found.config == DRAFTER
    assert found.drafts == 8 and found.cost is not None  # it has a confidence head
    found = opened(model / "bare", model / "drafter", 3)
    assert found is not None and (found.drafts, found.cost) == (3, None)
    assert opened(model, None, None) is None and opened(model, "none", None) is None
    assert opened(model / "bare", "auto", "auto") is None
    for directory, drafter, tokens, message in [
        (model, "auto", 9, "draft-tokens is 9, it must be a whole number in 1…8"),
        (model, "none", 4, "draft-tokens is 4, but there is no drafter"),
        (model / "bare", "auto", 4, "draft-tokens is 4, but there is no drafter"),
        (model, "auto", "x", "draft-tokens is 'x', it must be a whole number in 1…8"),
        (model, 5, None, "drafter is 5, it must be a directory"),
        (model, "", None, "drafter is '', it must be a directory"),
        (model, model / "absent", None, "cannot be read"),
        (model / "half", "auto", None, "half/drafter/config.json: cannot be read"),
    ]:
        with pytest.raises(InputError, match=message):
            opened(directory, drafter, tokens)


def test_without_a_confidence_head_the_whole_block_is_verified(tmp_path):
    config = with_heads(enable_confidence_head=False)
    tensors = published(taught_drafter(config))
    write_published(tmp_path, tensors.items(), config_json(config))
    found = open_speculator(tmp_path, TARGET, jnp.float32, tmp_path, None)
    assert found is not None and (found.drafts, found.cost) == (8, None)
    with pytest.raises(InputError, match="needs a drafter with a confidence head"):
        open_speculator(tmp_path, TARGET, jnp.float32, tmp_path, "auto")


def test_costs_are_measured_in_plain_rounds(monkeypatch):
    monkeypatch.setattr(drafting, "ROUNDS", 2)
    spec = speculator(1, [1.0, 1.0])
    cost = measure_costs(tiny_params(TARGET), TARGET, spec)
    assert cost[0] == 1.0 <= cost[1] < 100
    monkeypatch.setattr(drafting, "measure_costs", lambda *_: np.array([1.0, 1.5]))
    measured = with_costs(tiny_params(TARGET), TARGET, spec)
    np.testing.assert_array_equal(measured.cost, [1.0, 1.5])
    assert with_costs(tiny_params(TARGET), TARGET, speculator(1)).cost is None


def test_flags_say_which_drafter_and_how_many_drafts():
    flags = ["generate", "--model", "m", "--prompt", "p"]
    args = parser().parse_args(flags)
    assert (args.drafter, args.draft_tokens) == ("none", None)
    args = parser().parse_args([*flags, "--drafter", "auto", "--draft-tokens", "auto"])
    assert (args.drafter, args.draft_tokens) == ("auto", "auto")
    assert parser().parse_args([*flags, "--draft-tokens", "5"]).draft_tokens == 5
    with pytest.raises(InputError, match="'many' is neither a whole number nor auto"):
        parser().parse_args([*flags, "--draft-tokens", "many"])
