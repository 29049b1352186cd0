"""Token arrays of one step, a pure function of a seed; made by worker processes ahead of time."""

import collections
import dataclasses
import functools
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from nano import corpus, pictures, tasks, wire
from nano.recipe import TRAINED_LENGTH

NONE, TEXT, RETRIEVAL, PICTURE, CHAT = range(5)  # what a token counts for when it is predicted
TASKS = ("none", "text", "retrieval", "picture", "chat")
PICTURES_PER_ROW = 16
_HELD_OUT_SEED = 1 << 40
_PICTURE_SHARE = 0.65
_FEW_SHARE = 0.25  # of the rows of conversations: rows with one or two only


class Batch(NamedTuple):
    """Rows of text, of documentation with hidden keys, and of short conversations.

    tokens, task, answer: int32 [B, T]. `task` says what a token counts for, NONE if nothing;
      `answer` numbers the answers of a row from 0 on, -1 outside.
    lengths: int32 [B].
    image_index: int32 [B, T], which of all tiles (six a picture) stands in for a token, else -1.
    tiles: uint8 [pictures, 6, 40, 40, 3]; grid: int32 [pictures, 2], rows and columns of tiles.
    """

    tokens: np.ndarray
    task: np.ndarray
    answer: np.ndarray
    lengths: np.ndarray
    image_index: np.ndarray
    tiles: np.ndarray
    grid: np.ndarray


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Rows of each kind in a batch, tokens of a row, and the choices of `recipe.Phase`."""

    text: int = 7
    retrieval: int = 5
    chats: int = 4
    length: int = TRAINED_LENGTH
    read_documents: bool = True
    question_shares: tuple[float, ...] = pictures.EVEN


@dataclasses.dataclass(frozen=True)
class Source:
    """What batches are drawn from: tokens of the training or of the held-out documents."""

    tokenizer: Tokenizer
    tokens: np.ndarray
    words: list[str]
    facts: list[tuple[str, str]]
    held_out: bool


def prepare(folder: Path, tokenizer_file: Path | None = None) -> dict[str, Any]:
    """Builds the corpus in `folder`, unless it is there, and returns its record.

    Args:
      tokenizer_file: of the model that is to read it; without one, a tokenizer is trained.
    """
    record_file = folder / "corpus.json"
    if record_file.exists():
        return json.loads(record_file.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    documents = corpus.build()
    train = [d for d in documents if not d.held_out]
    held_out = [d for d in documents if d.held_out]
    if tokenizer_file:
        shutil.copyfile(tokenizer_file, folder / "tokenizer.json")
    else:
        wire.train_tokenizer(d.text for d in train).save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    counts = {}
    for name, part in (("train", train), ("held_out", held_out)):
        encoded = tokenizer.encode_batch([wire.DOCUMENT + d.text for d in part])
        tokens = np.concatenate([np.array(e.ids, np.uint16) for e in encoded])
        np.save(folder / f"{name}.npy", tokens)
        counts[name] = {
            "documents": len(part),
            "bytes": sum(len(d.text.encode()) for d in part),
            "tokens": len(tokens),
        }
    texts = [d.text for d in train]
    stdlib = [d.text for d in train if d.name.startswith("stdlib.")]
    drawn = {"words": tasks.common_words(texts), "facts": tasks.facts(stdlib)}
    (folder / "tasks.json").write_text(json.dumps(drawn))
    record = {"sha256": corpus.digest(documents), **counts, "facts": len(drawn["facts"])}
    record_file.write_text(json.dumps(record))
    return record


def open_source(folder: Path, held_out: bool) -> Source:
    """Opens what `prepare` built."""
    drawn = json.loads((folder / "tasks.json").read_text())
    return Source(
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        np.load(folder / ("held_out.npy" if held_out else "train.npy"), mmap_mode="r"),
        drawn["words"],
        [tuple(turn) for turn in drawn["facts"]],
        held_out,
    )


def make_batch(source: Source, seed: int, sizes: Sizes) -> Batch:
    """Makes the batch of a seed; held-out batches have other seeds and hide keys far away."""
    rng = np.random.default_rng(seed + (_HELD_OUT_SEED if source.held_out else 0))
    rows = [_text_row(rng, source, sizes.length) for _ in range(sizes.text)]
    rows += [_retrieval_row(rng, source, sizes) for _ in range(sizes.retrieval)]
    slots = sizes.chats * PICTURES_PER_ROW
    tiles = np.zeros((slots, pictures.MAX_CELLS, pictures.CELL, pictures.CELL, 3), np.uint8)
    grid = np.ones((slots, 2), np.int32)
    for row in range(sizes.chats):
        tokens, shown = _chat_row(rng, source, sizes)
        rows.append(tokens)
        for slot, picture in enumerate(shown, start=row * PICTURES_PER_ROW):
            tiles[slot, : len(picture.cells)] = picture.tiles
            grid[slot] = picture.rows, picture.columns
    tokens, task, lengths = _stack(rows, sizes.length, source.tokenizer)

    ends = np.pad((task != NONE) & (task != TEXT), ((0, 0), (1, 0)))
    number = np.cumsum(ends[:, 1:] & ~ends[:, :-1], axis=1) - 1
    answer = np.where(ends[:, 1:], number, -1)
    index = np.full(tokens.shape, -1)
    placeholder = source.tokenizer.token_to_id(wire.IMAGE)
    first_slot = 0
    for row in range(sizes.text + sizes.retrieval, len(rows)):
        at = np.flatnonzero(tokens[row] == placeholder)
        counts = grid[first_slot : first_slot + PICTURES_PER_ROW].prod(axis=1)
        tile = [
            (first_slot + i) * pictures.MAX_CELLS + j
            for i, n in enumerate(counts)
            for j in range(n)
        ]
        index[row, at] = tile[: len(at)]
        first_slot += PICTURES_PER_ROW
    return Batch(
        tokens, task, answer.astype(np.int32), lengths, index.astype(np.int32), tiles, grid
    )


Row = tuple[np.ndarray, np.ndarray]  # tokens, tasks


def _text_row(rng: np.random.Generator, source: Source, length: int) -> Row:
    start = int(rng.integers(len(source.tokens) - length))
    tokens = source.tokens[start : start + length]
    return tokens, np.full(length, TEXT)


def _retrieval_row(rng: np.random.Generator, source: Source, sizes: Sizes) -> Row:
    turns = 1 if source.held_out else 5
    count = int(rng.integers(3, 9))
    names = tasks.keys(rng, source.words, count)
    room = sizes.length - 32 - 24 * count - 40 * turns
    size = room if source.held_out or rng.random() < 0.6 else int(rng.integers(64, room))
    start = int(rng.integers(len(source.tokens) - size))
    text = source.tokenizer.decode(source.tokens[start : start + size])
    # Held out: the answer lies beyond window and extent.
    text = tasks.hide(rng, text, names, before=0.8 if source.held_out else 1.0)
    chosen = rng.permutation(list(names))[:turns]
    asked = [tasks.ask(name, names[name]) for name in chosen]
    asked[0] = (f"{text}\n\n{asked[0][0]}", asked[0][1])
    tokens, task = conversation(source, asked, RETRIEVAL)
    if sizes.read_documents and not source.held_out:
        task = np.where(task == NONE, TEXT, task)
    return tokens, task


def _chat_row(
    rng: np.random.Generator, source: Source, sizes: Sizes
) -> tuple[Row, list[pictures.Picture]]:
    """Returns conversations one after the other, and the pictures that they show."""
    few = not source.held_out and rng.random() < _FEW_SHARE
    most = int(rng.integers(1, 3)) if few else sizes.length
    chats: list[Row] = []
    shown: list[pictures.Picture] = []
    while len(chats) < most and sum(len(t) for t, _ in chats) < sizes.length:
        if len(shown) < PICTURES_PER_ROW and rng.random() < _PICTURE_SHARE:
            shown.append(pictures.draw(rng))
            chats.append(_picture_chat(rng, source, shown[-1], sizes.question_shares))
        else:
            turns = range(int(rng.integers(1, 4)))
            chat = [tasks.chat_task(rng, source.words, source.facts) for _ in turns]
            chats.append(conversation(source, chat, CHAT, effort=_effort(rng)))
    tokens, task = (np.concatenate(x) for x in zip(*chats, strict=True))
    return (tokens, task), shown


def _picture_chat(
    rng: np.random.Generator, source: Source, picture: pictures.Picture, shares: Sequence[float]
) -> Row:
    if rng.random() < 0.15:
        turns = [("What is in the picture?", pictures.describe_all(picture))]
    else:
        count = int(rng.integers(1, 5))
        turns = [pictures.question(rng, picture, shares) for _ in range(count)]
    image = {"role": "user", "content": [{"type": "image"}]}
    return conversation(
        source, turns, PICTURE, [image], tiles=len(picture.cells), effort=_effort(rng)
    )


def _effort(rng: np.random.Generator) -> float | None:
    return round(float(rng.uniform(0, 0.99)), 1) if rng.random() < 0.15 else None


def conversation(source, turns, kind: int, messages=(), tiles=0, effort=None) -> Row:
    """Encodes a chat; what the model says counts for `kind`, the rest for nothing."""
    messages = list(messages)
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    text = wire.render(messages, tiles, effort)
    tokens = np.array(source.tokenizer.encode(text, add_special_tokens=False).ids)
    opened = np.cumsum(tokens == source.tokenizer.token_to_id(wire.MODEL))
    closed = np.cumsum(tokens == source.tokenizer.token_to_id(wire.END_SAMPLING))
    said = np.zeros(len(tokens), bool)
    said[1:] = (opened > closed)[:-1]  # from after the opener to the end of the turn
    return tokens, np.where(said, kind, NONE)


def _stack(rows: list[Row], length: int, tokenizer: Tokenizer) -> tuple[np.ndarray, ...]:
    tokens = np.full((len(rows), length), tokenizer.token_to_id(wire.PAD), np.int32)
    task = np.zeros((len(rows), length), np.int32)
    lengths = np.array([min(len(t), length) for t, _ in rows], np.int32)
    for i, (t, k) in enumerate(rows):
        tokens[i, : lengths[i]] = t[:length]
        task[i, : lengths[i]] = k[:length]
    return tokens, task, lengths


@functools.cache
def worker_source(folder: Path) -> Source:
    """Opens the training documents once in a process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return open_source(folder, held_out=False)


def _work(folder: Path, seed: int, *, sizes: Sizes) -> Batch:
    return make_batch(worker_source(folder), seed, sizes)


def stream(folder: Path, first: int, sizes: Sizes, workers: int) -> Iterator[Batch]:
    """Yields the training batches of seeds `first`, `first` + 1, … in order."""
    return ahead(functools.partial(_work, sizes=sizes), folder, first, workers)


def ahead[Made](
    make: Callable[[Path, int], Made], folder: Path, first: int, workers: int
) -> Iterator[Made]:
    """Yields `make(folder, seed)` for seeds from `first` on, which other processes work ahead."""
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        waiting: collections.deque = collections.deque()
        while True:
            while len(waiting) < 4 * workers:
                waiting.append(pool.apply_async(make, (folder, first)))
                first += 1
            yield waiting.popleft().get()
