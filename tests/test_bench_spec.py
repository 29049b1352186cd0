"""What the speculation benchmark makes of replies; the replies themselves are made up."""

import dataclasses
import time
import types

import numpy as np
import pytest
from speculation import acceptance, prompts, sharing, speed

import inkling_jax as ij
from scripts import bench_spec


def test_a_reply_is_rounds_and_what_a_call_costs():
    rounds = np.array([2, 4, 8, 5])
    plain = np.stack([3 * rounds, 3 * rounds, 3e-3 * rounds + 1e-3], axis=1)
    timed = np.stack([3 * rounds, rounds, 2e-3 * rounds + 1e-3], axis=1)
    longer = np.array([[128, 70, 0.141], [128, 60, 0.121]])
    found = speed.summary(timed, longer, plain)
    assert (found["ms_per_round"], found["ms_per_call"]) == (2.0, 1.0)
    assert (found["prompts"], found["tokens"], found["tokens_per_round"]) == (4, 57, 3.0)
    assert found["times_plain"] == pytest.approx(61 / 42, abs=1e-3)
    low, high = found["times_plain_interval"]
    assert low < found["times_plain"] < high < 1.5


def test_both_speeds_are_told():
    timed = np.array([[12, 3, 7e-3], [8, 2, 5e-3], [20, 5, 11e-3]])
    plain = np.array([[12, 12, 25e-3], [8, 8, 17e-3], [20, 20, 41e-3]])
    figures = speed.summary(timed, timed, plain) | {"loop_times_plain": 4.0}
    line = bench_spec.speed_line(figures)
    assert line.startswith("1739 tokens/s after the first token, 3.61 (")
    assert "a call costs 1.00 ms once, then a round 2.000 ms for 4.00 tokens" in line
    assert line.endswith("the loop alone is 4.00 x plain")


@dataclasses.dataclass(frozen=True)
class Fake:
    """Replies of 12 or of 128 tokens: 2 ms a round, 1 ms a call; prompt 1 ends at once."""

    speculator: int | None
    calls: list = dataclasses.field(default_factory=list)

    def generate(self, prompts, setting):
        self.calls.append((*prompts, setting.seed))
        tokens = setting.max_tokens - 1 if setting.ignore_eos else 12 * (prompts != [1])
        rounds = tokens // (self.speculator or 1)
        stats = {"rounds": [{}] * rounds}
        if tokens:
            first = 1.0 if len(self.calls) == 1 else 0.0  # the graph is written anew
            stats["decode_seconds"] = first + 2e-3 * rounds + 1e-3
        return [types.SimpleNamespace(token_ids=[0] * (tokens + 1), stats=stats)]


def test_loops_are_compared_with_the_plain_one():
    engines = {speed.PLAIN: Fake(None), "3": Fake(4)}
    found = speed.compare(engines, [0, 1, 2], 1.0, 128)
    assert engines["3"].calls == [(0, 0), (0, 0), (0, 0), (1, 1), (1, 1), (2, 2), (2, 2)]
    plain, drafted = found[speed.PLAIN], found["3"]
    assert plain["prompts"] == drafted["prompts"] == 2 and plain["tokens"] == 24
    assert (plain["ms_per_round"], plain["ms_per_call"]) == (2.0, 1.0)
    assert (plain["loop_times_plain"], drafted["loop_times_plain"]) == (1.0, 4.0)
    assert drafted["times_plain"] == pytest.approx(25 / 7, abs=1e-3)


def test_prompts_are_drawn_until_there_are_tokens_enough(monkeypatch):
    """Rounds of 1 and 3 tokens, in replies of five tokens of which the prompt gives the first."""
    calls = []

    def generate(batch, settings):
        calls.append([setting.seed for setting in settings])
        rounds = [{"proposed": 2, "accepted": 0}, {"proposed": 2, "accepted": 2}]
        sure = [types.SimpleNamespace(logprob=-0.5)]
        reply = {"token_ids": [0] * 5, "stats": {"rounds": rounds}, "logprobs": sure}
        return [types.SimpleNamespace(**reply) for _ in batch]

    monkeypatch.setattr(acceptance, "draw", lambda kind, source: iter(range(10**6)))
    engine, setting = types.SimpleNamespace(generate=generate), ij.SamplingParams()
    found = acceptance.acceptance(engine, "chat", None, setting, 70, time.monotonic() + 60)
    assert calls == [[*range(8)], [*range(8, 16)], [*range(16, 24)]]
    assert (found["prompts"], found["tokens"], found["nats_per_token"]) == (24, 96, 0.5)
    assert (found["acceptance_length"], found["interval"]) == (2.0, [2.0, 2.0])
    assert found["acceptance_by_position"] == [0.5, 0.5]
    late = acceptance.acceptance(engine, "chat", None, setting, 70, time.monotonic() - 1)
    assert late["prompts"] == 8


def test_rows_that_share_have_no_seeds(monkeypatch):
    """The first batch is not timed; rows with seeds take rounds of two, without them of four."""
    calls = []

    def generate(batch, settings):
        calls.append([setting.seed for setting in settings])
        rounds = [{"proposed": 3, "accepted": 1}] * (4 if settings[0].seed is None else 2)
        stats = {"rounds": rounds, "decode_seconds": 0.5 if len(calls) > 2 else 9}
        reply = {"token_ids": [len(calls) == 8] * 9, "stats": stats}
        return [types.SimpleNamespace(**reply) for _ in batch]

    monkeypatch.setattr(sharing, "draw", lambda kind, source: iter(range(10**6)))
    engine, setting = types.SimpleNamespace(generate=generate), ij.SamplingParams(max_tokens=9)
    found = sharing.sharing(engine, "chat", None, setting)
    assert calls == [[*range(8)], [None] * 8] * 5
    assert found["own"] == {
        "prompts": 32, "tokens": 256, "tokens_per_second": 128.0, "acceptance_length": 4.0,
        "verified": 3.0,
    }  # fmt: skip
    assert found["shared"]["acceptance_length"] == 2.0 and found["same_texts"] == 24


def test_no_prompt_comes_twice(monkeypatch):
    monkeypatch.setattr(prompts, "_draw", lambda kind, source, rng: int(rng.integers(40)))
    drawn = prompts.some("chat", None, 30)
    assert len(set(drawn)) == 30 and drawn == prompts.some("chat", None, 30)


def test_what_was_measured_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    curves = {bench_spec.WHOLE: {"acceptance_by_position": [0.9, 0.5]}}
    result = {"device": "cpu", "drafts": 2, "acceptance": {"chat": curves}}
    bench_spec.plot(result, tmp_path / "one.png")
    rates = {"none": {"tokens_per_second": 1.0}, "2": {"tokens_per_second": 2.0}}
    bench_spec.plot(result | {"speed": {"chat": rates}}, tmp_path / "two.png")
    assert (tmp_path / "one.png").stat().st_size < (tmp_path / "two.png").stat().st_size
