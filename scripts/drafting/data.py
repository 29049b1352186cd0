"""What a drafter of inkling-jax-nano learns from: right replies, and nano's own continuations."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from nano import batches, tasks, wire

from inkling_jax import generation
from inkling_jax.config import Config
from inkling_jax.sampling import Sampling, keys_from_seeds

# Rows of 2,048 tokens with pictures and keys far back, of which replies are learnt.
LONG = batches.Sizes(text=0, retrieval=3, chats=5, read_documents=False)
PROMPT, REPLY, ROWS = 256, 256, 32  # of the other batches
AT_ONCE = 2  # batches of continuations drawn together, the most tokens that the kernel takes
LONG_TURN, CONTINUED_TURNS, TURNS = 0, (3, 6), 8  # at the other turns of so many: replies


class Batch(NamedTuple):
    """tokens [B, T]; mask [B, T]: tokens to learn; lengths [B]; pictures as in `nano.batches`."""

    tokens: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    image_index: np.ndarray
    tiles: np.ndarray
    grid: np.ndarray


def of_corpus(made: batches.Batch) -> Batch:
    """Returns a batch of nano's training as one of ours."""
    mask = made.task != batches.NONE
    return Batch(made.tokens, mask, made.lengths, made.image_index, made.tiles, made.grid)


def draw_prompt(rng: np.random.Generator, source: batches.Source) -> np.ndarray:
    """Draws the start of a document or a question in the chat format, at most `PROMPT` tokens."""
    if rng.random() < 0.75:
        length = int(rng.integers(16, PROMPT))
        start = int(rng.integers(len(source.tokens) - length))
        return np.asarray(source.tokens[start : start + length], np.int32)
    kind = rng.random()
    if kind < 0.5:
        question, _ = tasks.chat_task(rng, source.words, source.facts)
    else:
        names = tasks.keys(rng, source.words, int(rng.integers(1, 4)))
        start = int(rng.integers(len(source.tokens) - 100))
        text = source.tokenizer.decode(source.tokens[start : start + 100])
        name = next(iter(names))
        question = f"{tasks.hide(rng, text, names)}\n\n{tasks.ask(name, names[name])[0]}"
    text = wire.render([{"role": "user", "content": question}], add_generation_prompt=True)
    return np.array(source.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)[-PROMPT:]


class Continuations:
    """Prompts continued by the target at temperature 1, drawn anew for each seed."""

    def __init__(self, params: nnx.State, config: Config, source: batches.Source):
        self.params, self.config, self.source = params, config, source
        sampling = Sampling(jnp.ones(ROWS * AT_ONCE))
        self._run = jax.jit(
            lambda params, tokens, lengths, keys: (
                generation.generate(params, config, tokens, lengths, sampling, keys, REPLY)[0].ids
            )
        )

    def of(self, source: batches.Source) -> Self:
        """Returns the same of another corpus, drawn by the same program."""
        other = copy.copy(self)
        other.source = source
        return other

    def make(self, seed: int) -> list[Batch]:
        """Returns `AT_ONCE` batches of prompts with their replies."""
        rng = np.random.default_rng([7, seed])
        prompts = [draw_prompt(rng, self.source) for _ in range(ROWS * AT_ONCE)]
        lengths = np.array([len(p) for p in prompts], np.int32)
        tokens = np.zeros((len(prompts), PROMPT), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        keys = keys_from_seeds([int(s) for s in rng.integers(2**62, size=len(prompts))])
        replies = np.asarray(self._run(self.params, tokens, lengths, keys))
        joined = np.zeros((len(prompts), PROMPT + REPLY), np.int32)
        mask = np.zeros(joined.shape, bool)
        ends = lengths + (replies >= 0).sum(axis=1, dtype=np.int32)
        for i, (start, end) in enumerate(zip(lengths, ends, strict=True)):
            joined[i, :start] = tokens[i, :start]
            joined[i, start:end] = replies[i, : end - start]
            mask[i, start:end] = True
        parts = (joined, mask, ends)
        return [
            _without_pictures(*(part[i : i + ROWS] for part in parts))
            for i in range(0, len(prompts), ROWS)
        ]


def make_replies(source: batches.Source, seed: int) -> Batch:
    """Makes a batch of small tasks and of keys hidden in a passage, with their right answers."""
    rng = np.random.default_rng([5, seed])
    width = PROMPT + REPLY
    tokens, mask = np.zeros((ROWS, width), np.int32), np.zeros((ROWS, width), bool)
    lengths = np.zeros(ROWS, np.int32)
    for i in range(ROWS):
        turns = _chat(rng, source) if i % 2 else _passage(rng, source)
        row, task = batches.conversation(source, turns, batches.CHAT)
        lengths[i] = min(len(row), width)
        tokens[i, : lengths[i]] = row[:width]
        mask[i, : lengths[i]] = task[:width] != batches.NONE
    return _without_pictures(tokens, mask, lengths)


def _chat(rng: np.random.Generator, source: batches.Source) -> list[tasks.Turn]:
    count = range(int(rng.integers(1, 9)))
    return [tasks.chat_task(rng, source.words, source.facts) for _ in count]


def _passage(rng: np.random.Generator, source: batches.Source) -> list[tasks.Turn]:
    names = tasks.keys(rng, source.words, int(rng.integers(1, 5)))
    start = int(rng.integers(len(source.tokens) - PROMPT))
    passage = source.tokens[start : start + int(rng.integers(PROMPT // 4, PROMPT))]
    text = source.tokenizer.decode(passage)
    (first, answer), *others = [tasks.ask(*key) for key in rng.permutation(list(names.items()))]
    return [(f"{tasks.hide(rng, text, names)}\n\n{first}", answer), *others]


def _without_pictures(tokens, mask, lengths) -> Batch:
    index = np.full(tokens.shape, -1, np.int32)
    tiles = np.zeros((1, 6, 40, 40, 3), np.uint8)
    return Batch(tokens, mask, lengths, index, tiles, np.ones((1, 2), np.int32))


def _replies_of(work: Path, seed: int) -> Batch:
    return make_replies(batches.worker_source(work), seed)


def stream(
    work: Path, continuations: Continuations, first: int, pool: int, workers: int
) -> Iterator[Batch]:
    """Yields batches from step `first` on: of eight, one long, two continued, the rest replies.

    Args:
      pool: how many batches of continuations are made; then they come again.
    """
    made: dict[int, list[Batch]] = {}
    half = max(workers // 2, 1)
    corpus = batches.stream(work, 5 * 10**8 + first, LONG, half)
    replies = batches.ahead(_replies_of, work, first, half)
    try:
        while True:
            turn, kind = divmod(first, TURNS)
            if kind == LONG_TURN:
                yield of_corpus(next(corpus))
            elif kind in CONTINUED_TURNS:
                number = len(CONTINUED_TURNS) * turn + CONTINUED_TURNS.index(kind)
                seed, part = divmod(number % pool, AT_ONCE)
                if seed not in made:
                    made[seed] = continuations.make(seed)
                yield made[seed][part]
            else:
                yield next(replies)
            first += 1
    finally:
        corpus.close()
        replies.close()
