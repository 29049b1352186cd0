"""Whether greedy generation would give an answer, found in one pass over prompt and answer.

Greedy generation gives exactly the right answer if each of its tokens, the end included, is the
most probable one behind the tokens before it.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import inkling_jax as ij
from nano import pictures, questions, step
from nano.questions import Item, Source


@functools.partial(jax.jit, static_argnames="config")
def predict(
    params: nnx.State,
    config: ij.Config,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    tiles: Float[Array, "B P t t 3"] | None = None,
    grid: Int[Array, "B 2"] | None = None,
    image_index: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B n"], Int[Array, "B n"]]:
    """Returns minus the log probability of each next token, and the most probable one, n = T - 1.

    Experts are computed for every token, which is faster for whole batches than the product's way.
    """
    features = None
    if tiles is not None:
        encode = jax.vmap(lambda t, g: ij.encode_image(params, config, t, g))
        features = encode(tiles, grid).reshape(-1, config.text.hidden_size)
    dtype = params["embed"]["weight"].dtype
    cache = ij.init_cache(config.text, *tokens.shape, 1, dtype)
    out = ij.forward(
        params, config, tokens, lengths, cache, features, image_index, experts=step.dense_experts
    )
    logits = ij.unembed(params, config, out.hidden[:, :-1])
    target = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - target, jnp.argmax(logits, axis=-1)


def exact(model: ij.Engine, items: Sequence[Item], batch_tokens: int) -> list[bool]:
    """Tells for each item whether greedy generation gives exactly its answer."""
    prompts = [questions.prompt_of(model, item) for item in items]
    replies = [questions.reply_of(model, item) for item in items]
    longest = max(len(p.ids) + len(r) for p, r in zip(prompts, replies, strict=True))
    width = math.ceil(longest / 64) * 64
    rows = max(batch_tokens // width, 1)
    found = []
    for at in range(0, len(items), rows):
        batch = slice(at, at + rows)
        tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
        said = np.zeros((rows, width), bool)
        for i, (prompt, reply) in enumerate(zip(prompts[batch], replies[batch], strict=True)):
            lengths[i] = len(prompt.ids) + len(reply)
            tokens[i, : lengths[i]] = prompt.ids + reply
            said[i, len(prompt.ids) : lengths[i]] = True
        images = _images(model.config, prompts[batch], rows, width)
        _, best = predict(model.params, model.config, tokens, lengths, *images)
        wrong = said[:, 1:] & (np.asarray(best) != tokens[:, 1:])
        found += (~wrong.any(axis=1))[: len(prompts[batch])].tolist()
    return found


def _images(config, prompts, rows: int, width: int):
    """Returns (tiles, grid, image index) of a batch, six tiles a row; nothing without pictures."""
    if not any(prompt.pictures for prompt in prompts):
        return ()
    side, most = config.vision.tile_size, pictures.MAX_CELLS
    tiles = np.zeros((rows, most, side, side, 3), np.float32)
    grid = np.ones((rows, 2), np.int32)
    index = np.full((rows, width), -1, np.int32)
    for i, prompt in enumerate(prompts):
        [(shown, grid[i])] = prompt.pictures
        tiles[i, : len(shown)] = shown
        own = np.array(prompt.image_rows)
        index[i, : len(own)] = np.where(own >= 0, own + i * most, -1)
    return tiles, grid, index


def bits_per_byte(
    model: ij.Engine, source: Source, windows: int, batch_tokens: int
) -> dict[str, float]:
    """Measures the held-out text in its first `windows` windows of the trained length."""
    length = questions.TRAINED_LENGTH
    whole = len(source.tokens) // length
    cut = source.tokens[: whole * length].reshape(whole, length)[:windows]
    rows = max(batch_tokens // length, 1)
    nats, size = 0.0, 0
    for at in range(0, len(cut), rows):
        part = cut[at : at + rows]
        padded = np.pad(part, ((0, rows - len(part)), (0, 0)))
        nll, _ = predict(model.params, model.config, padded, np.full(rows, length, np.int32))
        nats += float(np.asarray(nll)[: len(part)].sum(dtype=np.float64))
        size += int(source.token_bytes[part[:, 1:]].sum())
    return {
        "bits_per_byte": round(nats / size / math.log(2), 4),
        "tokens": len(cut) * (length - 1),
        "bytes": size,
    }
