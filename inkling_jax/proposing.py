"""What a drafter is used with, and the drafts of one round (spec: dspark.md, "One draft")."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from inkling_jax.config import Config
from inkling_jax.drafter import Context, draft, markov_start, propose_next
from inkling_jax.drafter_config import DrafterConfig
from inkling_jax.errors import InputError
from inkling_jax.generation import GenerateState
from inkling_jax.sampling import draw, filtered_logits

# A request's key is folded with token positions; these lie beyond any of them.
DRAFT, VERIFY = 2**31, 2**31 + 1


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
        if type(self.drafts) is not int or not 1 <= self.drafts <= self.config.block_size:
            raise InputError(
                f"draft-tokens is {self.drafts!r}, it must lie in 1…{self.config.block_size}, the "
                "drafter's block_size"
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


def propose(
    params: nnx.State,
    config: Config,
    speculator: Speculator,
    base: GenerateState,
    context: Context,
) -> Proposal:
    """Drafts a block for each row: the body at once, then token by token (the Markov head)."""
    drafter = speculator.config
    sampling, vocab = base.requests.sampling, config.text.unpadded_vocab_size
    keys = round_keys(base.requests.keys, base.count, DRAFT)
    start = base.cache.length
    h, logits = draft(speculator.params, drafter, params, context, base.token, start)
    prev, memory = base.token, markov_start(drafter, start.shape[0], h.dtype)
    tokens, probs, confidence = [], [], []
    with jax.named_scope("markov"):
        for j in range(speculator.drafts):
            row, sure, memory = propose_next(
                speculator.params, drafter, h[:, j], logits[:, j], prev, memory, vocab, j
            )
            filtered = filtered_logits(row, sampling)
            prev = draw(filtered, keys, jnp.full_like(start, j))
            tokens.append(prev)
            probs.append(jax.nn.softmax(filtered, axis=-1))
            confidence.append(sure)
    return Proposal(*(jnp.stack(x, axis=1) for x in (tokens, probs, confidence)))


def round_keys(keys: Key[Array, " B"], count: Int[Array, " B"], purpose: int) -> Key[Array, " B"]:
    """Returns keys of this round alone: no later round has the same number of tokens before it."""
    return jax.vmap(
        lambda key, n: jax.random.fold_in(jax.random.fold_in(key, jnp.uint32(purpose)), n)
    )(keys, count)
