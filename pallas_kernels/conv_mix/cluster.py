"""Inner products over the programs of a cluster, exchanged through each other's shared memory."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector
from jaxlib.mlir.dialects import math as math_dialect

WARPS, LANES = 4, 32  # of a program, of a warp
PACK = 4  # numbers sent at once
PATIENCE = 10_000_000  # nanoseconds that a wait sleeps at most before it looks again


class Exchange(NamedTuple):
    """Shared memory of one call of `dots`.

    Attributes:
      shares: float32 [programs of the cluster, terms], what each of them has sent.
      own: float32 [WARPS, terms] of the program's warps.
      barrier: counts the bytes that arrive in `shares`.
    """

    shares: Any
    own: Any
    barrier: Any


def exchange(terms: int, programs: int) -> Exchange:
    """Returns what a call of `dots` with so many terms needs as scratch."""
    terms = -(-terms // PACK) * PACK
    shares, own = (plgpu.SMEM((n, terms), jnp.float32) for n in (programs, WARPS))
    return Exchange(shares, own, plgpu.SMEM((2,), jnp.int32))


def prepare(exchanges: Sequence[Exchange]) -> None:
    """Lets the barriers expect what all programs will send; `meet` before anything is sent."""

    def run(_, exchanges):
        first = mgpu.single_thread_predicate()
        for shares, _, barrier in exchanges:
            size = 4 * math.prod(ir.MemRefType(shares.type).shape)
            barrier = utils.memref_ptr(barrier)
            nvvm.mbarrier_init(barrier, _int(1), predicate=first)
            nvvm.mbarrier_arrive_expect_tx(barrier, _int(size), predicate=first)
        arrive = "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned;"
        utils.inline_ptx(arrive, has_side_effects=True, convergent=True)

    _inline(run, [_references(exchange) for exchange in exchanges])(list(exchanges))


def meet() -> None:
    """Waits until every program of the cluster is prepared."""

    def run(_):
        utils.inline_ptx("barrier.cluster.wait.aligned;", has_side_effects=True, convergent=True)

    _inline(run)()


def dots(
    pairs: Sequence[tuple[jax.Array, jax.Array]], exchange: Exchange, layout: Any
) -> list[jax.Array]:
    """Returns the inner product of each pair over a cluster, the same bits in every program.

    A program adds up its warps' shares and sends the result to every program, where it is counted
    as it arrives; then each adds up what it was sent. Memory is written once, so that no program
    has to wait until the others have read.

    Args:
      pairs: of float32 vectors, the program's slices.
      exchange: of so many terms, for this call alone.
      layout: of the vectors.
    """

    def run(_, exchange, pairs):
        shares, own, barrier = exchange
        programs, columns = ir.MemRefType(shares.type).shape
        warp = arith.divui(utils.thread_idx(), _int(LANES))
        lane = arith.remui(utils.thread_idx(), _int(LANES))
        terms = [range(i, min(i + LANES, len(pairs))) for i in range(0, len(pairs), LANES)]
        for some in terms:
            share = _spread([_dot(*pairs[i]) for i in some], lane)
            with utils.when(_less(lane, len(some))):
                llvm.store(share, _at(own, warp, arith.addi(lane, _int(some.start))))
        utils.warpgroup_barrier()
        pack, first = ir.VectorType.get((PACK,), ir.F32Type.get()), arith.muli(lane, _int(PACK))
        own = _tree([llvm.load(pack, _at(own, _int(i), first)) for i in range(WARPS)])
        there = _at(shares, nvvm.read_ptx_sreg_cluster_ctarank(), first)
        for some in range(0, programs, WARPS):
            program = arith.addi(warp, _int(some))
            sends = arith.andi(_less(program, programs), _less(lane, columns // PACK))
            with utils.when(sends):
                _send(own, there, utils.memref_ptr(barrier), program)
        nvvm.mbarrier_try_wait_parity(utils.memref_ptr(barrier), _int(0), _int(PATIENCE))
        sums = []
        for some in terms:
            column = arith.minui(arith.addi(lane, _int(some.start)), _int(some.stop - 1))
            pointers = (_at(shares, _int(program), column) for program in range(programs))
            total = _tree([llvm.load(ir.F32Type.get(), pointer) for pointer in pointers])
            sums += [_of_lane(total, i) for i in range(len(some))]
        return [mgpu.FragmentedArray.splat(total, ()) for total in sums]

    scalar = plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT(()))
    types = _references(exchange), [(layout, layout)] * len(pairs)
    return _inline(run, *types, returns=[scalar] * len(pairs))(exchange, list(pairs))


def _inline(run, *types, returns=None) -> Any:
    return plgpu.inline_mgpu(arg_types=types, return_type=returns)(run)


def _references(exchange):
    return exchange._make(plgpu.RefType() for _ in exchange)


def _int(value):
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _less(value, bound):
    return arith.cmpi(arith.CmpIPredicate.ult, value, _int(bound))


def _at(matrix, row, column):
    """A pointer to an element."""
    columns = ir.MemRefType(matrix.type).shape[1]
    index = arith.addi(arith.muli(row, _int(columns)), column)
    return utils.getelementptr(utils.memref_ptr(matrix), [index], ir.F32Type.get())


def _send(values, pointer, barrier, program):
    """Stores four numbers in the shared memory of a program, whose barrier counts them."""
    there = (utils.get_cluster_ptr(p, program, generic=False) for p in (pointer, barrier))
    store = (
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$4], {$0, $1, $2, $3}, [$5];"
    )
    utils.inline_ptx(store, *_elements(values), *there, has_side_effects=True)


def _elements(values):
    return [vector.extract(values, [], [i]) for i in range(ir.VectorType(values.type).shape[0])]


def _tree(values):
    """Adds up in pairs, so that additions do not wait for each other."""
    while len(values) > 1:
        values = [functools.reduce(arith.addf, pair) for pair in itertools.batched(values, 2)]
    return values[0]


def _dot(x, y):
    """The inner product of a thread's elements."""
    first, *others = zip(x.registers.flat, y.registers.flat, strict=True)
    total = arith.mulf(*first)
    for pair in others:
        total = math_dialect.fma(*pair, total)
    return _tree(_elements(total))


def _spread(values, lane):
    """Sums of up to 32 values over a warp, value i in lane i.

    Halves of the warp exchange halves of the values: 31 shuffles instead of 5 a value.
    """
    for distance in (16, 8, 4, 2, 1):
        upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, _int(distance)), _int(0))
        pairs = itertools.zip_longest(values[:distance], values[distance:])
        values = [_halves(upper, x, x if y is None else y, distance) for x, y in pairs]
    return values[0]


def _halves(upper, x, y, distance):
    """Sums with the lane so far away, of x in the lower half of the lanes, of y in the upper."""
    kept, given = arith.select(upper, y, x), arith.select(upper, x, y)
    return arith.addf(kept, utils.shfl_bfly(given, distance))


def _of_lane(value, lane):
    return nvvm.shfl_sync(_int(-1), value, _int(lane), _int(LANES - 1), nvvm.ShflKind.idx)
