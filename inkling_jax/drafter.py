"""The DSpark drafter: a small transformer that proposes a block of tokens (spec: dspark.md).

It reads what the target has read (its `taps`) as a context of keys and values and sees its block of
one anchor and masks at once; `Markov` then makes each proposal depend on the one before it. Like
`Model`, `Drafter` holds parameters only.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from inkling_jax.cache import write
from inkling_jax.draft_layers import Context, DraftLayer, keys_values
from inkling_jax.drafter_config import DrafterConfig
from inkling_jax.layers import Linear, RMSNorm, einsum, fill_params, param, softcap


class Markov(nnx.Module):
    """Adds to each proposal's logits what the token before it says: vanilla, gated or rnn."""

    def __init__(self, config: DrafterConfig, dtype: DTypeLike):
        self.kind, rank, hidden = config.markov_head_type, config.markov_rank, config.hidden_size
        self.w1 = param((config.vocab_size, rank), ("vocab", None), dtype)
        self.w2 = param((config.draft_vocab, rank), ("vocab", None), dtype)
        if self.kind == "gated":
            self.gate = Linear((rank, hidden + rank), (None, None), dtype, bias=True)
        elif self.kind == "rnn":
            self.joint = Linear((3 * rank, 2 * rank + hidden), (None, None), dtype, bias=True)

    def __call__(
        self, prev: Int[Array, " B"], h: Float[Array, "B D"], state: Float[Array, "B r"]
    ) -> tuple[Float[Array, "B Vd"], Float[Array, "B r"]]:
        """Returns (what to add to the logits, the rnn's state); the state starts as zeros."""
        embedded = self.w1[...][prev]
        if self.kind == "gated":
            gate = jax.nn.sigmoid(self.gate(jnp.concatenate((h, embedded), axis=-1)))
            embedded = gate * embedded
        elif self.kind == "rnn":
            joined = self.joint(jnp.concatenate((state, embedded, h), axis=-1))
            gate, new, out = jnp.split(joined, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            state = gate * state + (1 - gate) * jnp.tanh(new)
            embedded = jnp.tanh(out)
        return einsum("br,vr->bv", embedded, self.w2[...]), state


class Drafter(nnx.Module):
    """A DSpark drafter: parameters only; see `extend`, `draft` and `propose_next`."""

    def __init__(self, config: DrafterConfig, dtype: DTypeLike = jnp.float32):
        hidden, taps = config.hidden_size, len(config.target_layer_ids)
        norm = functools.partial(RMSNorm, hidden, config.rms_norm_eps, dtype)
        table = functools.partial(param, axes=("vocab", "embed"), dtype=dtype)
        self.embed = table((config.vocab_size, hidden)) if config.own_embedding else None
        self.head = table((config.draft_vocab, hidden)) if config.own_head else None
        self.fc = param((hidden, taps * hidden), ("embed", None), dtype)
        self.hidden_norm, self.norm = norm(), norm()
        self.layers = nnx.List([DraftLayer(config, dtype) for _ in range(config.num_hidden_layers)])
        self.markov = Markov(config, dtype) if config.markov_rank else None
        inputs = hidden + (config.markov_rank if config.confidence_head_with_markov else 0)
        self.confidence = (
            Linear((1, inputs), (None, None), dtype, bias=True)
            if config.enable_confidence_head
            else None
        )
        # Token of the target that each row of the head stands for.
        self.tokens = (
            param((config.draft_vocab,), (None,), jnp.int32, "zeros")
            if config.draft_vocab_size
            else None
        )


@functools.cache
def graphdef(config: DrafterConfig) -> nnx.GraphDef:
    """Returns the structure that `nnx.merge` joins with parameters to a `Drafter`."""
    return nnx.split(Drafter(config))[0]


def abstract_drafter(config: DrafterConfig, dtype: DTypeLike = jnp.float32) -> nnx.State:
    """Returns the parameters' shapes, dtypes and logical axes, without values."""
    return nnx.split(Drafter(config, dtype))[1]


def init_drafter(
    config: DrafterConfig, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32
) -> nnx.State:
    """Draws parameters at random: normal with variance 1 / fan-in, norms one, biases zero."""
    return fill_params(abstract_drafter(config, dtype), key)


def extend(
    params: nnx.State,
    config: DrafterConfig,
    context: Context,
    taps: tuple[Float[Array, "B T D"], ...],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Context:
    """Adds `count[b]` of T tokens from position `start[b]` on to the context.

    Args:
      taps: the target's float32 outputs for these tokens, at `config.target_layer_ids`.
    """
    drafter = nnx.merge(graphdef(config), params)
    with jax.named_scope("draft_context"):
        joined = jnp.concatenate(taps, axis=-1).astype(drafter.fc[...].dtype)
        c = einsum("btd,ed->bte", joined, drafter.fc[...])
        c = drafter.hidden_norm(c, joined.dtype)
        position = start[:, None] + jnp.arange(c.shape[1])
        new = keys_values([layer.attn for layer in drafter.layers], c, position)
        return Context(write(context.kv, new, start, count))


def draft(
    params: nnx.State,
    config: DrafterConfig,
    target: nnx.State,
    context: Context,
    anchor: Int[Array, " B"],
    start: Int[Array, " B"],
    differentiable: bool = False,
) -> tuple[Float[Array, "B n D"], Float[Array, "B n Vd"]]:
    """Reads the block of an anchor and `block_size` - 1 masks.

    Args:
      target: the target's parameters, for what the drafter shares with it.
      anchor: the last token of each row, at position `start[b]`.
      differentiable: for training; kernels have no gradient.

    Returns:
      For each proposal (the token after anchor + j): hidden states, and logits as they are before
      the Markov head.
    """
    drafter = nnx.merge(graphdef(config), params)
    with jax.named_scope("draft"):
        block = jnp.full((anchor.shape[0], config.block_size), config.mask_token_id, jnp.int32)
        embed = drafter.embed[...] if config.own_embedding else target["embed"]["weight"][...]
        x = embed[block.at[:, 0].set(anchor)]
        for i, layer in enumerate(drafter.layers):
            x = layer(x, context, i, start, differentiable)
        h = drafter.norm(x, x.dtype)
        head: Any = drafter.head[...] if config.own_head else target["unembed"]["weight"][...]
        base = einsum("btd,vd->btv", h, head)
        return h, base[..., : config.draft_vocab]  # a shared head may have padding rows


def propose_next(
    params: nnx.State,
    config: DrafterConfig,
    h: Float[Array, "B D"],
    base: Float[Array, "B Vd"],
    prev: Int[Array, " B"],
    state: Float[Array, "B r"],
    vocab: int,
) -> tuple[Float[Array, "B V"], Float[Array, "B r"]]:
    """Lets the token before a proposal have its say.

    Args:
      h, base: hidden states and logits of one proposal, from `draft`.
      prev: the token before it: the anchor, then each token as it was drawn.
      state: of the rnn head, from `markov_start`.
      vocab: V, tokens of the target; those that the drafter cannot propose get -inf.

    Returns:
      Logits in the target's vocabulary, the new state.
    """
    drafter, logits = nnx.merge(graphdef(config), params), base
    if config.markov_rank:
        bias, state = drafter.markov(prev, h, state)
        logits = logits + bias
    if config.final_logit_softcapping:
        logits = softcap(logits, config.final_logit_softcapping)
    if config.draft_vocab_size:
        everywhere = jnp.full((base.shape[0], vocab), -jnp.inf)
        logits = everywhere.at[:, drafter.tokens[...]].set(logits, mode="drop")
    return logits[:, :vocab], state


def markov_start(config: DrafterConfig, batch: int, dtype: DTypeLike) -> Float[Array, "B r"]:
    """Returns the rnn head's state at the start of a block."""
    return jnp.zeros((batch, config.markov_rank), dtype)


def confidences(
    params: nnx.State,
    config: DrafterConfig,
    h: Float[Array, "B n D"],
    prev: Int[Array, "B n"],
) -> Float[Array, "B n"]:
    """Returns how likely each proposal is to be accepted, 1 without a confidence head.

    Args:
      h: hidden states of the first n proposals of a block, from `draft`.
      prev: the token before each.
    """
    if not config.enable_confidence_head:
        return jnp.ones(prev.shape, jnp.float32)
    drafter = nnx.merge(graphdef(config), params)
    features = h
    if config.confidence_head_with_markov:
        features = jnp.concatenate((h, drafter.markov.w1[...][prev]), axis=-1)
    score = drafter.confidence(features).astype(jnp.float32)[..., 0]
    if config.confidence_temperatures:
        score = score / jnp.array(config.confidence_temperatures[: prev.shape[1]], jnp.float32)
    return jax.nn.sigmoid(score)
