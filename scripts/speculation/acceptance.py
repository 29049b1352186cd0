"""Tokens per round by kind of prompt and temperature, and acceptance by position."""

import dataclasses
import itertools
import time
from typing import Any

import numpy as np
from nano import batches

import inkling_jax as ij
from speculation.prompts import draw, middle, rates

ROWS = 8  # with a block of 8 tokens each as many as the experts' kernel takes


def acceptance(
    engine: ij.Engine,
    kind: str,
    source: batches.Source,
    setting: ij.SamplingParams,
    tokens: int,
    end: float,
) -> dict[str, Any]:
    """Returns tokens per round with a 95 % interval over prompts, and acceptance by position.

    Prompts are drawn until they have given as many tokens as asked for, or the time is over.
    """
    outputs: list[ij.GenerationOutput] = []
    prompts = draw(kind, source)
    while sum(len(o.token_ids) - 1 for o in outputs) < tokens:
        batch = list(itertools.islice(prompts, ROWS))
        seeds = range(len(outputs), len(outputs) + ROWS)
        settings = [dataclasses.replace(setting, seed=seed) for seed in seeds]
        outputs += engine.generate(batch, settings)
        if time.monotonic() > end:
            break
    rounds = np.array([len(o.stats["rounds"]) for o in outputs])
    counts = np.array([len(o.token_ids) - 1 for o in outputs])  # the first comes from the prompt
    logprobs = [token.logprob for o in outputs for token in o.logprobs or ()]
    entries = [entry for o in outputs for entry in o.stats["rounds"]]
    accepted = np.array([entry["accepted"] for entry in entries])
    proposed = np.array([entry["proposed"] for entry in entries])
    places = range(1, proposed.max() + 1)
    return {
        "prompts": len(outputs),
        "tokens": int(counts.sum()),
        "nats_per_token": round(-float(np.mean(logprobs)), 3),
        "acceptance_length": round(float(counts.sum() / rounds.sum()), 3),
        "interval": middle(rates(counts, rounds)),
        "acceptance_by_position": [
            round(float((accepted[proposed >= n] >= n).mean()), 4) for n in places
        ],
    }
