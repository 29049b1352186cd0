"""What the lanes of a warpgroup do before and after `wgmma` in `kernel_many_sm90.py`.

An accumulator of m64nN holds, in lane 4g + t of warp w, rows g and g + 8 of the 16 from 16w, and
of every eight tokens 2t and 2t + 1; an A operand holds columns in the same way.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.moe_experts import ptx
from pallas_kernels.moe_experts.pack import LOADS, WORDS, Format

HALF = 32  # columns of half a fragment


def load_weights(format: Format, fragment: int, half: int, words, *scales):
    """Decodes half a fragment of each warp's tile into the A operand [64, HALF] of `wgmma`.

    Args:
      format, fragment, half: which half, 0 or 1, of which fragment, 0 or 1.
      words: a step of four tiles in shared memory, int32 [4, 2 loads, 128].
      *scales: theirs, uint8 [4, lanes], where the format has any.
    """
    loads = LOADS[format]
    each = min(2 * loads, 4)  # words that one load brings
    asm, constraints = ptx.half_fragment(format, fragment)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * (1 + len(scales)),
        return_type=plgpu.ShapeDtypeStruct((64, HALF), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def load(_, words, *scales):
        i32, vector = _i32(), ir.VectorType.get((each,), _i32())
        warp, lane = _warp_and_lane()
        operands = []
        for i in range(2 * loads * half, 2 * loads * (half + 1), each):
            first = (fragment * loads + i // 4) * WORDS + i % 4
            at = _pointer(words, i32, (warp, 2 * loads * WORDS), (lane, 4), (1, first))
            some = llvm.load(vector, at, alignment=4 * each)
            operands += [_element(some, j) for j in range(each)]
        for s in scales:
            lanes = ir.MemRefType(s.type).shape[1]  # several of them share four bytes
            own = arith.divui(lane, utils.c(WORDS // lanes, i32))
            at = _pointer(s, i32, (warp, lanes // 4), (own, 1))
            operands.append(llvm.load(i32, at, alignment=4))
        registers = _asm(asm, constraints, [i32] * 8, *operands)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        pairs = np.array([utils.bitcast(r, pair) for r in registers], dtype=object)
        return mgpu.FragmentedArray(
            _registers=pairs.reshape(mgpu.WGMMA_LAYOUT.registers_shape((64, HALF))),
            _layout=mgpu.WGMMA_LAYOUT,
            _is_signed=None,
        )

    return load(words, *scales)


def store_activations(act: jax.Array, out, start: jax.Array, count: jax.Array, block: jax.Array):
    """Stores the activations of `count` tokens as bfloat16, in the order in which w2 needs them.

    Channel 16w + 8h + g of 64 goes where `pack.column_order` puts it: with its neighbour, in one
    word, for which lanes of g and g ^ 1 exchange a token.

    Args:
      act: float32 [64, N].
      out: [S, I] in device memory.
      start, count: rows of `out`.
      block: of 64 channels.
    """
    width = out.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), *_SCALARS))
    def store(_, act, out, *scalars):
        start, count, block = (s.registers.item() for s in scalars)
        warp, lane = _warp_and_lane()
        pair, odd = _split(_split(lane, 4)[0], 2)
        token = _sum((_split(lane, 4)[1], 2), (odd, 1))
        row = arith.addi(start, token)
        at = _pointer(out, ir.BF16Type.get(), (row, width), (block, 64), (pair, 8), (warp, 2))
        for i, halves in enumerate(act.registers.reshape(-1, 2)):
            words = [
                _asm(_EXCHANGE, "=r,f,f,r", [_i32()], *(_element(p, j) for j in range(2)), odd)[0]
                for p in halves
            ]
            left = arith.subi(count, utils.c(8 * i, _i32()))
            text = _STORE_WORDS.format(offset=16 * i * width)
            _asm(text, "l,r,r,r,r", [], at, token, left, *words)

    store(act, out, start, count, block)


def store_rows(sums: list[jax.Array], out, order, start, count, block):
    """Stores rows of w2's product as columns of each token's slot.

    Args:
      sums: float32 [64, N] of the first and of the second fragments, 32 rows a warp together.
      out: [slots, D] in device memory.
      order: the slot of each row.
      start, count: in `order`.
      block: of 128 rows.
    """
    width = out.shape[1]

    @plgpu.inline_mgpu(arg_types=(*(plgpu.Layout.WGMMA,) * 2, *(plgpu.RefType(),) * 2, *_SCALARS))
    def store(_, first, second, out, order, *scalars):
        start, count, block = (s.registers.item() for s in scalars)
        warp, lane = _warp_and_lane()
        g, t = _split(lane, 4)
        row = _sum((block, 128), (warp, 32))
        inside = arith.cmpi(arith.CmpIPredicate.slt, row, utils.c(width, _i32()))
        count = arith.select(inside, count, utils.c(0, _i32()))
        token = _sum((t, 2))
        at = _pointer(out, ir.F32Type.get(), (row, 1), (g, 1))
        slots = _pointer(order, _i32(), (start, 1), (token, 1))
        registers = np.concatenate([s.registers.reshape(-1, 2) for s in (first, second)], axis=1)
        for i, four in enumerate(registers):
            for j in range(2):
                left = arith.subi(count, utils.c(8 * i + j, _i32()))
                text = _STORE_ROWS.format(offset=4 * (8 * i + j), stride=4 * width)
                _asm(text, "l,l,r,r,f,f,f,f", [], at, slots, token, left,
                     *(_element(pair, j) for pair in four))  # fmt: skip

    store(*sums, out, order, start, count, block)


_SCALARS = (plgpu.Layout.WG_SPLAT(()),) * 3

# The tokens of an even g's word come first: it keeps its own and takes the other's first one.
_EXCHANGE = """{
.reg .pred odd; .reg .b32 own, other, selector;
cvt.rn.bf16x2.f32 own, $2, $1;
shfl.sync.bfly.b32 other, own, 4, 31, 0xffffffff;
setp.ne.u32 odd, $3, 0;
selp.b32 selector, 0x3276, 0x5410, odd;
prmt.b32 $0, own, other, selector;
}"""
_STORE_WORDS = """{{
.reg .pred p;
setp.lt.s32 p, $1, $2;
@p st.global.b32 [$0 + {offset}], $3;
@p st.global.b32 [$0 + {offset} + 64], $4;
}}"""
# Registers are written without a condition too, or they would live from one item to the next.
_STORE_ROWS = """{{
.reg .pred p; .reg .b32 slot; .reg .b64 at;
setp.lt.s32 p, $2, $3;
mov.b32 slot, 0;
@p ld.global.nc.b32 slot, [$1 + {offset}];
mad.wide.s32 at, slot, {stride}, $0;
@p st.global.f32 [at], $4;
@p st.global.f32 [at + 32], $5;
@p st.global.f32 [at + 64], $6;
@p st.global.f32 [at + 96], $7;
}}"""


def _i32():
    return ir.IntegerType.get_signless(32)


def _warp_and_lane():
    warp, lane = _split(utils.thread_idx(), 32)
    return _split(warp, 4)[1], lane


def _split(value, by):
    """Quotient and remainder."""
    divisor = utils.c(by, _i32())
    return arith.divui(value, divisor), arith.remui(value, divisor)


def _sum(*terms):
    """Adds up value x factor; a value is a register or a number."""
    terms = (
        arith.muli(utils.c(v, _i32()) if isinstance(v, int) else v, utils.c(factor, _i32()))
        for v, factor in terms
    )
    return functools.reduce(arith.addi, terms)


def _pointer(ref, kind, *terms):
    """The address of the element of type `kind` at the sum of the terms."""
    return utils.getelementptr(utils.memref_ptr(ref), [_sum(*terms)], kind)


def _element(vector, i):
    return llvm.extractelement(vector, utils.c(i, _i32()))


def _asm(text, constraints, results, *operands):
    """Inlines PTX; without results it has effects."""
    kind = ir.Type.parse("!llvm.void")
    if results:
        kind = results[0] if len(results) == 1 else llvm.StructType.get_literal(results)
    out = llvm.inline_asm(
        kind, operands, text, constraints, asm_dialect=0, has_side_effects=not results
    )
    if len(results) <= 1:
        return [out] * len(results)
    return [llvm.extractvalue(kind, out, [i]) for i, kind in enumerate(results)]
