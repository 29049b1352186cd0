"""Speculative decoding: draft, verify in one pass of the target, accept, commit (spec: dspark.md).

A round has the same shape whatever it accepts: `drafts` proposals a row are drawn, each row lets
the target read its first few (`widths`), and what is not accepted is taken back by lowering the
cache's length. The output follows the target's distribution exactly; it is the target's own text
where the temperature is 0. Arguments that `generation` also has mean what they do there.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from inkling_jax import generation
from inkling_jax.cache import Cache, init_cache, rollback
from inkling_jax.config import Config
from inkling_jax.draft_layers import Context, init_context
from inkling_jax.drafter import extend
from inkling_jax.generation import (
    NO_TOKEN,
    GenerateState,
    Requests,
    Tokens,
    last_token,
    make_requests,
)
from inkling_jax.model import forward, unembed
from inkling_jax.proposing import Speculator, draw_chance, propose
from inkling_jax.sampling import (
    Sampling,
    accept,
    distributions,
    filtered_logits,
    finite,
    logprobs,
)
from inkling_jax.widths import choose_widths, share_widths


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpecState:
    """Where a batch stands between two rounds.

    base: as without speculation.
    context: the drafter's, of all tokens in the cache.
    spent: cost of each row's rounds so far, 0 without a cost table.
    """

    base: GenerateState
    context: Context
    spent: Float[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounds:
    """What became of the drafts of each round, -1 where a row had ended.

    proposed: drafts that the target verified.
    accepted: those of them that are in the output.
    """

    proposed: Int[Array, "B r"]
    accepted: Int[Array, "B r"]


def prefill(
    params: nnx.State,
    config: Config,
    speculator: Speculator,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    cache: Cache,
    context: Context,
    features: Float[Array, "P D"] | None = None,
    image_index: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B V"], Cache, Context]:
    """Reads prompts, or their next chunk, into the target's cache and the drafter's context."""
    drafter = speculator.config
    taps = drafter.target_layer_ids
    out = forward(params, config, tokens, lengths, cache, features, image_index, taps=taps)
    context = extend(speculator.params, drafter, context, out.taps, cache.length, lengths)
    return unembed(params, config, last_token(out.hidden, lengths)), out.cache, context


def begin(
    logits: Float[Array, "B V"],
    cache: Cache,
    context: Context,
    requests: Requests,
    alternatives: int = 0,
) -> tuple[SpecState, Tokens]:
    """Draws each row's first token from the logits after its prompt."""
    base, tokens = generation.begin(logits, cache, requests, alternatives)
    return SpecState(base, context, jnp.zeros(logits.shape[0], jnp.float32)), tokens


def step(
    params: nnx.State,
    config: Config,
    speculator: Speculator,
    state: SpecState,
    alternatives: int = 0,
) -> tuple[SpecState, Tokens, Rounds]:
    """Takes one round: every running row gets one to `drafts` + 1 tokens."""
    base, drafter = state.base, speculator.config
    running, start = ~base.done, base.cache.length
    sampling, vocab = base.requests.sampling, config.text.unpadded_vocab_size
    chance = draw_chance(base.requests.keys, base.count, speculator.drafts, vocab)
    proposal = propose(params, config, speculator, base, state.context, chance.noise)
    width, spent = _widths(speculator, state, proposal.confidence)

    block = jnp.concatenate((base.token[:, None], proposal.tokens), axis=1)  # [B, n + 1]
    read = jnp.where(running, width + 1, 0)
    taps = drafter.target_layer_ids
    out = forward(params, config, block, read, base.cache, taps=taps)
    logits = unembed(params, config, out.hidden)
    with jax.named_scope("accept"):
        probs = distributions(filtered_logits(logits, sampling), sampling)
        accepted, following = accept(
            proposal.tokens, proposal.probs, probs, width, chance.uniform, chance.noise[:, -1]
        )
    with jax.named_scope("commit"):
        base, ids = _commit(base, proposal.tokens, accepted, following, logits)
        committed = base.count - state.base.count
        base = dataclasses.replace(base, cache=rollback(out.cache, start + committed))
        context = extend(speculator.params, drafter, state.context, out.taps, start, committed)
        tokens = Tokens(ids, *logprobs(logits, jnp.maximum(ids, 0), alternatives))
    rounds = Rounds(
        jnp.where(running, width, -1)[:, None],
        jnp.where(running, jnp.minimum(accepted, committed), -1)[:, None],
    )
    return SpecState(base, context, spent), tokens, rounds


