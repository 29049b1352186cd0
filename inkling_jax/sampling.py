"""From logits to a token: device-side sampling, log probabilities and the check of drafted tokens.

Order of the filters: temperature (after the model's softcap), top-k, top-p on the renormalised
top-k distribution, min-p. Each keeps a prefix of the vocabulary sorted by falling value, the lower
id first among equals, so the three together keep a prefix too. Its end is found without sorting,
by a kernel or here: floats become integers of the same order and a radix search fixes four bits of
the threshold a pass. Passes are unrolled and nothing branches on data, so a decode loop keeps its
CUDA graph.
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Num, UInt32

from inkling_jax import ops
from inkling_jax.sampling_params import GREEDY_BELOW, SamplingParams

KEY_KIND = "threefry2x32"  # of requests' keys, whatever JAX is set to make by default
_FAR = 1e4  # beyond any difference of log probabilities and noise
_DIGIT_BITS = 4  # fifteen thresholds tried a pass: more passes cost launches, wider ones work


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Filters:
    """What each row keeps of its distribution; the fields mean what they do in `SamplingParams`."""

    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """What each row of a batch samples with.

    filters: None where no row has any; a loop for such a batch is compiled without the search.
    """

    temperature: Float[Array, " B"]
    filters: Filters | None = None

    @property
    def greedy(self) -> Bool[Array, " B"]:
        """Rows that take their most probable token, the lowest id on ties."""
        return self.temperature < GREEDY_BELOW

    @classmethod
    def stack(cls, params: Sequence[SamplingParams]) -> Self:
        """Puts the settings of B requests into arrays; unset ones do not filter."""
        rows = [p.resolved() for p in params]
        temperature = jnp.asarray([p.temperature for p in rows], jnp.float32)
        if not any(p.filters for p in rows):
            return cls(temperature)
        filters = Filters(
            top_k=jnp.asarray([min(p.top_k or 0, 2**31 - 1) for p in rows], jnp.int32),
            top_p=jnp.asarray([p.top_p for p in rows], jnp.float32),
            min_p=jnp.asarray([p.min_p for p in rows], jnp.float32),
        )
        return cls(temperature, filters)


def keys_from_seeds(seeds: Sequence[int]) -> Key[Array, " B"]:
    """Makes one random key per request; equal to `jax.random.key(seed)`, for seeds below 2**63."""
    words = np.array([[s >> 32, s & 0xFFFFFFFF] for s in seeds], np.uint32).reshape(-1, 2)
    return jax.random.wrap_key_data(jnp.asarray(words), impl=KEY_KIND)


def sample(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    keys: Key[Array, " B"],
    positions: Int[Array, " B"],
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draws one token a row.

    Args:
        logits: float32, after the softcap.
        sampling: settings of each row.
        keys: each request's key, the same for all its tokens.
        positions: position of the token that is drawn. Key and position alone decide the noise, so
            a request gives the same text in every batch slot.

    Returns:
        Token ids, and their log probabilities under the unfiltered distribution at temperature 1.
    """
    noise = jax.vmap(lambda k, p: gumbel(jax.random.fold_in(k, p), logits.shape[1:]))
    token = draw(filtered_logits(logits, sampling), sampling, noise(keys, positions))
    return token, token_logprobs(logits, token)


