"""Reorders expert weights, once at load, into the order in which tensor-core lanes read them.

A fragment is 16 rows x 64 columns. Lane `4g + t` of a warp owns rows g and g + 8 and the 16
columns from 16t of it, and uses them in four `mma.m16n8k16`; MMA j takes columns 4j...4j+3 in the
two halves of its K (which column sits where in K is free, as long as the activations agree).
A tile is two fragments: gate and up rows of w13, two times 16 rows of w2.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int32, Shaped, UInt8

WORDS = 128  # int32 words in one 16-byte load of a warp: 32 lanes x 4
Format = Literal["nvfp4", "mxfp8", "bfloat16"]
LOADS: dict[Format, int] = {"nvfp4": 1, "mxfp8": 2, "bfloat16": 4}  # such loads per fragment

# e2m1 times 2^-126 is what its bits mean as bfloat16, and scales are stored times 2^100.
NVFP4_REPAIR = 2.0**26
# e4m3 times 2^-120; the largest scale of an expert becomes 2^113.
MXFP8_REPAIR_EXPONENT = -120
MXFP8_TOP = 240

# Bit of (sign, exponent 1, exponent 0, mantissa) of a code in its 16-bit half, for each of the four
# pairs of an MMA: shifts by 6, 2 and -4 and the left-over bits put them where bfloat16 wants them.
# The sign of pair 2 lies in the other half: its shift is a rotation of the whole word.
NVFP4_BITS = ((9, 2, 1, 0), (13, 6, 5, 4), (3, 12, 11, 10), (15, 8, 7, 14))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["words", "scales", "outer"],
    meta_fields=["columns", "interleaved"],
)
@dataclasses.dataclass(frozen=True)
class PackedExperts:
    """Expert matrices [n, R, C] in lane order; the format shows in `words.shape[4]` (see LOADS).

    Attributes:
      words: R / 32 tiles in ceil(C / 64) steps, 16 bytes of weights per lane and load.
      scales: per lane, or pair of lanes for MXFP8, four bytes: rows g and g + 8 of the first
        fragment, then of the second; None for bfloat16.
      outer: what a product must be multiplied by at the end.
      columns: C, or of each part where parts of C, each packed by itself, lie side by side (on a
        mesh: one a device); short last steps are filled with zeros.
      interleaved: rows of the matrices run gate0, up0, gate1, ... (w13).
    """

    words: Int32[Array, "n tiles steps 2 loads 128"]
    scales: UInt8[Array, "n tiles steps lanes"] | None
    outer: Float[Array, " n"]
    columns: int
    interleaved: bool

    @property
    def format(self) -> Format:
        return next(name for name, loads in LOADS.items() if loads == self.words.shape[4])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape counted in weights, [n, R, C]."""
        return self.words.shape[0], 32 * self.words.shape[1], self.parts * self.columns

    @property
    def parts(self) -> int:
        """How many parts C has."""
        return self.words.shape[2] // -(-self.columns // 64)

    def __getitem__(self, index) -> "PackedExperts":
        """Selects along the leading axis; an array of indices gives as many matrices."""
        return jax.tree.map(lambda a: a[index], self)