def decode_block(
    params: nnx.State,
    config: Config,
    speculator: Speculator,
    state: SpecState,
    rounds: int,
    columns: int | None = None,
    alternatives: int = 0,
) -> tuple[SpecState, Tokens, Rounds]:
    """Takes up to `rounds` rounds in one `while_loop`, fewer once every row has ended.

    Args:
      columns: static; the width of the result, where the rows' budgets allow less than every
        round's `drafts` + 1 tokens.

    Returns:
      The state; each row's tokens side by side, with -1 after the last; what each round did.
    """
    rows = state.spent.shape[0]
    columns = columns or rounds * (speculator.drafts + 1)
    tokens = Tokens.none(rows, columns, alternatives)
    nothing = jnp.full((rows, rounds), -1, jnp.int32)
    first = state.base.count

    def running(carry):
        i, state, *_ = carry
        return (i < rounds) & ~jnp.all(state.base.done)

    def body(carry):
        i, state, tokens, done = carry
        filled = state.base.count - first
        state, new, this_round = step(params, config, speculator, state, alternatives)
        tokens = jax.tree.map(lambda a, b: _append(a, b, new.ids, filled), tokens, new)
        done = jax.tree.map(
            lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, i, axis=1), done, this_round
        )
        return i + 1, state, tokens, done

    carry = (jnp.int32(0), state, tokens, Rounds(nothing, nothing))
    return jax.lax.while_loop(running, body, carry)[1:]


def generate(
    params: nnx.State,
    config: Config,
    speculator: Speculator,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    sampling: Sampling,
    keys: Key[Array, " B"],
    max_new: int,
    *,
    stop_ids: Int[Array, "B m"] | None = None,
    budget: Int[Array, " B"] | None = None,
    pooled: Bool[Array, " B"] | None = None,
    features: Float[Array, "P D"] | None = None,
    image_index: Int[Array, "B T"] | None = None,
    alternatives: int = 0,
) -> tuple[Tokens, SpecState, Rounds]:
    """Continues prompts as `generation.generate` does, and tells what each round did.

    `pooled` rows, see `Requests`, share what `speculator.cost` lets them verify.
    """
    rows, width = tokens.shape
    requests = make_requests(config, sampling, keys, max_new, stop_ids, budget)
    requests = dataclasses.replace(requests, pooled=pooled)
    dtype: DTypeLike = params["embed"]["weight"].dtype  # pyright: ignore[reportAssignmentType]
    capacity = width + max_new + speculator.drafts
    cache = init_cache(config.text, rows, capacity, speculator.drafts + 1, dtype)
    context = init_context(speculator.config, rows, capacity, dtype)
    logits, cache, context = prefill(
        params, config, speculator, tokens, lengths, cache, context, features, image_index
    )
    state, first = begin(logits, cache, context, requests, alternatives)
    state, rest, rounds = decode_block(
        params, config, speculator, state, max_new - 1, max_new - 1, alternatives
    )
    joined = jax.tree.map(lambda a, b: jnp.concatenate((a, b), axis=1), first, rest)
    return joined, state, rounds


def _widths(speculator: Speculator, state: SpecState, confidence):
    """Returns (how many drafts each row verifies, what its rounds have cost with this one)."""
    if speculator.cost is None:
        return jnp.full(state.spent.shape, speculator.drafts, jnp.int32), state.spent
    base, cost, pooled = state.base, speculator.cost, state.base.requests.pooled
    # The first token came without a round; it counts as a plain step.
    rate = base.count.astype(jnp.float32) / (cost[0] + state.spent)
    width = choose_widths(confidence, cost, rate)
    if pooled is not None:
        read = jnp.where(base.done, 0, jnp.where(pooled, 0, width) + 1)
        width = jnp.where(pooled, share_widths(confidence, pooled & ~base.done, read, cost), width)
    return width, jnp.where(base.done, state.spent, state.spent + cost[width])


def _commit(base: GenerateState, drafts, accepted, following, logits):
    """Adds accepted drafts and the token after them, up to a stop id or the budget.

    Returns the state, its cache still with every token that was read, and the ids [B, n + 1].
    """
    requests, place = base.requests, jnp.arange(drafts.shape[1] + 1)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    ids = jnp.where(place == accepted[:, None], following[:, None], padded)
    stops = jnp.any(ids[..., None] == requests.stop_ids[:, None], axis=-1)
    after_stop = jnp.pad(jnp.cumsum(stops, axis=1)[:, :-1], ((0, 0), (1, 0))) > 0
    left = (requests.budget - base.count)[:, None]
    reached = (place <= accepted[:, None]) & ~after_stop & (place < left) & ~base.done[:, None]
    sound = jax.vmap(finite)(logits)
    kept = reached & (jnp.cumsum(~sound, axis=1) == 0)
    count = base.count + kept.sum(axis=1, dtype=jnp.int32)
    finite_so_far = base.finite & jnp.all(sound | ~reached, axis=1)
    last = jnp.maximum(count - base.count - 1, 0)[:, None]
    token = jnp.take_along_axis(ids, last, axis=1)[:, 0]
    ended = jnp.any(stops & kept, axis=1) | (count >= requests.budget) | ~finite_so_far
    new = dataclasses.replace(
        base,
        token=jnp.where(count > base.count, token, base.token),
        count=count,
        done=base.done | ended,
        finite=finite_so_far,
    )
    return new, jnp.where(kept, ids, NO_TOKEN)


def _append(buffer, new, ids, filled):
    """Writes each row's tokens behind the `filled[b]` that it has, dropping those not emitted."""
    at = jnp.where(ids != NO_TOKEN, filled[:, None] + jnp.arange(ids.shape[1]), buffer.shape[1])
    return buffer.at[jnp.arange(buffer.shape[0])[:, None], at].set(new, mode="drop")
