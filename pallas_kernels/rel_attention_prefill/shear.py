"""The bias of 64 queries and 128 keys: r times the table by warp-level MMAs, skewed in registers.

A warp has sixteen queries i, every second one of a run. With P = r · tableᵀ over the 160 lines that
they meet, the bias of query i and key b is P[i, 30 - 2i + b]: an even shift, so that pairs of
columns stay pairs. Four lanes hold a row of P, a pair each of every eight columns; a lane selects
among neighbouring eights and one shuffle among the four turns them.
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
LEAD = 30  # columns of P before the one of query 0 and key 0
GROUPS = 20  # of eight lines: 128 keys and twice 15 queries


def sheared(table: Any, r: jax.Array, first: jax.Array) -> jax.Array:
    """The bias [64, 128] in float16.

    Args:
      table: reference to shared memory, bfloat16 [..., 16] lines of falling distance.
      r: bfloat16 [64, 16]; line 32 c + i belongs to query 2i + c.
      first: line of query 0 and key 0, less `LEAD`.
    """
    layout = plgpu.Layout.WGMMA
    inline = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout, plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((QUERIES, KEYS), jnp.float16, layout),
    )
    return inline(_emit)(table, r, first)


def _emit(ctx, table, r, first):
    del ctx
    word, layout = ir.IntegerType.get_signless(32), fragments.WGMMA_LAYOUT
    given = [*(utils.bitcast(x, word) for x in r.registers.flat), first.registers.item()]
    words = utils.inline_ptx(
        _program(),
        *(*given, utils.memref_ptr(table)),
        result_types=[word] * (QUERIES * KEYS // 256),
        has_side_effects=True,
        convergent=True,
    )
    pair = ir.VectorType.get((2,), ir.F16Type.get())
    registers = np.array([utils.bitcast(x, pair) for x in words], dtype=object)
    registers = registers.reshape(layout.registers_shape((QUERIES, KEYS)))
    return fragments.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _program() -> str:
    """PTX; $0…$31 are the result in pairs, $32…$35 r, $36 the first line, $37 the table."""
    text = [
        ".reg .pred far, carry;",
        ".reg .b32 warp, line, lane, row, quad, turn, source, at, b<2>, x<40>, y<40>;",
        ".reg .f32 c<4>;",
        # The queries of warp w of four are 32 (w % 2) + w // 2 + 2i, so much farther from the keys.
        "mov.u32 warp, %tid.x;",
        "bfe.u32 line, warp, 5, 1;",
        "shl.b32 line, line, 5;",
        "bfe.u32 warp, warp, 6, 1;",
        "add.u32 line, line, warp;",
        "sub.u32 line, $36, line;",
        f"mad.lo.u32 at, line, {2 * RANKS}, $37;",
        "mov.u32 lane, %laneid;",
        "mad.lo.u32 at, lane, 8, at;",
        "shr.u32 row, lane, 2;",
        "and.b32 quad, lane, 3;",
        # Row g moves by 14 - 2g columns, the row g + 8 of the same lanes by 16 less: by an eight
        # where g < 4, and by the pairs of 3 - g % 4 lanes, across the next eight's edge.
        "setp.lt.u32 far, row, 4;",
        "not.b32 turn, row;",
        "and.b32 turn, turn, 3;",
        "setp.lt.u32 carry, quad, turn;",
        "add.u32 source, quad, turn;",
        "and.b32 source, source, 3;",
        "and.b32 lane, lane, 28;",
        "or.b32 source, source, lane;",
    ]
    zero = "0f00000000"
    for n in range(GROUPS):
        text += [
            f"ld.shared.v2.b32 {{b0, b1}}, [at + {8 * 2 * RANKS * n}];",
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {c0, c1, c2, c3}, "
            f"{{$32, $33, $34, $35}}, {{b0, b1}}, {{{zero}, {zero}, {zero}, {zero}}};",
            f"cvt.rn.f16x2.f32 x{2 * n}, c1, c0;",
            f"cvt.rn.f16x2.f32 x{2 * n + 1}, c3, c2;",
        ]
    text += [f"selp.b32 y{n}, x{n + 2}, x{n}, far;" for n in range(2 * GROUPS - 2)]
    for n in range(KEYS // 8):
        for half, eight in ((0, n + 2), (1, n)):
            at = 2 * eight + half
            text += [
                f"selp.b32 y{at}, y{at + 2}, y{at}, carry;",
                f"shfl.sync.idx.b32 ${2 * n + half}, y{at}, source, 31, -1;",
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
