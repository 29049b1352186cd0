"""Where top-k and top-p end a row of logits, found without sorting it."""

from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.sampling import kernel, tally

__all__ = ["prefix_end", "unsupported"]

MAX_VOCABULARY = 1 << 20


def unsupported(vocabulary: int) -> str | None:
    """Says why the kernel cannot run on rows of this length, or None."""
    if vocabulary > MAX_VOCABULARY:
        return f"a vocabulary of {vocabulary}, the kernel takes at most {MAX_VOCABULARY}"
    return None


def prefix_end(
    logits: Float32[Array, "B V"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """Finds the last token that is kept, in the order of falling logit and then rising id.

    Top-k keeps the first k of that order, top-p the shortest beginning of these whose probabilities
    reach p of their sum, at least one. Sums are float32 in an order of their own: a boundary that
    is nearer to p than their rounding may fall on either side.

    Args:
      logits: divided by the temperature, free of NaN and -0.0.
      top_k: at least 1; V or more keeps all.
      top_p: 1 or more keeps all.
      interpret: run in Pallas' interpreter.

    Returns:
      Logit and id of the last token kept; -inf and V - 1 where nothing is cut off.

    Raises:
      ValueError: a shape that the kernel does not take; the value is named.
    """
    if reason := unsupported(logits.shape[1]):
        raise ValueError(f"prefix_end: {reason}")
    largest, sums = kernel.group(logits, interpret)
    head, floor = kernel.choose_head(largest, interpret)
    tallied = tally.tally(logits, largest, sums, top_k, top_p, interpret)
    return kernel.search(logits, largest, sums, head, floor, tallied, top_k, top_p, interpret)
