"""The router of a decode step: scores, picks and weights, and the plan that the experts follow."""

from jaxtyping import Array, Bool, Float, Float32, Int

from pallas_kernels.moe_experts import Plan
from pallas_kernels.router import kernel, tiles
from pallas_kernels.router.tiles import SELECTED, TileConfig

__all__ = ["Plan", "TileConfig", "route", "unsupported"]

MAX_TOKENS = 64
MAX_PICKS = 128
WORD = 32  # bits, which hold the picks of every turn


def unsupported(tokens: int, hidden: int, k: int) -> str | None:
    """Says why the kernel cannot run these shapes, or None."""
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens, the decode kernel takes at most {MAX_TOKENS}"
    if hidden % 32:
        return f"hidden size {hidden} is not a multiple of 32"
    if k & (k - 1) or k > MAX_PICKS:
        return f"{k} experts per token are not a power of two up to {MAX_PICKS}"
    if -(-tokens // SELECTED) * k.bit_length() > WORD:
        return f"{k} experts per token of {tokens} tokens are more than {WORD} bits hold"
    return None


def route(
    z: Float[Array, "T D"],
    gate: Float32[Array, "N D"],
    bias: Float32[Array, " N"],
    real: Bool[Array, " T"],
    *,
    k: int,
    scale: float,
    config: TileConfig | None = None,
    interpret: bool = False,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"], Plan]:
    """Picks the k experts of the largest s + bias, s = sigmoid(gate · z), for every real token.

    Products are float32. Sums run in another order than XLA's, so that experts whose s + bias are
    within a few units in the last place may come out in another order; equal ones never do: the
    lower index is first. (Spec: inkling2.md, "MoE".)

    Args:
      z: activations.
      gate, bias: the router's weights; the bias takes no part in the weights of picks.
      real: tokens that count; the others may hold anything.
      k: picks of a token.
      scale: what a token's weights add up to.
      config: tiles of the product, by default chosen from the shapes.
      interpret: run in Pallas' interpreter.

    Returns:
      Picks, N in tokens that are not real; weights s / (Σ s + 1e-20) · scale, 0 there; the plan of
      `moe_experts.make_plan` for them, whose `order` holds anything behind the planned slots.

    Raises:
      ValueError: a shape that the kernel does not take; the value is named.
    """
    tokens, hidden = z.shape
    if reason := unsupported(tokens, hidden, k):
        raise ValueError(f"route: {reason}")
    config = config or tiles.choose(tokens, gate.shape[0], hidden)
    products = kernel.products(z, gate, config, interpret)
    return kernel.select(products, bias, real, k, scale, interpret)
