"""How many drafts a round verifies (spec: dspark.md, "Adaptive verification").

A wider block costs more (on a sparse model each token reads experts of its own) and pays only where
its drafts survive. The aim is the most tokens per time over a whole reply. With λ the tokens per
time so far, that is reached by verifying what brings more than λ times its cost: maximising each
round's own ratio would not do it.

Whether draft j is verified may depend on the drafts before it, never on draft j or later ones, or
the output would no longer follow the target: a draft that is kept from being verified because of
what it is biases the token that is drawn in its place. A confidence looks at the draft before its
own, so the rule stops at the first draft that does not pay, and forecasts what it may not yet know.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def choose_widths(
    confidence: Float[Array, "B n"], cost: Float[Array, " m"], rate: Float[Array, " B"]
) -> Int[Array, " B"]:
    """Returns how many of its n drafts each row verifies, from its own confidences only.

    Args:
      confidence: the probability that each draft is accepted, given that those before it are.
      cost: of a round that verifies 0…n drafts, drafting included (m = n + 1), in any unit.
      rate: λ, tokens per unit of cost.
    """
    n = confidence.shape[1]
    survival = jnp.cumprod(confidence, axis=1)
    # What verifying drafts j…i brings, as seen when draft j is up: later ones as sure as this one.
    ahead = jnp.arange(n) - jnp.arange(n)[:, None]  # [j, i]
    power = jnp.maximum(ahead, 0).astype(jnp.float32)
    later = survival[..., None] * confidence[..., None] ** power
    gain = jnp.cumsum(jnp.where(ahead >= 0, later, 0.0), axis=-1)
    price = rate[:, None, None] * (cost[1:] - cost[:-1, None])
    pays = jnp.any((gain > price) & (ahead >= 0), axis=-1)
    return jnp.cumprod(pays.astype(jnp.int32), axis=1).sum(axis=1)


def share_widths(
    confidence: Float[Array, "B n"],
    sharing: Bool[Array, " B"],
    read: Int[Array, " B"],
    cost: Float[Array, " m"],
) -> Int[Array, " B"]:
    """Returns how many of its n drafts each row verifies where rows share one budget.

    That is the global top of all survival products, as many as give the round most tokens per time:
    over many rows one round's ratio is close to that of all. It is looked for anew for each j, with
    forecasts in place of what only confidences from j + 1 on would tell: here too, a draft has no
    say in whether it is verified.

    Args:
      confidence, cost: as `choose_widths` takes them.
      sharing: the rows; the result is 0 for others.
      read: tokens that the round reads of each row, shared drafts aside: 1 where it shares.
    """
    rows, n = confidence.shape
    survival = jnp.cumprod(confidence, axis=1)
    alive = jnp.pad(survival, ((0, 0), (1, 0)), constant_values=1.0)
    expected = jnp.where(jnp.arange(n + 1) < read[:, None], alive, 0.0).sum()
    tokens, width = read.sum(dtype=jnp.int32), jnp.zeros(rows, jnp.int32)
    for j in range(n):
        candidate = sharing & (width == j)
        power = jnp.arange(n - j, dtype=jnp.float32)
        forecast = survival[:, j, None] * confidence[:, j, None] ** power  # of j and those behind
        gain = jnp.where(candidate[:, None], forecast, 0.0).ravel()
        top = (gain >= gain[:, None]) & (gain > 0)  # [i]: all that bring what i does, or more
        more = jnp.where(top, gain, 0.0).sum(axis=1)
        rate = (expected + more) / tokens_cost(tokens + top.sum(axis=1, dtype=jnp.int32), cost)
        pays = rate.max() > expected / tokens_cost(tokens, cost)
        least = jnp.where(pays, gain[jnp.argmax(rate)], jnp.inf)
        verified = candidate & (forecast[:, 0] >= least)
        width += verified.astype(jnp.int32)
        tokens += verified.sum(dtype=jnp.int32)
        expected += jnp.where(verified, survival[:, j], 0.0).sum()
    return width


def tokens_cost(tokens: Int[Array, "*k"], cost: Float[Array, " m"]) -> Float[Array, "*k"]:
    """Returns the cost of a round that reads so many tokens of all rows, one or more.

    `cost` has what one row's 1…m tokens cost; each one beyond them costs their average.
    """
    known = cost.shape[0]
    beyond = jnp.maximum(tokens - known, 0).astype(jnp.float32)
    each = (cost[-1] - cost[0]) / (known - 1)
    return cost[jnp.minimum(tokens, known) - 1] + beyond * each
