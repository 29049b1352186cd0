"""What a drafter is used with, and the drafts of one round (spec: dspark.md, "One draft")."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from inkling_jax.config import Config
from inkling_jax.config_fields import is_whole
from inkling_jax.draft_layers import Context
from inkling_jax.drafter import confidences, draft, markov_start, propose_next
from inkling_jax.drafter_config import DrafterConfig
from inkling_jax.errors import InputError
from inkling_jax.generation import GenerateState
from inkling_jax.sampling import distributions, draw, filtered_logits, gumbel

ROUNDS = 2**31  # a request's key is folded with token positions; this lies beyond any of them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Speculator:
    """A drafter and how it is used.

    params, config: of the drafter.
    drafts: proposals per round, at most the drafter's block size.
    cost: time of a round that verifies 0…drafts proposals, in any unit: rows then verify as many
      as pay. None: all of them.
    """

    params: nnx.State
    config: DrafterConfig = dataclasses.field(metadata={"static": True})
    drafts: int = dataclasses.field(metadata={"static": True})
    cost: Float[Array, " m"] | None = None

    def __post_init__(self):
        if not is_whole(self.drafts) or not 1 <= self.drafts <= self.config.block_size:
            raise InputError(
                f"draft-tokens is {self.drafts!r}, it must be a whole number in "
                f"1…{self.config.block_size}, the drafter's block_size"
            )
        if self.cost is not None and not self.config.enable_confidence_head:
            raise InputError(
                "draft-tokens is auto, which needs a drafter with a confidence head; give a number"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """A row's drafts, the distributions that they were drawn from, and how sure the drafter is."""

    tokens: Int[Array, "B n"]
    probs: Float[Array, "B n V"]
    confidence: Float[Array, "B n"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chance:
    """All that is random about a round of n drafts, drawn at once.

    noise: Gumbel noise for each draft and for the token that follows the accepted ones.
    uniform: decides which are accepted.
    """

    noise: Float[Array, "B m V"]
    uniform: Float[Array, "B n"]


def draw_chance(keys: Key[Array, " B"], count: Int[Array, " B"], n: int, vocab: int) -> Chance:
    """Draws for this round alone: no later round has the same number of tokens before it."""

    def of_row(key, count):
        key = jax.random.fold_in(jax.random.fold_in(key, jnp.uint32(ROUNDS)), count)
        first, second = jax.random.split(key)
        return Chance(gumbel(first, (n + 1, vocab)), jax.random.uniform(second, (n,)))

    return jax.vmap(of_row)(keys, count)


def propose(
    params: nnx.State,
    config: Config,
    speculator: Speculator,
    base: GenerateState,
    context: Context,
    noise: Float[Array, "B m V"],
) -> Proposal:
    """Drafts a block for each row: the body at once, then token by token (the Markov head).

    Only what a draft's successor needs is done token by token.
    """
    drafter = speculator.config
    sampling, vocab = base.requests.sampling, config.text.unpadded_vocab_size
    start = base.cache.length
    h, logits = draft(speculator.params, drafter, params, context, base.token, start)
    memory = markov_start(drafter, start.shape[0], h.dtype)
    tokens, rows = [base.token], []
    with jax.named_scope("markov"):
        for j in range(speculator.drafts):
            row, memory = propose_next(
                speculator.params, drafter, h[:, j], logits[:, j], tokens[-1], memory, vocab
            )
            rows.append(filtered_logits(row, sampling))
            tokens.append(draw(rows[-1], sampling, noise[:, j]))
        probs = distributions(jnp.stack(rows, axis=1), sampling)
        before, drafted = jnp.stack(tokens[:-1], axis=1), jnp.stack(tokens[1:], axis=1)
        sure = confidences(speculator.params, drafter, h[:, : speculator.drafts], before)
    return Proposal(drafted, probs, sure)