def gumbel(key: Key[Array, ""], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Draws Gumbel noise: what is largest with it added is a draw from the softmax."""
    # "high": with the default's 23 bits a few of 200,000 draws would meet at the largest value.
    return jax.random.gumbel(key, shape, jnp.float32, mode="high")


def draw(
    filtered: Float[Array, "B V"], sampling: Sampling, noise: Float[Array, "B V"]
) -> Int[Array, " B"]:
    """Draws a token a row from the result of `filtered_logits`; a greedy row ignores the noise."""
    noise = jnp.where(sampling.greedy[:, None], 0.0, noise)
    return jnp.argmax(filtered + noise, -1).astype(jnp.int32)


def filtered_logits(logits: Float[Array, "B *n V"], sampling: Sampling) -> Float[Array, "B *n V"]:
    """Returns the logits that a row samples from: divided by its temperature, -inf where filtered.

    Greedy rows (temperature below 1e-5) are not divided; their largest logit stays.
    """
    vocab = logits.shape[-1]
    flat = logits.reshape(-1, vocab)
    each = jax.tree.map(lambda x: jnp.repeat(x, flat.shape[0] // x.shape[0]), sampling)
    scaled = flat / jnp.where(each.greedy, 1.0, each.temperature)[:, None]
    if each.filters is None:
        return scaled.reshape(logits.shape)
    scaled = jnp.where(scaled == 0, 0.0, scaled)  # -0.0 and 0.0 are equal, their bits are not
    top_k, top_p = each.filters.top_k, each.filters.top_p
    k = jnp.where(top_k <= 0, vocab, jnp.minimum(top_k, vocab))
    find = ops.prefix_end if ops.takes_sampling(vocab) else prefix_end
    value, last = (x[:, None] for x in find(scaled, k, top_p))
    keep = (scaled > value) | ((scaled == value) & (jnp.arange(vocab) <= last))
    least = each.filters.min_p[:, None]
    keep &= jnp.exp(scaled - scaled.max(-1, keepdims=True)) >= least
    return jnp.where(keep, scaled, -jnp.inf).reshape(logits.shape)


def distributions(filtered: Float[Array, "B n V"], sampling: Sampling) -> Float[Array, "B n V"]:
    """Returns what a row samples from: softmax of the result of `filtered_logits`.

    A greedy row's is all at its largest logit, the lowest id on ties (spec: dspark.md, "Verify").
    """
    only = jnp.arange(filtered.shape[-1]) == jnp.argmax(filtered, -1, keepdims=True)
    greedy = sampling.greedy[:, None, None]
    return jnp.where(greedy, only.astype(jnp.float32), jax.nn.softmax(filtered, axis=-1))


def prefix_end(
    scaled: Float[Array, "B V"], k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """Finds the value and the id of the last token that top-k and top-p keep."""
    vocab = scaled.shape[-1]
    top = scaled.max(-1)
    weights = jnp.exp(scaled - top[:, None])
    ranks = _ordered(scaled)
    k_last, k_above = _threshold(ranks, jnp.ones_like(ranks, jnp.int32), k, 32)
    k_ties = k - k_above

    # The nucleus ends inside the k largest, so it can be searched for in the whole row.
    mass = jnp.where(ranks > k_last[:, None], weights, 0.0).sum(-1)
    mass += k_ties.astype(jnp.float32) * jnp.exp(_value(k_last) - top)
    target = jnp.maximum(top_p, 1e-30) * mass
    p_last, p_above = _threshold(ranks, weights, target, 32)
    p_last = jnp.where(top_p < 1, p_last, 0)
    p_ties = jnp.ceil((target - p_above) / jnp.exp(_value(p_last) - top))

    last = jnp.maximum(k_last, p_last)
    ties = jnp.where(p_last == last, jnp.clip(p_ties, 1, vocab).astype(jnp.int32), vocab)
    ties = jnp.where(k_last == last, jnp.minimum(ties, k_ties), ties)

    # Of the values equal to the last one kept, the `ties` lowest ids stay.
    tied = ranks == last[:, None]
    backwards = jnp.arange(vocab, dtype=jnp.uint32)[::-1][None]
    edge, _ = _threshold(backwards, tied.astype(jnp.int32), ties, (vocab - 1).bit_length())
    return _value(last), vocab - 1 - edge.astype(jnp.int32)


def finite(logits: Float[Array, "B V"]) -> Bool[Array, " B"]:
    """Tells which rows have finite logits only; the caller raises for the others."""
    return jnp.isfinite(logits).all(-1)


def token_logprobs(
    logits: Float[Array, "*rows V"], token: Int[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """Returns log softmax(logits) at the given tokens (temperature 1, nothing filtered)."""
    chosen = jnp.take_along_axis(logits, token[..., None], -1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, -1)


def logprobs(
    logits: Float[Array, "*rows V"], token: Int[Array, "*rows"], alternatives: int
) -> tuple[Float[Array, "*rows"], Int[Array, "*rows k"], Float[Array, "*rows k"]]:
    """Returns the tokens' log probabilities and the most probable alternatives with theirs.

    Args:
        logits: float32, after the softcap.
        token: the tokens that were chosen.
        alternatives: how many of the most probable tokens to list, falling, lower id first on ties.

    Returns:
        Log probability of `token`, ids of the alternatives, their log probabilities.
    """
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    left, listed = logits, []
    for _ in range(alternatives):  # a pass each, unrolled: cheaper than ordering the vocabulary
        best = jnp.argmax(left, -1).astype(jnp.int32)
        listed.append(best)
        left = jnp.where(ids == best[..., None], -jnp.inf, left)
    top = jnp.stack(listed, -1) if listed else jnp.zeros((*token.shape, 0), jnp.int32)
    total = jax.nn.logsumexp(logits, -1, keepdims=True)
    return token_logprobs(logits, token), top, jnp.take_along_axis(logits, top, -1) - total


def accept(
    draft_tokens: Int[Array, "B n"],
    q: Float[Array, "B n V"],
    p: Float[Array, "B m V"],
    n_valid: Int[Array, " B"],
    uniform: Float[Array, "B n"],
    noise: Float[Array, "B V"],
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Accepts a prefix of drafted tokens so that the output follows the target's distribution.

    A drafted token stays with probability min(1, p/q); at the first refusal the next token comes
    from max(p - q, 0), after n_valid acceptances from p. Greedy rows need nothing of their own:
    their distributions have one token (spec: dspark.md, "Verify").

    Args:
      draft_tokens: drafts, token j drawn from q[:, j].
      q: the drafter's probabilities, float32, all filters applied.
      p: the target's probabilities, m = n + 1 of them, all filters applied.
      n_valid: how many drafts of each row count, 0 to n.
      uniform: numbers in [0, 1), for the acceptances.
      noise: Gumbel noise, for the token that follows them.

    Returns:
      How many drafts were accepted, and the token that follows them.
    """
    n = draft_tokens.shape[1]
    at = draft_tokens[..., None]
    p_draft = jnp.take_along_axis(p[:, :n], at, -1)[..., 0]
    q_draft = jnp.take_along_axis(q, at, -1)[..., 0]
    place = jnp.arange(n)
    fine = (uniform * q_draft < p_draft) & (place < n_valid[:, None])
    accepted = jnp.where(fine, n, place).min(-1).astype(jnp.int32)

    row = accepted[:, None, None]
    p_next = jnp.take_along_axis(p, row, 1)[:, 0]
    q_next = jnp.take_along_axis(q, jnp.minimum(row, n - 1), 1)[:, 0]
    refused = (accepted < n_valid)[:, None]
    rest = jnp.where(refused, jnp.maximum(p_next - q_next, 0.0), p_next)
    # Where rounding leaves no mass the draw is from p, whose scores are below all others.
    score = jnp.where(rest > 0, jnp.log(rest), jnp.log(p_next) - _FAR)
    return accepted, jnp.argmax(score + noise, -1).astype(jnp.int32)


def _ordered(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Maps float32 to integers of the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _value(rank: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Undoes `_ordered`."""
    bits = jnp.where(rank >> 31 == 1, rank ^ jnp.uint32(1 << 31), ~rank)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _threshold(
    ranks: UInt32[Array, "#B V"],
    weights: Num[Array, "B V"],
    target: Num[Array, " B"],
    bits: int,
) -> tuple[UInt32[Array, " B"], Num[Array, " B"]]:
    """Finds the largest t for which the weights of all ranks >= t add up to the target or more.

    Returns t (0 if there is none) and the sum of the weights of ranks > t.
    """
    found = jnp.zeros(target.shape, jnp.uint32)
    above = jnp.zeros_like(target)
    digits = jnp.arange(1, 1 << _DIGIT_BITS, dtype=jnp.uint32)
    for shift in reversed(range(0, bits, _DIGIT_BITS)):
        candidates = (found[:, None] + (digits << shift))[..., None]
        reached = ranks[:, None] >= candidates  # [B, 15, V], fused into the sum
        sums = jnp.where(reached, weights[:, None], 0).sum(-1)
        enough = sums >= target[:, None]
        digit = enough.sum(-1)
        above = jnp.maximum(above, jnp.where(enough, 0, sums).max(-1))
        found += digit.astype(jnp.uint32) << shift
    return found, above
