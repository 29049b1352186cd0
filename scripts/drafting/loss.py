"""The drafter's loss over blocks at random anchors (spec: dspark.md, "Training a drafter")."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from inkling_jax.config import Config
from inkling_jax.draft_layers import init_context
from inkling_jax.drafter import confidences, draft, extend, markov_start, propose_next
from inkling_jax.drafter_config import DrafterConfig
from inkling_jax.model import Forward, unembed

CE, L1, CONFIDENCE = 0.1, 0.9, 1.0  # weights of the three parts
GAMMA = 4.0  # later drafts count less: exp(-j / γ)


class Blocks(NamedTuple):
    """What a drafter did at anchors: A of them in each of B rows, n drafts each.

    counts: the draft's label exists, and so do those before it.
    accept: probability that the target accepts a draft, 1 - ½‖p - q‖₁.
    """

    counts: Bool[Array, "BA n"]
    accept: Float[Array, "BA n"]
    confidence: Float[Array, "BA n"]
    ce: Float[Array, "BA n"]


def choose_anchors(
    mask: Bool[Array, "B T"], key: Key[Array, ""], anchors: int
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Draws anchors among the tokens whose successor is to be learnt; tells which are real."""
    wanted = jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
    noise = jax.random.uniform(key, mask.shape)
    score, position = jax.lax.top_k(jnp.where(wanted, noise, -1.0), anchors)
    return position, score >= 0


def blocks(
    params: nnx.State,
    config: DrafterConfig,
    target: nnx.State,
    target_config: Config,
    out: Forward,
    tokens: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    lengths: Int[Array, " B"],
    anchors: Int[Array, "B A"],
    real: Bool[Array, "B A"],
) -> Blocks:
    """Drafts a block at each anchor, the token before each draft being the text's own.

    Args:
      out: the target's pass over the tokens, with the drafter's taps.
      mask: tokens to learn.
    """
    rows, count, n = *anchors.shape, config.block_size
    vocab = target_config.text.unpadded_vocab_size
    context = init_context(config, rows, tokens.shape[1], out.hidden.dtype)
    context = extend(params, config, context, out.taps, jnp.zeros_like(lengths), lengths)

    row = jnp.arange(rows)[:, None]
    at = jnp.minimum(anchors[..., None] + jnp.arange(n + 1), tokens.shape[1] - 1)  # [B, A, n + 1]
    text = tokens[row[..., None], at].reshape(-1, n + 1)
    exists = anchors[..., None] + jnp.arange(1, n + 1) < lengths[:, None, None]
    learnt = exists & mask[row[..., None], at[..., 1:]] & real[..., None]
    counts = jnp.cumprod(learnt.astype(jnp.int32), axis=-1).astype(bool).reshape(-1, n)
    hidden = out.hidden[row[..., None], at[..., :-1]]  # of anchor + j, which predicts draft j
    p = jax.nn.softmax(unembed(target, target_config, hidden), axis=-1).reshape(-1, n, vocab)

    def of_anchor(anchor, start):
        return draft(params, config, target, context, anchor, start, differentiable=True)

    first = tokens[row, anchors]
    h, base = jax.vmap(of_anchor, in_axes=1, out_axes=1)(first, anchors)
    h, base = (x.reshape(rows * count, n, -1) for x in (h, base))
    memory = markov_start(config, rows * count, h.dtype)
    accept, ce = [], []
    for j in range(n):
        logits, memory = propose_next(
            params, config, h[:, j], base[:, j], text[:, j], memory, vocab
        )
        q = jax.nn.softmax(logits, axis=-1)
        accept.append(1 - 0.5 * jnp.abs(p[:, j] - q).sum(axis=-1))
        label = text[:, j + 1, None]
        ce.append(-jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), label, axis=-1)[:, 0])
    sure = confidences(params, config, h, text[:, :-1])
    return Blocks(counts, jnp.stack(accept, axis=1), sure, jnp.stack(ce, axis=1))


def loss(found: Blocks) -> Float[Array, ""]:
    """0.1 · cross entropy + 0.9 · L1 distance + the confidences' binary cross entropy."""
    place = jnp.arange(found.counts.shape[1], dtype=jnp.float32)
    weight = found.counts.astype(jnp.float32) * jnp.exp(-place / GAMMA)
    accept = jax.lax.stop_gradient(found.accept)
    sure = jnp.clip(found.confidence, 1e-6, 1 - 1e-6)
    bce = -(accept * jnp.log(sure) + (1 - accept) * jnp.log(1 - sure))
    each = CE * found.ce + L1 * 2 * (1 - found.accept) + CONFIDENCE * bce
    return jnp.sum(weight * each) / jnp.maximum(jnp.sum(weight), 1.0)


def summary(found: Blocks) -> dict[str, Float[Array, "..."]]:
    """Returns what is worth a look: acceptance by position and the tokens per round it implies."""
    counts = found.counts.astype(jnp.float32)
    whole = found.counts[:, -1:].astype(jnp.float32)
    survival = jnp.cumprod(found.accept, axis=1)
    blocks = jnp.maximum(whole.sum(), 1.0)
    return {
        "accept": (counts * found.accept).sum(axis=0) / jnp.maximum(counts.sum(axis=0), 1.0),
        "length": 1 + (whole * survival).sum() / blocks,
        "confidence_error": (counts * jnp.abs(found.confidence - found.accept)).sum()
        / jnp.maximum(counts.sum(), 1.0),
    }
