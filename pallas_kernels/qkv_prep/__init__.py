"""From projected to usable queries, keys and values: scales, convolutions, clips, cache write."""

from typing import NamedTuple

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.qkv_prep import kernel

__all__ = [
    "Prepared",
    "PreparedLong",
    "qkv_prep",
    "qkv_prep_long",
    "unsupported",
    "unsupported_long",
]

MAX_TOKENS = 8

Static = Float[Array, "K d c"]
Dynamic = tuple[Float[Array, "c K d"], Float[Array, "B T K c"]]


class Prepared(NamedTuple):
    """q and r of all tokens, and the rings with the valid tokens written."""

    q: Float[Array, "B T H d"]
    r: Float[Array, "B T H R"]
    k_cache: Float[Array, "B S K d"]
    v_cache: Float[Array, "B S K d"]
    k_state: Float[Array, "B Sc K d"]
    v_state: Float[Array, "B Sc K d"]


class PreparedLong(NamedTuple):
    """All tokens, ready for attention; zeros where they are not valid."""

    q: Float[Array, "B T H d"]
    r: Float[Array, "B T H R"]
    k: Float[Array, "B T K d"]
    v: Float[Array, "B T K d"]


def unsupported_long(head_dim: int, d_rel: int) -> str | None:
    """Says why the kernel of many tokens cannot run these shapes, or None."""
    for name, size in (("head_dim", head_dim), ("d_rel", d_rel)):
        if size & (size - 1):
            return f"{name} is {size}, not a power of two"
    return None


def unsupported(
    tokens: int, head_dim: int, d_rel: int, slots: int, conv_slots: int, taps: int
) -> str | None:
    """Says why the kernel cannot run these shapes, or None."""
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens, qkv_prep takes at most {MAX_TOKENS}"
    if reason := unsupported_long(head_dim, d_rel):
        return reason
    if tokens > slots:
        return f"the cache has {slots} slots, it needs {tokens}"
    if (needed := taps - 1 + tokens) > conv_slots:
        return f"the ring of the convolution has {conv_slots} slots, it needs {needed}"
    return None


def qkv_prep(
    q: Float[Array, "B T H d"],
    r: Float[Array, "B T H R"],
    k: Float[Array, "B T K d"],
    v: Float[Array, "B T K d"],
    q_scale: Float[Array, "H d"],
    r_scale: Float[Array, "H R"],
    k_taps: Static | Dynamic,
    v_taps: Static | Dynamic,
    k_cache: Float[Array, "B S K d"],
    v_cache: Float[Array, "B S K d"],
    k_state: Float[Array, "B Sc K d"],
    v_state: Float[Array, "B Sc K d"],
    start: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    qk_threshold: float,
    rel_threshold: float,
    eps: float,
    log_scaling: tuple[int, float] | None = None,
    interpret: bool = False,
) -> Prepared:
    """Scales and clips q and r; convolves k and v, clips and normalises them, writes the rings.

    Position p of row b lives in slot p % S of the caches and p % Sc of the states; both are
    donated. (Spec: inkling2.md, "Attention" and "Short convolution".)

    Args:
      q, r, k, v: float32 products of the projections; what invalid tokens hold is not read.
      q_scale, r_scale: factors before the clip.
      k_taps, v_taps: float32, static ones whose last weighs the current token; or static ones by
        backward distance with dynamic ones, which are added to them.
      k_cache, v_cache: keys and values before these tokens; q and r come in their dtype.
      k_state, v_state: float32 inputs of the convolutions.
      start: position of token 0.
      lengths: valid tokens of the row, 0...T; q and r of the others are zeros.
      qk_threshold, rel_threshold: largest L2 norms of q and k, and of r.
      eps: of the norm of values.
      log_scaling: (floor, alpha) of the factor 1 + alpha log(max((p + 1) / floor, 1)) of q and r.
      interpret: run in Pallas' interpreter.

    Raises:
      ValueError: a shape that the kernel does not take; the value is named.
    """
    pairs = _pairs(k_taps, v_taps)
    width = pairs[0][0].shape[0 if len(pairs[0]) == 2 else 2]
    sizes = q.shape[3], r.shape[3], k_cache.shape[1], k_state.shape[1], width
    if reason := unsupported(q.shape[1], *sizes):
        raise ValueError(f"qkv_prep: {reason}")
    out = kernel.qkv_prep(
        (q, r, k, v), (q_scale, r_scale), pairs, (k_cache, v_cache, k_state, v_state), start,
        lengths, interpret, qk_threshold=qk_threshold, rel_threshold=rel_threshold, eps=eps,
        log_scaling=log_scaling,
    )  # fmt: skip
    return Prepared(*out)


def qkv_prep_long(
    q: Float[Array, "B T H d"],
    r: Float[Array, "B T H R"],
    k: Float[Array, "B T K d"],
    v: Float[Array, "B T K d"],
    q_scale: Float[Array, "H d"],
    r_scale: Float[Array, "H R"],
    k_taps: Static | Dynamic,
    v_taps: Static | Dynamic,
    k_before: Float[Array, "B n K d"],
    v_before: Float[Array, "B n K d"],
    start: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    dtype: DTypeLike,
    qk_threshold: float,
    rel_threshold: float,
    eps: float,
    log_scaling: tuple[int, float] | None = None,
    interpret: bool = False,
) -> PreparedLong:
    """`qkv_prep` of any number of tokens, which leaves writing the rings to its caller.

    Args:
      k_before, v_before: float32 inputs of the convolutions of the n = c - 1 tokens before these,
        zeros before position 0.
      dtype: of the results.
      (others): as `qkv_prep` takes them.

    Raises:
      ValueError: a shape that the kernel does not take; the value is named.
    """
    if reason := unsupported_long(q.shape[3], r.shape[3]):
        raise ValueError(f"qkv_prep_long: {reason}")
    out = kernel.qkv_prep_long(
        (q, r, k, v), (q_scale, r_scale), _pairs(k_taps, v_taps), (k_before, v_before), start,
        lengths, dtype, interpret, qk_threshold=qk_threshold, rel_threshold=rel_threshold, eps=eps,
        log_scaling=log_scaling,
    )  # fmt: skip
    return PreparedLong(*out)


def _pairs(*taps: Static | Dynamic) -> list[tuple]:
    return [x if isinstance(x, tuple) else (x,) for x in taps]
