"""Generation on the device: prefill, one decoding step, and the loop that repeats it.

Everything here is pure and can be jitted by the caller; `config` and the counts are static. A
request's first token comes from the prefill's logits (`begin`); each `step` then reads the last
token and draws the next one. Rows that have ended stay in the batch and read nothing.
"""

import dataclasses
import functools
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from inkling_jax.cache import Cache, init_cache
from inkling_jax.config import Config
from inkling_jax.model import forward, unembed
from inkling_jax.sampling import Sampling, finite, logprobs, sample

NO_TOKEN = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Requests:
    """What each row of a batch asks for.

    keys: one random key per request, the same for all its tokens.
    stop_ids: ids that end a row, filled up with -1.
    budget: the most tokens a row may generate.
    pooled: rows without a seed of their own: of them speculation chooses together how many drafts
      to verify. None where no row is; such a loop is compiled without that choice.
    """

    sampling: Sampling
    keys: Key[Array, " B"]
    stop_ids: Int[Array, "B m"]
    budget: Int[Array, " B"]
    pooled: Bool[Array, " B"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GenerateState:
    """Where a batch stands between two steps.

    cache: holds every token but the last one of each row.
    token: the last token, drawn and not yet read.
    count: tokens generated so far.
    done: the row has met a stop id, its budget or logits that are not finite.
    finite: all logits of the row were finite so far.
    """

    requests: Requests
    cache: Cache
    token: Int[Array, " B"]
    count: Int[Array, " B"]
    done: Bool[Array, " B"]
    finite: Bool[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens with their log probabilities under the model (temperature 1, nothing filtered).

    ids: -1 where a row had ended.
    top_ids, top_logprobs: the k most probable alternatives, falling.
    """

    ids: Int[Array, "B n"]
    logprobs: Float[Array, "B n"]
    top_ids: Int[Array, "B n k"]
    top_logprobs: Float[Array, "B n k"]

    @classmethod
    def none(cls, rows: int, n: int, k: int) -> Self:
        """Returns room for n tokens a row with k alternatives each, none of them there yet."""
        return cls(
            jnp.full((rows, n), NO_TOKEN, jnp.int32),
            jnp.zeros((rows, n), jnp.float32),
            jnp.zeros((rows, n, k), jnp.int32),
            jnp.zeros((rows, n, k), jnp.float32),
        )


def prefill(
    params: nnx.State,
    config: Config,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    cache: Cache,
    features: Float[Array, "P D"] | None = None,
    image_index: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Reads prompts, or the next chunk of them, and returns the logits after each row's last token.

    Arguments are those of `forward`; the logits of a row of length 0 mean nothing.
    """
    out = forward(params, config, tokens, lengths, cache, features, image_index)
    return unembed(params, config, last_token(out.hidden, lengths)), out.cache


def last_token(x: Float[Array, "B T D"], lengths: Int[Array, " B"]) -> Float[Array, "B D"]:
    """Returns what each row has at its last real token, at its first where there is none."""
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    return jnp.take_along_axis(x, last, axis=1)[:, 0]


def decode(
    params: nnx.State,
    config: Config,
    tokens: Int[Array, "B T"],
    cache: Cache,
    lengths: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T V"], Cache]:
    """Reads T tokens a row (`lengths[b]` of them where given), returns the logits after each.

    Those of a row that cannot be read are NaN, see `forward`; `generate` ends such a row.
    """
    if lengths is None:
        lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    out = forward(params, config, tokens, lengths, cache)
    return unembed(params, config, out.hidden), out.cache


def score(
    params: nnx.State,
    config: Config,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    cache: Cache,
    features: Float[Array, "P D"] | None = None,
    image_index: Int[Array, "B T"] | None = None,
    *,
    alternatives: int = 0,
) -> tuple[Float[Array, "B T V"], Tokens, Cache]:
    """Reads tokens like `prefill` and returns all logits and how probable each target was."""
    out = forward(params, config, tokens, lengths, cache, features, image_index)
    logits = unembed(params, config, out.hidden)
    scored = Tokens(targets, *logprobs(logits, targets, alternatives))
    return logits, scored, out.cache


def begin(
    logits: Float[Array, "B V"], cache: Cache, requests: Requests, alternatives: int = 0
) -> tuple[GenerateState, Tokens]:
    """Draws each row's first token from the logits after its prompt; a budget of 0 draws none."""
    rows = logits.shape[0]
    state = GenerateState(
        requests=requests,
        cache=cache,
        token=jnp.zeros(rows, jnp.int32),
        count=jnp.zeros(rows, jnp.int32),
        done=requests.budget <= 0,
        finite=jnp.ones(rows, bool),
    )
    return _draw(state, logits, alternatives)


def step(
    params: nnx.State, config: Config, state: GenerateState, alternatives: int = 0
) -> tuple[GenerateState, Tokens]:
    """Reads every running row's last token and draws the next one."""
    running = (~state.done).astype(jnp.int32)
    logits, cache = decode(params, config, state.token[:, None], state.cache, running)
    return _draw(dataclasses.replace(state, cache=cache), logits[:, 0], alternatives)


def decode_block(
    params: nnx.State, config: Config, state: GenerateState, steps: int, alternatives: int = 0
) -> tuple[GenerateState, Tokens]:
    """Takes up to `steps` steps in one `while_loop`, fewer once every row has ended.

    The body has a fixed shape and no branches, so that a GPU replays it as one graph.
    """
    empty = Tokens.none(state.token.shape[0], steps, alternatives)

    def running(carry):
        i, state, _ = carry
        return (i < steps) & ~jnp.all(state.done)

    def body(carry):
        i, state, tokens = carry
        state, new = step(params, config, state, alternatives)
        place = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=i, axis=1)
        return i + 1, state, jax.tree.map(place, tokens, new)

    return jax.lax.while_loop(running, body, (jnp.int32(0), state, empty))[1:]


def generate(
    params: nnx.State,
    config: Config,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    sampling: Sampling,
    keys: Key[Array, " B"],
    max_new: int,
    *,
    stop_ids: Int[Array, "B m"] | None = None,
    budget: Int[Array, " B"] | None = None,
    features: Float[Array, "P D"] | None = None,
    image_index: Int[Array, "B T"] | None = None,
    alternatives: int = 0,
) -> tuple[Tokens, GenerateState]:
    """Continues prompts by up to `max_new` tokens: one prefill and one `while_loop`.

    Args:
      tokens: prompts, padded on the right; row b has `lengths[b]` of them, at least one.
      sampling, keys: how and with which randomness each row draws.
      max_new: static; the width of the result.
      stop_ids: ids that end a row, -1 for none; by default those of the config.
      budget: the most tokens of each row, at most `max_new`, which is the default.
      features, image_index: images, see `forward`.
      alternatives: how many alternatives to report per token.

    Returns:
      The tokens, with -1 after a row's end, and the final state, whose `count` says how many there
      are, `finite` whether all logits were finite.
    """
    rows, width = tokens.shape
    requests = make_requests(config, sampling, keys, max_new, stop_ids, budget)
    dtype: DTypeLike = params["embed"]["weight"].dtype  # pyright: ignore[reportAssignmentType]
    cache = init_cache(config.text, rows, width + max_new, 1, dtype)
    logits, cache = prefill(params, config, tokens, lengths, cache, features, image_index)
    state, first = begin(logits, cache, requests, alternatives)
    state, rest = decode_block(params, config, state, max_new - 1, alternatives)
    joined = jax.tree.map(lambda a, b: jnp.concatenate((a, b), axis=1), first, rest)
    return joined, state


def make_requests(
    config: Config,
    sampling: Sampling,
    keys: Key[Array, " B"],
    max_new: int,
    stop_ids: Int[Array, "B m"] | None,
    budget: Int[Array, " B"] | None,
) -> Requests:
    """Returns what `generate` is asked for, with its defaults filled in."""
    rows = keys.shape[0]
    if stop_ids is None:
        stop_ids = jnp.tile(jnp.array(config.text.eos_token_id, jnp.int32), (rows, 1))
    if budget is None:
        budget = jnp.full(rows, max_new, jnp.int32)
    return Requests(sampling, keys, stop_ids, jnp.minimum(budget, max_new))


def _draw(state: GenerateState, logits, alternatives) -> tuple[GenerateState, Tokens]:
    """Draws the next token of every running row and notes which rows end with it."""
    requests, running = state.requests, ~state.done
    token, _ = sample(logits, requests.sampling, requests.keys, state.count)
    chosen, top_ids, top_logprobs = logprobs(logits, token, alternatives)
    sound = finite(logits)
    emitted = running & sound
    count = state.count + emitted.astype(jnp.int32)
    stopped = jnp.any(token[:, None] == requests.stop_ids, axis=1)
    ended = ~sound | stopped | (count >= requests.budget)
    tokens = Tokens(
        jnp.where(emitted, token, NO_TOKEN)[:, None],
        chosen[:, None],
        top_ids[:, None],
        top_logprobs[:, None],
    )
    new = dataclasses.replace(
        state,
        token=jnp.where(emitted, token, state.token),
        count=count,
        done=state.done | ended,
        finite=state.finite & (sound | ~running),
    )
    return new, tokens
