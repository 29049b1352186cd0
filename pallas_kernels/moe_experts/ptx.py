"""The PTX of one step: a fragment of 16 rows x 64 columns, decoded, or times 8 rows of activations.

Decoding costs two or three integer instructions for two weights and one multiplication by the block
scale, both weights at once in a bfloat16x2 register, which is exactly what an MMA lane needs.
"""

from pallas_kernels.moe_experts.pack import LOADS, Format

_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{{$0, $1, $2, $3}}, {{a0, a1, a2, a3}}, {{${b0}, ${b1}}}, {{{c}}};"
)


def fragment_product(format: Format, fragment: int) -> tuple[str, str]:
    """Returns the assembly and its constraints for fragment 0 or 1 of a tile.

    Operands, four elements of each tensor at a time: out accumulators ($0...$3); in words, one
    operand of four registers per load; the lane's four scale bytes in one register (not for
    bfloat16); activations, two registers for each of the four MMAs; accumulators.
    """
    words = 4 * LOADS[format]
    first_b = 4 + words + (format != "bfloat16")
    first_c = first_b + 8
    lines = [_REGISTERS, *_scales(format, f"${4 + words}", fragment)]
    for j in range(4):
        lines += _decode(format, 4, j)
        # The first MMA reads the accumulators that came in, the others the running ones.
        c = ", ".join(f"${i + (first_c if j == 0 else 0)}" for i in range(4))
        lines.append(_MMA.format(b0=first_b + 2 * j, b1=first_b + 2 * j + 1, c=c))
    constraints = ["=&f"] * 4 + ["r"] * (first_c - 4) + ["f"] * 4
    return "{\n" + "\n".join(lines) + "\n}", ",".join(constraints)


def half_fragment(format: Format, fragment: int) -> tuple[str, str]:
    """Returns the assembly and its constraints that decode half a fragment, two MMAs of it.

    Operands, a register each: out the A registers of the MMAs ($0...$7); in their words and the
    scale bytes as for `fragment_product`.
    """
    words = 2 * LOADS[format]
    lines = [_REGISTERS, *_scales(format, f"${8 + words}", fragment)]
    for j in range(2):
        lines += _decode(format, 8, j)
        lines += [f"mov.b32 ${4 * j + p}, a{p};" for p in range(4)]
    constraints = ["=&r"] * 8 + ["r"] * (words + (format != "bfloat16"))
    return "{\n" + "\n".join(lines) + "\n}", ",".join(constraints)


_REGISTERS = ".reg .b32 a0, a1, a2, a3, t, s0, s1;"


def _decode(format: Format, first: int, j: int) -> list[str]:
    """Puts the weights of MMA j into a0...a3; the first one's words begin with operand `first`."""
    each = LOADS[format]
    decode = {"nvfp4": _nvfp4, "mxfp8": _mxfp8, "bfloat16": _bfloat16}[format]
    lines = decode([f"${first + j * each + i}" for i in range(each)])
    if format != "bfloat16":
        lines += [f"mul.rn.bf16x2 a{p}, a{p}, s{p % 2};" for p in range(4)]
    return lines


def _scales(format: Format, register: str, fragment: int) -> list[str]:
    """Puts the scales of rows g and g + 8 into both halves of s0 and s1."""
    lines = []
    for h in range(0 if format == "bfloat16" else 2):
        byte = 2 * fragment + h
        lines.append(f"prmt.b32 t, {register}, 0, 0x4{byte}4{byte};")
        if format == "nvfp4":  # five exponent bits over three of mantissa, 217 below bfloat16's
            lines.append(f"mad.lo.u32 s{h}, t, 16, {(217 << 7) * 0x10001};")
        else:
            lines.append(f"shl.b32 s{h}, t, 7;")
    return lines


def _nvfp4(words: list[str]) -> list[str]:
    [w] = words
    return [
        f"shl.b32 a0, {w}, 6;",
        "and.b32 a0, a0, 0x81c081c0;",
        f"shl.b32 a1, {w}, 2;",
        "and.b32 a1, a1, 0x81c081c0;",
        f"shf.r.wrap.b32 a2, {w}, {w}, 4;",
        "and.b32 a2, a2, 0x81c081c0;",
        f"shr.u32 t, {w}, 8;",
        "and.b32 t, t, 0x00400040;",
        f"lop3.b32 a3, {w}, 0x81808180, t, 0xea;",  # (w & mask) | t
    ]


def _mxfp8(words: list[str]) -> list[str]:
    lines = []
    for kk, w in enumerate(words):
        lines += [
            f"and.b32 a{2 * kk}, {w}, 0x87f087f0;",
            f"shl.b32 t, {w}, 4;",
            "and.b32 t, t, 0x80f080f0;",
            f"shr.u32 a{2 * kk + 1}, {w}, 4;",
            f"lop3.b32 a{2 * kk + 1}, a{2 * kk + 1}, 0x07000700, t, 0xea;",
        ]
    return lines


def _bfloat16(words: list[str]) -> list[str]:
    return [f"mov.b32 a{p}, {w};" for p, w in enumerate(words)]
