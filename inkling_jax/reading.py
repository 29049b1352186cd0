"""Reads prompts into a cache in chunks of a few bucketed lengths, so that few programs compile."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, Sharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from inkling_jax import generation, speculative
from inkling_jax.cache import Cache, cache_specs, init_cache
from inkling_jax.config import Config, TextConfig
from inkling_jax.decoding import Rings
from inkling_jax.draft_layers import init_context
from inkling_jax.generation import Tokens
from inkling_jax.memory import check_fits, device_bytes
from inkling_jax.model import encode_image
from inkling_jax.prompts import Prompt
from inkling_jax.proposing import Speculator
from sharding.mesh import batch_parts, current_mesh
from sharding.partition import by_row, everywhere

PREFILL_BUCKETS = (32, 128, 512, 2048)
FEWEST_TILES, FEWEST_FEATURES = 4, 16  # of a picture and of all, padding included
MOST_TILES = 4096  # of the pictures that are encoded together

_init_cache = jax.jit(
    init_cache, static_argnames=("config", "batch", "capacity", "max_block", "dtype")
)
_init_context = jax.jit(init_context, static_argnames=("config", "batch", "capacity", "dtype"))
_encode = jax.jit(jax.vmap(encode_image, in_axes=(None, None, 0, 0)), static_argnums=1)


@jax.jit(static_argnames="config", donate_argnames=("cache", "context", "logits"))
def _prefill(
    params, config, speculator, first, tokens, lengths, cache, context, logits, features,
    image_index,
):  # fmt: skip
    """Reads a chunk; rows without tokens in it keep their logits."""
    cache = _anew(first, cache)
    if speculator is None:
        prefill = generation.prefill
        new, cache = prefill(params, config, tokens, lengths, cache, features, image_index)
    else:
        new, cache, context = speculative.prefill(
            params, config, speculator, tokens, lengths, cache, context, features, image_index
        )
    return *by_row((jnp.where(lengths[:, None] > 0, new, logits), context)), cache


@jax.jit(static_argnames=("config", "alternatives"), donate_argnames=("cache", "logits"))
def _score(
    params, config, first, tokens, targets, lengths, cache, logits, features, image_index,
    alternatives,
):  # fmt: skip
    """Reads a chunk and scores its targets; returns (all logits, rows' last, scores, cache)."""
    cache = _anew(first, cache)
    every, scored, cache = generation.score(
        params, config, tokens, targets, lengths, cache, features, image_index,
        alternatives=alternatives,
    )  # fmt: skip
    last = generation.last_token(every, lengths)
    logits = by_row(jnp.where(lengths[:, None] > 0, last, logits))
    return everywhere(every), logits, everywhere(scored), cache


def _anew(first, cache: Cache) -> Cache:
    """Forgets, with the first chunk, what the rings were last used for."""
    return dataclasses.replace(cache, length=jnp.where(first, 0, cache.length))


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What to find out about the prompts' own tokens while they are read; filled chunk by chunk.

    Attributes:
      alternatives: how many alternatives to list per token.
      keep_logits: whether `logits` collects those of row 0, [count, V] per chunk.
      chunks: log probabilities of each next token, arrays [B, n] per chunk.
    """

    alternatives: int = 0
    keep_logits: bool = False
    chunks: list[Tokens] = dataclasses.field(default_factory=list)
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)


def prefill_chunks(length: int) -> list[int]:
    """Cuts a prompt into chunks of the bucket lengths; only the last one is padded."""
    chunks = []
    while length > 0:
        fitting = [b for b in PREFILL_BUCKETS if b <= length]
        chunks.append(fitting[-1] if fitting else PREFILL_BUCKETS[0])
        length -= chunks[-1]
    return chunks


def power_of_two(n: int, least: int = 1) -> int:
    """Returns the smallest power of two that is at least n and `least`."""
    return max(least, 1 << (n - 1).bit_length())


def padded_rows(count: int) -> int:
    """Returns how many rows so many prompts are read as: in each part a power of two."""
    return batch_parts() * power_of_two(-(-count // batch_parts()))


def read_prompts(
    params: nnx.State,
    config: Config,
    prompts: Sequence[Prompt],
    capacity: int,
    max_block: int,
    scoring: Scoring | None = None,
    speculator: Speculator | None = None,
    rings: Rings | None = None,
) -> tuple[Float[Array, "B V"], Rings]:
    """Reads whole prompts into a cache of `capacity` tokens a row.

    Args:
      scoring, speculator: one of them at most.
      rings: those of a batch of this shape that has ended, to be used up; None: new ones are made.

    Returns:
      The logits after each prompt and the rings, of B = `padded_rows` rows.
    """
    assert scoring is None or speculator is None
    rows = padded_rows(len(prompts))
    lengths = np.array([len(p.ids) for p in prompts] + [0] * (rows - len(prompts)), np.int32)
    width = int(lengths.max())
    tokens, image_index = np.zeros((rows, width), np.int32), np.full((rows, width), -1, np.int32)
    dtype: DTypeLike = params["embed"]["weight"].dtype  # pyright: ignore[reportAssignmentType]
    features, first_row = _features(params, config, prompts, dtype)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt.ids)] = prompt.ids
        index = np.array(prompt.image_rows, np.int32)
        image_index[i, : len(prompt.ids)] = np.where(index >= 0, index + first_row[i], -1)
    here = jax.tree.leaves(params["embed"])[0].sharding
    if rings is None:
        size = (config.text, rows, capacity, max_block, dtype)
        check_fits(_cache_bytes(*size, here), f"a cache of {rows} x {capacity} tokens")
        cache = _init_cache(*size)
        context = speculator and by_row(_init_context(speculator.config, rows, capacity, dtype))
    else:
        cache, context = rings
    logits = by_row(jnp.zeros((rows, config.text.unpadded_vocab_size), jnp.float32))
    if current_mesh() is None:  # committed, as later chunks find it: they share its program
        logits, cache, context = jax.device_put((logits, cache, context), here)
    at = 0
    for bucket in prefill_chunks(width):
        chunk = _window(tokens, at, bucket)
        index = _window(image_index, at, bucket, fill=-1)
        count = np.clip(lengths - at, 0, bucket)
        if scoring is None:
            logits, context, cache = _prefill(
                params, config, speculator, at == 0, chunk, count, cache, context, logits, features,
                index,
            )  # fmt: skip
        else:
            targets = _window(tokens, at + 1, bucket)
            every, logits, scored, cache = _score(
                params, config, at == 0, chunk, targets, count, cache, logits, features, index,
                scoring.alternatives,
            )  # fmt: skip
            scoring.chunks.append(jax.device_get(scored))
            if scoring.keep_logits:
                scoring.logits.append(np.asarray(every)[0, : count[0]])
        at += bucket
    return logits, Rings(cache, context)


@functools.cache
def _cache_bytes(
    config: TextConfig, rows: int, capacity: int, max_block: int, dtype: DTypeLike, here: Sharding
) -> Mapping[Any, int]:
    """Returns what a cache takes of each device: as it lies on a mesh, or without one `here`."""
    cache = jax.eval_shape(functools.partial(init_cache, config, rows, capacity, max_block, dtype))
    if isinstance(here, NamedSharding):
        specs = cache_specs(cache, here.mesh)
        placed = jax.tree.map(functools.partial(NamedSharding, here.mesh), specs)
    else:
        placed = jax.tree.map(lambda _: here, cache)
    specs = jax.tree.map(lambda a, s: a.update(sharding=s), cache, placed)
    return device_bytes(jax.tree.leaves(specs))


def _features(params: nnx.State, config: Config, prompts: Sequence[Prompt], dtype: DTypeLike):
    """Returns (features of all pictures, the first row of each prompt's).

    Without pictures there are rows of zeros, so that both kinds of prompts share a program.
    """
    pictures = [picture for prompt in prompts for picture in prompt.pictures]
    found = encode_pictures(params, config, pictures)
    counts = [sum(len(tiles) for tiles, _ in prompt.pictures) for prompt in prompts]
    joined = np.concatenate([np.zeros((0, config.text.hidden_size), dtype), *found])
    padding = power_of_two(len(joined), FEWEST_FEATURES) - len(joined)
    return np.pad(joined, ((0, padding), (0, 0))), np.cumsum([0, *counts[:-1]])


def encode_pictures(
    params: nnx.State, config: Config, pictures: Sequence[tuple[np.ndarray, tuple[int, int]]]
) -> list[np.ndarray]:
    """Returns the features [n, D] of each picture's n tiles; like sizes are encoded together.

    Args:
      pictures: tiles and (rows, columns), as in `Prompt`.
    """
    found: dict[int, np.ndarray] = {}
    for size, group in picture_batches([len(tiles) for tiles, _ in pictures]):
        padded = np.zeros((len(group), size, *pictures[0][0].shape[1:]), np.float32)
        for row, i in zip(padded, group, strict=True):
            row[: len(pictures[i][0])] = pictures[i][0]
        grids = np.array([pictures[i][1] for i in group], np.int32)
        features = np.asarray(_encode(params, config, padded, grids))
        found |= {i: row[: len(pictures[i][0])] for i, row in zip(group, features, strict=True)}
    return [found[i] for i in range(len(pictures))]


def padded_tiles(n: int) -> int:
    """Returns to how many tiles a picture of n is filled up: by less than a quarter, beyond 4."""
    step = 1 << max((n - 1).bit_length() - 3, 0)
    return max(-(-n // step) * step, FEWEST_TILES)


def picture_batches(counts: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yields (padded size, which pictures) of calls of a power of two of pictures.

    Args:
      counts: tiles of each picture.
    """
    sizes = [padded_tiles(n) for n in counts]
    for size in sorted(set(sizes)):
        left = [i for i, other in enumerate(sizes) if other == size]
        while left:
            most = min(len(left), max(MOST_TILES // size, 1))
            now = 1 << (most.bit_length() - 1)
            yield size, left[:now]
            left = left[now:]


def _window(array: np.ndarray, at: int, size: int, fill: int = 0) -> np.ndarray:
    """Columns at … at + size, filled up beyond the end."""
    part = array[:, at : at + size]
    return np.pad(part, ((0, 0), (0, size - part.shape[1])), constant_values=fill)
