"""A batch whose rows share a budget of drafts, beside the same prompts with widths of their own."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from nano import batches

import inkling_jax as ij
from speculation.prompts import draw

ROWS = 8
BATCHES = 4  # that are timed, after one that compiles


def sharing(
    engine: ij.Engine, kind: str, source: batches.Source, setting: ij.SamplingParams
) -> dict[str, Any]:
    """Returns figures of rows with `own` widths, which seeded rows have, and of a `shared` budget.

    `same_texts` counts the prompts that get the same reply; only greedy ones have to.
    """
    prompts = draw(kind, source)
    replies: dict[str, list[list[ij.GenerationOutput]]] = {"own": [], "shared": []}
    for _ in range(1 + BATCHES):
        batch = list(itertools.islice(prompts, ROWS))
        for name, outputs in replies.items():
            seeds = range(ROWS) if name == "own" else [None] * ROWS
            settings = [dataclasses.replace(setting, seed=seed) for seed in seeds]
            outputs.append(engine.generate(batch, settings))
    timed = {name: outputs[1:] for name, outputs in replies.items()}
    own, shared = (itertools.chain.from_iterable(outputs) for outputs in timed.values())
    same = sum(x.token_ids == y.token_ids for x, y in zip(own, shared, strict=True))
    return {name: figures(outputs) for name, outputs in timed.items()} | {"same_texts": same}


def figures(timed: Sequence[Sequence[ij.GenerationOutput]]) -> dict[str, Any]:
    """Sums up batches of replies: tokens after the first ones, and drafts verified in a round."""
    outputs = list(itertools.chain.from_iterable(timed))
    tokens = sum(len(o.token_ids) - 1 for o in outputs)
    rounds = [entry for o in outputs for entry in o.stats["rounds"]]
    seconds = sum(batch[0].stats["decode_seconds"] for batch in timed)
    return {
        "prompts": len(outputs),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
        "acceptance_length": round(tokens / len(rounds), 3),
        "verified": round(sum(entry["proposed"] for entry in rounds) / len(rounds), 3),
    }
