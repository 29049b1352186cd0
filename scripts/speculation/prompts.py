"""Held-out prompts of three kinds, and what a figure of them is good for."""

import itertools
from collections.abc import Iterator

import numpy as np
from nano import batches, tasks

KINDS = ("chat", "tasks", "text")
ASKED = KINDS[:2]  # what has a reply that ends
Prompt = str | list[int]


def draw(kind: str, source: batches.Source) -> Iterator[Prompt]:
    """Yields different prompts: questions, questions on a passage, or starts of documents."""
    seen = set()
    for seed in range(1 << 32):
        prompt = _draw(kind, source, np.random.default_rng([11, KINDS.index(kind), seed]))
        if str(prompt) not in seen:
            seen.add(str(prompt))
            yield prompt


def some(kind: str, source: batches.Source, count: int) -> list[Prompt]:
    """Returns the first prompts of a kind."""
    return list(itertools.islice(draw(kind, source), count))


def rates(counts: np.ndarray, per: np.ndarray) -> np.ndarray:
    """Returns sum(counts) / sum(per) of draws of as many prompts, the same draws each time."""
    draws = np.random.default_rng(0).integers(len(per), size=(500, len(per)))
    return counts[draws].sum(axis=1) / per[draws].sum(axis=1)


def middle(draws: np.ndarray) -> list[float]:
    """Returns the ends of the middle 95 %."""
    return np.round(np.quantile(draws, [0.025, 0.975]), 3).tolist()


def _draw(kind: str, source: batches.Source, rng: np.random.Generator) -> Prompt:
    if kind == "chat":
        return tasks.chat_task(rng, source.words, source.facts)[0]
    start = int(rng.integers(len(source.tokens) - 512))
    if kind == "text":
        return [int(t) for t in source.tokens[start : start + int(rng.integers(48, 128))]]
    names = tasks.keys(rng, source.words, 3)
    text = source.tokenizer.decode(source.tokens[start : start + int(rng.integers(64, 256))])
    name = next(iter(names))
    return f"{tasks.hide(rng, text, names)}\n\n{tasks.ask(name, names[name])[0]}"
