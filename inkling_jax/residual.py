"""Block attention residuals: what every sublayer reads (spec: inkling2.md, "AttnRes")."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from inkling_jax.layers import einsum, rms

EPS = 1e-6


def mix(
    query: Float[Array, "*n D"],
    blocks: Sequence[Float[Array, "B T D"]],
    partial: Float[Array, "B T D"],
) -> Float[Array, "*n B T D"]:
    """Mixes the finished blocks and the running sum, each normalised to unit root mean square.

    p = softmax_i(query · n_i / sqrt(D)), result Σ_i p_i n_i in float32; several queries, several
    results.
    """
    sources = jnp.stack([rms(s, EPS) for s in (*blocks, partial)])
    scores = einsum("...d,sbtd->...sbt", query, sources) / math.sqrt(sources.shape[-1])
    weights = jax.nn.softmax(scores, axis=-3)
    return einsum("...sbt,sbtd->...btd", weights, sources)
