"""The bias of 64 queries and 128 keys: r times the table by warp-level MMAs, skewed in registers.

A warpgroup has every second query of a run. With P = r · tableᵀ over the 160 lines that a warp's
sixteen queries meet, the bias of query i and key b is P[i, 30 - 2i + b]: an even shift, so that
pairs of columns stay pairs. Four lanes hold a row of P, a pair each of every eight columns; a lane
selects among neighbouring eights and one shuffle among the four turns them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

QUERIES, KEYS, RANKS = 64, 128, 16
LINES = 160  # 128 keys and twice 15 queries, in eights
LEAD = 30  # columns of P before the one of query 0 and key 0


def products(table: Any, r: jax.Array, first: jax.Array) -> jax.Array:
    """P of each warp, float16 [64, 160].

    Args:
      table: reference to shared memory, bfloat16 [..., 16] lines of falling distance.
      r: bfloat16 [64, 16], of every second query.
      first: line of query 0 and key 0, less `LEAD`.
    """
    layout = plgpu.Layout.WGMMA
    inline = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout, plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((QUERIES, LINES), jnp.float16, layout),
    )

    def emit(ctx, table, r, first):
        given = *_words(r), first.registers.item(), utils.memref_ptr(table)
        return _run(products_ptx(), given, (QUERIES, LINES), has_side_effects=True)

    return inline(emit)(table, r, first)


def skewed(p: jax.Array) -> jax.Array:
    """The bias in float16 [64, 128], of P."""
    layout = plgpu.Layout.WGMMA
    inline = plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct((QUERIES, KEYS), jnp.float16, layout),
    )
    return inline(lambda ctx, p: _run(skew_ptx(), _words(p), (QUERIES, KEYS)))(p)


def _words(x):
    """The registers of an array of 16-bit numbers, two in each."""
    return [utils.bitcast(pair, ir.IntegerType.get_signless(32)) for pair in x.registers.flat]


def _run(ptx, given, shape, **effects):
    """An array of float16 in the layout of a wgmma accumulator, of a program's results."""
    word, layout = ir.IntegerType.get_signless(32), fragments.WGMMA_LAYOUT
    words = utils.inline_ptx(
        ptx, *given, result_types=[word] * (shape[0] * shape[1] // 256), convergent=True, **effects
    )
    pair = ir.VectorType.get((2,), ir.F16Type.get())
    registers = np.array([utils.bitcast(x, pair) for x in words], dtype=object)
    registers = registers.reshape(layout.registers_shape(shape))
    return fragments.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def products_ptx() -> str:
    """PTX; $0…$39 are the result in pairs, $40…$43 r, $44 the first line, $45 the table."""
    text = [
        ".reg .b32 line, lane, at, b<2>;",
        ".reg .f32 c<4>;",
        # The queries of warp w of four are 32 w farther from the keys.
        "mov.u32 line, %tid.x;",
        "and.b32 line, line, 96;",
        "sub.u32 line, $44, line;",
        f"mad.lo.u32 at, line, {2 * RANKS}, $45;",
        "mov.u32 lane, %laneid;",
        "mad.lo.u32 at, lane, 8, at;",
    ]
    zero = "0f00000000"
    for n in range(LINES // 8):
        text += [
            f"ld.shared.v2.b32 {{b0, b1}}, [at + {8 * 2 * RANKS * n}];",
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {c0, c1, c2, c3}, "
            f"{{$40, $41, $42, $43}}, {{b0, b1}}, {{{zero}, {zero}, {zero}, {zero}}};",
            f"cvt.rn.f16x2.f32 ${2 * n}, c1, c0;",
            f"cvt.rn.f16x2.f32 ${2 * n + 1}, c3, c2;",
        ]
    return "\n".join(["{", *text, "}"])


def skew_ptx() -> str:
    """PTX; $0…$31 are the result in pairs, $32…$71 P.

    Row g of eight moves by 14 - 2g columns, and row g + 8, in the same lanes, by 16 less: by an
    eight where g < 4, and by the pairs of 3 - g % 4 lanes, which cross into the next eight.
    """
    text = [
        ".reg .pred far, carry;",
        f".reg .b32 lane, row, quad, turn, source, x<{LINES // 4 - 2}>;",
        "mov.u32 lane, %laneid;",
        "shr.u32 row, lane, 2;",
        "and.b32 quad, lane, 3;",
        "setp.lt.u32 far, row, 4;",
        "not.b32 turn, row;",
        "and.b32 turn, turn, 3;",
        "setp.lt.u32 carry, quad, turn;",
        "add.u32 source, quad, turn;",
        "and.b32 source, source, 3;",
        "and.b32 lane, lane, 28;",
        "or.b32 source, source, lane;",
    ]
    text += [f"selp.b32 x{n}, ${n + 34}, ${n + 32}, far;" for n in range(LINES // 4 - 2)]
    for n in range(KEYS // 8):
        for half, eight in ((0, n + 2), (1, n)):
            at = 2 * eight + half
            text += [
                f"selp.b32 x{at}, x{at + 2}, x{at}, carry;",
                f"shfl.sync.idx.b32 ${2 * n + half}, x{at}, source, 31, -1;",
            ]
    return "\n".join(["{", *text, "}"])


def table(proj: jax.Array, tiles: int) -> jax.Array:
    """Lines of falling distance from 128 (tiles + 1) - 1 on, in the order of an MMA's lanes.

    Args:
      proj: [16, E].
      tiles: of 128 keys, in which the bias ends.

    Returns:
      [tiles + 3, 128, 16].
    """
    top = KEYS * (tiles + 1) - 1
    lines = KEYS * (tiles + 3)
    extent = proj.shape[1]
    padded = jnp.pad(proj[:, ::-1], ((0, 0), (top + 1 - extent, lines - top - 1)))
    # Lane q of four gives an MMA ranks 2q, 2q + 1, 2q + 8 and 2q + 9: neighbours here.
    return padded.T.reshape(-1, 2, 4, 2).swapaxes(1, 2).reshape(-1, KEYS, RANKS)
