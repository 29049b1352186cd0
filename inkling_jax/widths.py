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
from jaxtyping import Array, Float, Int


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
