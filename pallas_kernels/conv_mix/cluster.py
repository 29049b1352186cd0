"""Sums over the programs of a cluster, exchanged through each other's shared memory."""

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

WARPS, LANES = 4, 32  # of a program, of a warp
PATIENCE = 10_000_000  # nanoseconds that a wait sleeps at most before it looks again


class Exchange(NamedTuple):
    """Shared memory of one call of `sums`: rows [warps of the cluster, terms] and a barrier."""

    rows: Any
    barrier: Any


def exchange(terms: int, programs: int) -> Exchange:
    """Returns what a call of `sums` with so many terms needs as scratch."""
    rows = plgpu.SMEM((programs * WARPS, terms), jnp.float32)
    return Exchange(rows, plgpu.SMEM((2,), jnp.int32))


def prepare(exchanges: Sequence[Exchange]) -> None:
    """Lets the barriers expect what all programs will send; `meet` before anything is sent."""

    def run(_, exchanges):
        first = mgpu.single_thread_predicate()
        for rows, barrier in exchanges:
            barrier, size = utils.memref_ptr(barrier), 4 * math.prod(ir.MemRefType(rows.type).shape)
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


def sums(terms: Sequence[jax.Array], exchange: Exchange, layout: Any) -> list[jax.Array]:
    """Returns the sum of each term over a cluster, the same bits in every program.

    Each warp adds up its share of the terms and sends the results to every program, where they
    are counted as they arrive; then every warp adds up the rows of all warps. A row is written
    once, so that no program has to wait until the others have read.

    Args:
      terms: float32 vectors, the program's slices.
      exchange: of so many terms, for this call alone.
      layout: of the terms.
    """

    def run(_, exchange, terms):
        rows, barrier = exchange
        warps, barrier = ir.MemRefType(rows.type).shape[0], utils.memref_ptr(barrier)
        warp = arith.divui(utils.thread_idx(), _int(LANES))
        lane = arith.remui(utils.thread_idx(), _int(LANES))
        own = arith.addi(arith.muli(nvvm.read_ptx_sreg_cluster_ctarank(), _int(WARPS)), warp)
        groups = list(itertools.batched(map(_added, terms), LANES))
        for i, group in enumerate(groups):
            share = _spread(list(group), lane)
            with utils.when(arith.cmpi(arith.CmpIPredicate.ult, lane, _int(len(group)))):
                for program in range(warps // WARPS):
                    _send(share, _at(rows, own, i * LANES, lane), barrier, program)
        nvvm.mbarrier_try_wait_parity(barrier, _int(0), _int(PATIENCE))
        totals = []
        for i, group in enumerate(groups):
            column = arith.minui(lane, _int(len(group) - 1))
            shares = (_at(rows, _int(warp), i * LANES, column) for warp in range(warps))
            total = _tree([llvm.load(ir.F32Type.get(), share) for share in shares])
            totals += [_of_lane(total, lane) for lane in range(len(group))]
        return [mgpu.FragmentedArray.splat(total, ()) for total in totals]

    scalar = plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT(()))
    types = _references(exchange), [layout] * len(terms)
    return _inline(run, *types, returns=[scalar] * len(terms))(exchange, list(terms))


def _inline(run, *types, returns=None) -> Any:
    return plgpu.inline_mgpu(arg_types=types, return_type=returns)(run)


def _references(exchange):
    return exchange._make(plgpu.RefType() for _ in exchange)


def _int(value):
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _at(rows, row, start, lane):
    """A pointer to the lane's element of a row."""
    columns = ir.MemRefType(rows.type).shape[1]
    index = arith.addi(arith.muli(row, _int(columns)), arith.addi(lane, _int(start)))
    return utils.getelementptr(utils.memref_ptr(rows), [index], ir.F32Type.get())


def _send(value, *args):
    """Stores a float32 at a pointer of another program, whose barrier counts it."""
    *pointers, program = args
    there = (utils.get_cluster_ptr(p, _int(program), generic=False) for p in pointers)
    store = "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [$1], $0, [$2];"
    utils.inline_ptx(store, value, *there, has_side_effects=True)


def _tree(values):
    """Adds up in pairs, so that additions do not wait for each other."""
    while len(values) > 1:
        values = [functools.reduce(arith.addf, pair) for pair in itertools.batched(values, 2)]
    return values[0]


def _added(term):
    """The sum of a thread's elements."""
    elements = functools.reduce(arith.addf, term.registers.flat)
    size = ir.VectorType(elements.type).shape[0]
    return _tree([vector.extract(elements, [], [i]) for i in range(size)])


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
