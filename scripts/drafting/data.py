"""What a drafter of inkling-jax-nano learns from: nano's corpus, and nano's own continuations."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from nano import batches, tasks, wire

from inkling_jax import generation
from inkling_jax.config import Config
from inkling_jax.sampling import Sampling, keys_from_seeds

# Rows of 2,048 tokens of the corpus, of which replies are learnt; text comes in continuations.
LONG = batches.Sizes(text=0, retrieval=3, chats=5, read_documents=False)
PROMPT, REPLY, ROWS = 256, 256, 32  # of a batch of continuations
AT_ONCE = 2  # batches that are drawn together, the most tokens that the experts' kernel takes
CONTINUED_TURN = 3  # every third batch is of continuations


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
    if rng.random() < 0.25:
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
        none = jnp.zeros(ROWS * AT_ONCE)
        sampling = Sampling(none + 1, none.astype(jnp.int32), none + 1, none)
        self._run = jax.jit(
            lambda params, tokens, lengths, keys: (
                generation.generate(params, config, tokens, lengths, sampling, keys, REPLY)[0].ids
            )
        )

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


def _without_pictures(tokens, mask, lengths) -> Batch:
    index = np.full(tokens.shape, -1, np.int32)
    tiles = np.zeros((1, 6, 40, 40, 3), np.uint8)
    return Batch(tokens, mask, lengths, index, tiles, np.ones((1, 2), np.int32))


def stream(
    work: Path, continuations: Continuations, first: int, pool: int, workers: int
) -> Iterator[Batch]:
    """Yields batches from step `first` on: one of continuations, two of the corpus, and so on.

    Args:
      pool: how many batches of continuations are made; then they come again.
    """
    made: dict[int, list[Batch]] = {}
    corpus = batches.stream(work, 5 * 10**8 + first, LONG, workers)
    try:
        while True:
            turn, other = divmod(first, CONTINUED_TURN)
            if other:
                yield of_corpus(next(corpus))
            else:
                seed, part = divmod(turn % pool, AT_ONCE)
                if seed not in made:
                    made[seed] = continuations.make(seed)
                yield made[seed][part]
            first += 1
    finally:
        corpus.close()
