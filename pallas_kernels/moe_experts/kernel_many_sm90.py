"""Both projections for many tokens as Mosaic GPU kernels around wgmma (Hopper).

Rows of activations are sorted by expert. A tile of work is 256 rows of an expert's weights times
the tokens of one work item: weights are the M side, since the tokens of an expert are few, and go
from shared memory through `ptx.py` into the A registers of `wgmma`, whose lanes own what those of
the decode kernel's MMA do. One warpgroup copies, two multiply, each four tiles of the weights.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.moe_experts.pack import LOADS, WORDS, PackedExperts
from pallas_kernels.moe_experts.plan import Plan
from pallas_kernels.moe_experts.tiles import STEP_COLUMNS
from pallas_kernels.moe_experts.wgmma_lanes import (
    HALF,
    load_weights,
    store_activations,
    store_rows,
)

PROGRAMS = 132  # multiprocessors of an H200
GROUPS, COPIES = 2, 2  # warpgroups that multiply; the index of the one that copies
ALIGN = 8  # rows that a swizzled copy to shared memory keeps together
TILES = 4  # of the weights, a warpgroup: one a warp
STAGE_BYTES, MAX_STAGES = 220 * 1024, 12  # of shared memory for all stages; at most so many
WIDTHS = 64  # N of wgmma is a multiple of it, or the most tokens of an item
FULL = 128  # wider products leave registers for the weights of two of them, not of four


class Task(NamedTuple):
    """What a program does next: `block` of the expert's rows for `count` tokens from `start`."""

    expert: jax.Array
    start: jax.Array
    count: jax.Array
    block: jax.Array
    steps_before: jax.Array


def gate_up(
    x: jax.Array,
    plan: Plan,
    w13: PackedExperts,
    tokens: int,
    gate_softcap: float,
    up_softcap: float,
) -> jax.Array:
    """Sorted rows [S, D], columns ordered -> [S, I], its columns ordered and filled to whole steps.

    Rows outside the plan stay unwritten. An item has at most `tokens` tokens.
    """
    blocks = -(-w13.words.shape[1] // TILES)

    def finish(sums, task, outer, out):
        gate, up = (s[...] * outer[task.expert] for s in sums)
        act = gate_softcap * jnp.tanh(gate * (1 / gate_softcap))
        act *= 0.5 * jnp.tanh(0.5 * gate) + 0.5  # the sigmoid, in one instruction
        act *= up_softcap * jnp.tanh(up * (1 / up_softcap))

        @pl.when(task.block < blocks)
        def _():
            store_activations(act, out, task.start, task.count, task.block)

    out = jax.ShapeDtypeStruct((x.shape[0], STEP_COLUMNS * blocks), x.dtype)
    return _projection(x, plan, w13, tokens, finish, (w13.outer,), out)


def down(h: jax.Array, plan: Plan, w2: PackedExperts, tokens: int, slots: int) -> jax.Array:
    """[S, I] -> float32 [slots, D], to be multiplied by `w2.outer`; others stay unwritten."""

    def finish(sums, task, order, out):
        store_rows([s[...] for s in sums], out, order, task.start, task.count, task.block)

    out = jax.ShapeDtypeStruct((slots, w2.shape[1]), jnp.float32)
    return _projection(h, plan, w2, tokens, finish, (plan.order,), out)


def _projection(
    x: jax.Array,
    plan: Plan,
    w: PackedExperts,
    tokens: int,
    finish: Callable,
    extra: tuple[jax.Array, ...],
    out: jax.ShapeDtypeStruct,
) -> jax.Array:
    n, tiles, steps = w.words.shape[:3]
    arrays = [w.words.reshape(n * tiles, steps, 2 * LOADS[w.format], WORDS)]
    if w.scales is not None:
        arrays.append(w.scales.reshape(n * tiles, steps, -1))
    parts = [jax.ShapeDtypeStruct((GROUPS * TILES, *a.shape[2:]), a.dtype) for a in arrays]
    size = sum(p.size * p.dtype.itemsize for p in parts) + 2 * tokens * STEP_COLUMNS
    stages = min(STAGE_BYTES // size, MAX_STAGES)
    blocks = -(-tiles // (GROUPS * TILES))
    widths = [*range(WIDTHS, tokens, WIDTHS), tokens]
    busy = jnp.sum(plan.count > 0, dtype=jnp.int32)[None]

    def body(expert, start, count, busy, x, *refs, x_stage, w_stages, full, empty):
        arrays, (*extra, out) = refs[: len(parts)], refs[len(parts) :]
        group = lax.axis_index("group")

        def each_task(work):
            @plgpu.nd_loop((busy[0] * blocks,), collective_axes="program")
            def _(loop):
                [place] = loop.index
                item, block = lax.div(place, blocks), lax.rem(place, blocks)
                task = Task(expert[item], start[item], count[item], block, loop.local_index * steps)
                for fewer, width in itertools.pairwise((0, *widths)):
                    fits = (task.count > fewer) & (task.count <= width)
                    pl.when(fits)(functools.partial(work, width, task))

        def copy(width, task):
            rows = pl.ds(task.start, width)
            weights = pl.ds(task.expert * tiles + task.block * GROUPS * TILES, GROUPS * TILES)

            @pl.loop(0, steps)
            def _(step):
                stage = lax.rem(task.steps_before + step, stages)

                @pl.when(task.steps_before + step >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[stage])

                columns = pl.ds(step * STEP_COLUMNS, STEP_COLUMNS)
                target = x_stage.at[stage, pl.ds(0, width)]
                plgpu.copy_gmem_to_smem(x.at[rows, columns], target, full.at[stage])
                for array, target in zip(arrays, w_stages, strict=True):
                    source = array.at[weights, step]
                    plgpu.copy_gmem_to_smem(source, target.at[stage], full.at[stage])

        def multiply(width, task):
            def product(*sums):
                @pl.loop(0, steps)
                def _(step):
                    stage = lax.rem(task.steps_before + step, stages)
                    plgpu.barrier_wait(full.at[stage])
                    own = [a.at[stage, pl.ds(TILES * group, TILES)] for a in w_stages]
                    for half in range(2):
                        b = x_stage.at[stage, pl.ds(0, width), pl.ds(HALF * half, HALF)]
                        for fragment, acc in enumerate(sums):
                            a = load_weights(w.format, fragment, half, *own)
                            plgpu.wgmma(acc, a, b.transpose((1, 0)))
                            if width > FULL:  # frees the registers of the product before this one
                                plgpu.wgmma_wait(1)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[stage])

                mine = task._replace(block=GROUPS * task.block + group)
                finish(sums, mine, *extra, out)

            acc = plgpu.ACC((64, width), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
            pl.run_scoped(product, acc, acc)

        @pl.when(group == COPIES)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            each_task(copy)

        @pl.when(group < GROUPS)
        def _():
            plgpu.set_max_registers(240, action="increase")
            each_task(multiply)

    tiling = (
        plgpu.TilingTransform((8, HALF)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(2 * HALF),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=GROUPS + 1,
        thread_name="group",
        scratch_types={
            "x_stage": plgpu.SMEM((stages, tokens, STEP_COLUMNS), x.dtype, transforms=tiling),
            "w_stages": tuple(plgpu.SMEM((stages, *p.shape), p.dtype) for p in parts),
            "full": plgpu.Barrier(num_arrivals=1 + len(parts), num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name=f"moe_experts_many_{w.format}",
    )(*plan[:3], busy, x, *arrays, *extra)
