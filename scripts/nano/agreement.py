"""How far two runs agree on the most probable token; needs no other module of this folder."""

import numpy as np
from jaxtyping import Float


def bf16_step(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Returns the distance of neighbouring bfloat16 numbers of that magnitude."""
    return np.exp2(np.floor(np.log2(np.abs(x))) - 7)


def compare(
    low: Float[np.ndarray, "n V"], high: Float[np.ndarray, "n V"]
) -> tuple[int, Float[np.ndarray, " m"]]:
    """Compares logits computed in bfloat16 with those in float32, position by position.

    Returns:
      How many positions there are, and for each of those whose largest logits differ how far below
      its own maximum the bfloat16 run puts the float32 run's token, in bfloat16 steps.
    """
    expected, found = high.argmax(axis=-1), low.argmax(axis=-1)
    rows = np.flatnonzero(expected != found)
    top = low[rows, found[rows]]
    return len(low), (top - low[rows, expected[rows]]) / bf16_step(top)
