"""Held-out questions, one a conversation, and prompts as a user's own would be made."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from inkling_jax.engine import Engine
from inkling_jax.prompts import Prompt, make_prompt
from nano import corpus, pictures, tasks, wire
from nano.recipe import TRAINED_LENGTH
from nano.tasks import Turn

SEED = 1 << 41  # training draws from seeds below 2^40, its own evaluation from 2^40 on
WHOLE_PICTURE = "What is in the picture?"
_WHOLE_SHARE = 0.15
_CHAT_KINDS = ("Repeat", "Reverse", "How many words", "What is the first", "What is the last")


class Item(NamedTuple):
    """A question with its one right answer.

    group: what kind of question it is; of a hidden key, how many tokens back it lies at least.
    """

    group: str
    question: str
    answer: str
    picture: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """What held-out items are drawn from; words and facts are those of training.

    tokens: the held-out documents one after the other, each behind its marker.
    token_bytes: how many bytes each token of the vocabulary stands for.
    sha256: digest of the whole corpus.
    """

    tokens: np.ndarray
    token_bytes: np.ndarray
    words: list[str]
    facts: list[Turn]
    sha256: str


def make_source(documents: list[corpus.Document], model: Engine, checkpoint: Path) -> Source:
    """Encodes the held-out part of `corpus.build()`, which has to come before JAX's threads."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    train = [d for d in documents if not d.held_out]
    marker = model.tokenizer.control[wire.DOCUMENT]
    ids = [[marker, *model.tokenizer.encode(d.text)] for d in documents if d.held_out]
    return Source(
        np.concatenate([np.array(i, np.int32) for i in ids]),
        np.array(wire.token_bytes(tokenizer)),
        tasks.common_words([d.text for d in train]),
        tasks.facts([d.text for d in train if d.name.startswith("stdlib.")]),
        corpus.digest(documents),
    )


def picture_items(count: int) -> list[Item]:
    """Returns questions about random pictures, in the mixture of training."""
    rng = np.random.default_rng(SEED)
    items = []
    for _ in range(count):
        picture = pictures.draw(rng)
        if rng.random() < _WHOLE_SHARE:
            turn = WHOLE_PICTURE, pictures.describe_all(picture)
        else:
            turn = pictures.question(rng, picture)
        kind = " ".join(turn[0].split()[:2]).lower()
        items.append(Item(kind, *turn, picture.pixels))
    return items


def chat_items(source: Source, count: int) -> list[Item]:
    """Returns small tasks; facts and what the model says of itself are learnt by heart."""
    rng = np.random.default_rng(SEED + 1)
    turns = [tasks.chat_task(rng, source.words, source.facts) for _ in range(count)]
    return [Item(_chat_kind(turn[0]), *turn) for turn in turns]


def _chat_kind(question: str) -> str:
    if question in tasks.ABOUT:
        return "about itself"
    if question.startswith("What is the module"):
        return "fact"
    if question.startswith("The key of"):
        return "key"
    found = (kind for kind in _CHAT_KINDS if question.startswith(kind))
    return next(found, "sum").lower()


def retrieval_items(
    model: Engine, source: Source, seed: int, length: int = TRAINED_LENGTH
) -> Iterator[tuple[int, Item]]:
    """Yields keys hidden in held-out text, in prompts that fill `length` tokens.

    Each comes with the number of tokens from its line to the end of the text, a lower bound of how
    far the answer has to look back.
    """
    rng = np.random.default_rng(SEED + 2 + seed)
    encode = model.tokenizer.encode
    while True:
        names = tasks.keys(rng, source.words, int(rng.integers(3, 9)))
        room = length - 96 - 24 * len(names)
        start = int(rng.integers(len(source.tokens) - room))
        text = model.tokenizer.decode(source.tokens[start : start + room].tolist())
        text = tasks.hide(rng, text, names)
        name = list(names)[rng.integers(len(names))]
        question, answer = tasks.ask(name, names[name])
        distance = len(encode(text.partition(f"\n{answer}\n")[2]))
        if distance > 0 and len(encode(text)) <= length - 64:  # text can change when encoded again
            yield distance, Item(f"{distance}", f"{text}\n\n{question}", answer)


def prompt_of(model: Engine, item: Item) -> Prompt:
    """Makes an item's prompt with the product's tokenizer, template and preprocessing."""
    images = [] if item.picture is None else [item.picture]
    return make_prompt(model.config, model.tokenizer, item.question, images)


def reply_of(model: Engine, item: Item) -> list[int]:
    """Returns the tokens of the right reply, from behind the prompt to the end of the turn."""
    control = model.tokenizer.control
    opener, *closers = (
        control[t] for t in ("<|content_text|>", "<|end_message|>", wire.END_SAMPLING)
    )
    return [opener, *model.tokenizer.encode(item.answer), *closers]
