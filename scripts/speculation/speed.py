"""Speed of one row from its first token to the end of its reply, beside plain decoding.

Replies are the engine's own; a table of costs fixes how many drafts one of them verifies, so that
two programs serve all.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import inkling_jax as ij
from inkling_jax.drafting import NEVER
from inkling_jax.proposing import Speculator
from speculation.prompts import middle, rates

PLAIN = "none"
RUN = 20  # prompts that one loop answers before the next one does
LONGER = 6  # prompts that are also continued to a fixed length
Timed = tuple[int, int, float]  # tokens, rounds, seconds


def with_drafts(engine: ij.Engine, speculator: Speculator | None) -> ij.Engine:
    """Returns an engine of the same model that gives ids and no text."""
    return dataclasses.replace(engine, speculator=speculator, tokenizer=None)


def time_reply(
    engine: ij.Engine,
    prompt: Sequence[int],
    temperature: float,
    seed: int,
    tokens: int,
    *,
    stops: bool,
) -> Timed:
    """Answers a prompt: what came after the first token, and the seconds from it to the end.

    Unless it `stops` a reply has `tokens` tokens after the first one; they are at most as many.
    """
    setting = ij.SamplingParams(
        temperature=temperature, seed=seed, max_tokens=tokens + 1, ignore_eos=not stops
    )
    [reply] = engine.generate([prompt], setting)
    given = len(reply.token_ids) - 1
    rounds = len(reply.stats["rounds"]) if engine.speculator else given
    return given, rounds, reply.stats.get("decode_seconds", 0.0)


def verifying(speculator: Speculator, drafts: int) -> Speculator:
    """Returns a speculator that lets costs choose, and chooses always the same."""
    cost = np.where(np.arange(speculator.drafts + 1) <= drafts, 1.0, NEVER)
    return dataclasses.replace(speculator, cost=jnp.asarray(cost, jnp.float32))


def compile_all(
    engines: Mapping[str, ij.Engine], prompts: Iterable[Sequence[int]], tokens: int
) -> None:
    """Compiles all programs, at the same time where Python lets them."""
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = {
            pool.submit(time_reply, engine, prompt, 1.0, 0, tokens, stops=False): name
            for prompt in prompts
            for name, engine in engines.items()
        }
        for future in concurrent.futures.as_completed(running):
            future.result()
            print(f"{running[future]}: {time.monotonic() - began:.0f} s to compile", flush=True)


def compare(
    engines: Mapping[str, ij.Engine],
    prompts: Sequence[Sequence[int]],
    temperature: float,
    tokens: int,
) -> dict[str, dict[str, Any]]:
    """Returns each engine's speed on the same prompts; a few also go on behind a reply's end.

    They take turns at runs of prompts. The first reply of a run is not counted: the engines share
    programs, and a GPU's graph is written anew for each one's cache.
    """
    ended: dict[str, list[Timed]] = {name: [] for name in engines}
    longer: dict[str, list[Timed]] = {name: [] for name in engines}
    for at in range(0, len(prompts), RUN):
        for name, engine in engines.items():
            time_reply(engine, prompts[at], temperature, 0, tokens, stops=False)
            for seed in range(at, min(at + RUN, len(prompts))):
                for found in (ended, longer)[: 2 if seed < LONGER else 1]:
                    timed = time_reply(
                        engine, prompts[seed], temperature, seed, tokens, stops=found is ended
                    )
                    if timed[0]:
                        found[name].append(timed)
    plain, table = np.array(ended[PLAIN]), {}
    for name in engines:
        table[name] = summary(np.array(ended[name]), np.array(longer[name]), plain)
        loop = table[name]["tokens_per_round"] / table[name]["ms_per_round"]
        table[name]["loop_times_plain"] = round(loop * table[PLAIN]["ms_per_round"], 3)
    return table


def summary(timed: np.ndarray, longer: np.ndarray, plain: np.ndarray) -> dict[str, Any]:
    """Sums up replies [n, 3] (tokens, rounds, seconds) of one loop, beside those of the plain one.

    A line through the seconds of these and of `longer` ones over their rounds parts the time of a
    round (of a token without drafts) from what a call costs once.
    """
    tokens, rounds, seconds = timed.T
    plain_tokens, _, plain_seconds = plain.T
    speed = tokens.sum() / seconds.sum()
    slope, once = np.polyfit(*np.concatenate((timed, longer))[:, 1:].T, 1)
    figures = {
        "tokens_per_second": speed,
        "tokens_per_round": tokens.sum() / rounds.sum(),
        "ms_per_round": 1e3 * slope,
        "ms_per_call": 1e3 * once,
        "times_plain": speed / (plain_tokens.sum() / plain_seconds.sum()),
    }
    ratios = rates(tokens, seconds) / rates(plain_tokens, plain_seconds)
    return {
        "prompts": len(tokens),
        "tokens": int(tokens.sum()),
        **{name: round(float(value), 4) for name, value in figures.items()},
        "times_plain_interval": middle(ratios),
    }