def pack_nvfp4(
    values: UInt8[Array, "n R half"],
    scales: Shaped[Array, "n R blocks"],
    outer: Float[Array, " n"],
    *,
    interleaved: bool,
) -> PackedExperts:
    """Packs NVFP4 experts; exact.

    Args:
      values: uint8 [n, R, C / 2], two e2m1 codes a byte, the even column in the low nibble.
      scales: float8_e4m3fn [n, R, C / 16], free of NaN.
      outer: float32 [n].
      interleaved: rows run gate0, up0, gate1, ... (w13).
    """
    n, rows, half = values.shape
    codes = jnp.stack([values & 15, values >> 4], axis=-1).reshape(n, rows, 2 * half)
    scale_bits = lax.bitcast_convert_type(scales, jnp.uint8)
    # A negative scale moves its sign into the codes; a zero scale takes the codes with it, because
    # the five-bit exponent below has no zero.
    by_column = jnp.repeat(scale_bits, 16, axis=2)
    codes = jnp.where(by_column & 127 == 0, 0, codes ^ ((by_column >> 7) << 3))
    codes = _fragments(codes, interleaved).astype(jnp.uint32)  # [..., j, kk, h, b]
    word = jnp.zeros(codes.shape[:-3], jnp.uint32)
    for pair, (sign, *bits) in enumerate(NVFP4_BITS):
        for b in range(2):
            code = codes[..., pair // 2, pair % 2, b]
            sign_half = 1 - b if pair == 2 else b
            word |= (code >> 3 & 1) << (sign + 16 * sign_half)
            for i, bit in enumerate(bits):
                word |= (code >> (2 - i) & 1) << (bit + 16 * b)
    lanes = _lane_scales(_e5m3(scales), interleaved, 1)
    outer = outer.astype(jnp.float32) * NVFP4_REPAIR
    return PackedExperts(_words(word[..., None]), lanes, outer, 2 * half, interleaved)


def pack_mxfp8(
    values: Shaped[Array, "n R C"],
    scales: UInt8[Array, "n R blocks"],
    *,
    interleaved: bool,
    axes: Sequence[str] = (),
) -> PackedExperts:
    """Packs MXFP8 experts; exact but for blocks 2^113 below the largest of their expert.

    Args:
      values: float8_e4m3fn [n, R, C].
      scales: uint8 [n, R, C / 32], exponents biased by 127.
      interleaved: rows run gate0, up0, gate1, ... (w13).
      axes: mesh axes over which the experts' other parts lie, so that all get the same `outer`.
    """
    codes = _fragments(lax.bitcast_convert_type(values, jnp.uint8), interleaved)
    codes = codes.astype(jnp.uint32)
    word = jnp.zeros(codes.shape[:-2], jnp.uint32)  # [..., j, kk]
    for b in range(2):
        first, second = codes[..., 0, b], codes[..., 1, b]
        half = (first >> 7) << 15 | (first & 127) << 4
        half |= (second >> 7) << 11 | (second >> 4 & 7) << 12 | second & 15
        word |= half << (16 * b)
    top = scales.max(axis=(1, 2))
    top = lax.pmax(top, tuple(axes)) if axes else top
    shifted = scales.astype(jnp.int32) - top[:, None, None].astype(jnp.int32) + MXFP8_TOP
    lanes = _lane_scales(jnp.maximum(shifted, 0).astype(jnp.uint8), interleaved, 2)
    exponent = top.astype(jnp.int32) + MXFP8_REPAIR_EXPONENT
    outer = jnp.ldexp(jnp.float32(1), exponent)
    return PackedExperts(_words(word), lanes, outer, values.shape[2], interleaved)


def pack_bfloat16(weight: BFloat16[Array, "n R C"], *, interleaved: bool) -> PackedExperts:
    """Packs bfloat16 experts [n, R, C]; `interleaved`: rows run gate0, up0, gate1, ... (w13)."""
    halves = _fragments(lax.bitcast_convert_type(weight, jnp.uint16), interleaved)
    halves = halves.astype(jnp.uint32)
    word = halves[..., 0] | halves[..., 1] << 16  # [..., j, kk, h]
    word = word.reshape(*word.shape[:-2], 4)
    outer = jnp.ones(weight.shape[0], jnp.float32)
    return PackedExperts(_words(word), None, outer, weight.shape[2], interleaved)


def column_order(x: Shaped[Array, "... C"]) -> Shaped[Array, "... C"]:
    """Moves the columns of each step (C / 64 of them) to where fragments have them in K."""
    steps = x.reshape(*x.shape[:-1], -1, 4, 4, 2, 2)  # t j kk b
    return jnp.moveaxis(steps, -4, -2).reshape(x.shape)


def _fragments(x: jax.Array, interleaved: bool) -> jax.Array:
    """[n, R, C] -> [n, tile, step, fragment, g, t, j, kk, h, b]; short steps filled with zeros."""
    columns = x.shape[2]
    steps = -(-columns // 64)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 64 * steps - columns)))
    x = _row_axes(x, interleaved)  # n tile f h g C
    x = x.reshape(*x.shape[:5], steps, 4, 4, 2, 2)  # n tile f h g step t j kk b
    return x.transpose(0, 1, 5, 2, 4, 6, 7, 8, 3, 9)


def _row_axes(x: jax.Array, interleaved: bool) -> jax.Array:
    n, rows, columns = x.shape
    if interleaved:
        return x.reshape(n, rows // 32, 2, 8, 2, columns).transpose(0, 1, 4, 2, 3, 5)
    return x.reshape(n, rows // 32, 2, 2, 8, columns)


def _words(word: jax.Array) -> jax.Array:
    """[n, tile, step, f, g, t, j, words of an MMA] -> [n, tile, step, f, loads, 128]."""
    n, tiles, steps, fragments, g, t, _, each = word.shape
    word = word.reshape(n, tiles, steps, fragments, g * t, each, 4).swapaxes(4, 5)
    word = word.reshape(n, tiles, steps, fragments, each, WORDS)
    return lax.bitcast_convert_type(word, jnp.int32)


def _lane_scales(scales: jax.Array, interleaved: bool, lanes: int) -> jax.Array:
    """[n, R, blocks] -> [n, tile, step, 128 / lanes]; `lanes` neighbours share a block."""
    blocks = 4 // lanes
    steps = -(-scales.shape[2] // blocks)
    scales = jnp.pad(scales, ((0, 0), (0, 0), (0, blocks * steps - scales.shape[2])))
    x = _row_axes(scales, interleaved)
    n, tiles = x.shape[:2]
    x = x.reshape(n, tiles, 2, 2, 8, steps, blocks).transpose(0, 1, 5, 4, 6, 2, 3)
    return x.reshape(n, tiles, steps, WORDS // lanes)


def _e5m3(scales: jax.Array) -> jax.Array:
    """The magnitude of e4m3 numbers as exponent + 10 in five bits over three of mantissa."""
    mantissa, exponent = jnp.frexp(jnp.abs(scales.astype(jnp.float32)))  # mantissa in [0.5, 1)
    bits = ((exponent + 9) << 3) + (mantissa * 16).astype(jnp.int32) - 8
    return jnp.where(mantissa == 0, 0, bits).astype(jnp.uint8)
