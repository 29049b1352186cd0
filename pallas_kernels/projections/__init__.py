"""Thin products of a decode step: a few rows of activations times whole weights, in one launch."""

from collections.abc import Sequence

from jaxtyping import Array, Float

from pallas_kernels.projections import kernel

__all__ = ["project", "unsupported"]

MAX_TOKENS = 64


def unsupported(tokens: int, columns: int) -> str | None:
    """Says why the kernel cannot run a product of these shapes, or None."""
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens, a thin product takes at most {MAX_TOKENS}"
    if columns % 32:
        return f"{columns} columns are no multiple of 32"
    return None


def project(
    products: Sequence[tuple[Float[Array, "T _"], Float[Array, "_ _"]]],
    *,
    interpret: bool = False,
) -> list[Float[Array, "T _"]]:
    """Multiplies activations by weights, each of which is read once.

    Args:
      products: pairs of an input [T, K] and a weight [N, K] of one dtype; N and K may differ from
        pair to pair.
      interpret: run in Pallas' interpreter.

    Returns:
      float32 [T, N] of each pair.

    Raises:
      ValueError: a shape that the kernel does not take; the value is named.
    """
    for x, weight in products:
        if reason := unsupported(*x.shape):
            raise ValueError(f"project: {reason}")
        if x.shape[1] != weight.shape[1]:
            raise ValueError(f"project: {x.shape[1]} columns for a weight of {weight.shape[1]}")
    inputs, weights = zip(*products, strict=True)
    return list(kernel.project(inputs, weights, interpret))
