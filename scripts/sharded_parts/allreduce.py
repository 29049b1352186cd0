"""allreduce_conv_mix between GPUs: checked against psum and plain conv_mix, timed against NCCL."""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.allreduce_conv_mix import allreduce_conv_mix
from pallas_kernels.allreduce_conv_mix.reference import allreduce_conv_mix as plain
from pallas_kernels.conv_mix import conv_mix
from pallas_kernels.conv_mix.shapes import HIDDEN
from scripts.bench_kernels import time_case
from scripts.kernel_cases.conv_mix import OPTIONS, inputs
from scripts.sharded_parts.programs import row, side_by_side

ROWS = ((1, 1), (1, 4), (1, 8), (8, 8))  # sequences, tokens of each
IN_A_ROW = 4  # calls of a repetition with nothing but skew between them
MAX_SPIN = 4096  # rounds, some 15 us
CALLS = 8  # of a trip, when timed
SECONDS = 0.02  # of a measurement
TOLERANCE = 5e-3  # of bfloat16 results: norm of the error over the norm of what is expected
AXES = ("tp",)


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """All devices on one axis."""
    return Mesh(np.array(devices), AXES)


def on_all(fn: Callable, mesh: Mesh) -> Any:
    """`fn` on every device of the mesh, from and to what is the same on all."""
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def spin(rounds: jax.Array, after: jax.Array) -> jax.Array:
    """Returns zero after so many rounds of a loop on one multiprocessor, once `after` is known."""

    def body(rounds_ref, zero_ref, o_ref):
        o_ref[...] = lax.fori_loop(0, rounds_ref[0], lambda i, x: 0.5 * x + x, zero_ref[...])

    call = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((1,), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=1),
        interpret=jax.default_backend() == "cpu",  # where the rest of the check can be tried
        name="spin",
    )
    return call(rounds[None], 0 * after[None])[0]


def problems(small: bool) -> dict[int, tuple[dict, tuple[dict]]]:
    """Returns arguments of conv_mix by their number of rows."""
    rows, hidden = (((1, 2),), 256) if small else (ROWS, HIDDEN)
    return {b * t: inputs(b, t, 1, jax.random.key(t), hidden=hidden) for b, t in rows}


def check(devices: Sequence[Any], options: argparse.Namespace) -> Iterator[dict | None]:
    """Yields a row for each number of tokens: wrong results, the largest error, the time."""
    # Where there is no GPU the plain version stands in: the interpreter cannot run the kernel.
    fused = plain if options.small else allreduce_conv_mix
    repetitions = 8 if options.small else options.repetitions
    yield from check_rows(mesh_of(devices), problems(options.small), repetitions, fused)


def check_rows(mesh: Mesh, given: dict, repetitions: int, fused: Callable) -> Iterator[dict | None]:
    """`check` of any such function, on `problems`."""
    run = on_all(functools.partial(_repeat, fused, repetitions // IN_A_ROW), mesh)
    programs = side_by_side({
        rows: run.lower(carry["u"], carry["state"], shared).compile
        for rows, (carry, (shared,)) in given.items()
    })  # fmt: skip
    yield None

    def measure(rows):
        carry, (shared,) = given[rows]
        program = programs[rows].result()
        begin = time.perf_counter()
        worst, wrong, differing = map(float, program(carry["u"], carry["state"], shared))
        return {
            "calls": repetitions // IN_A_ROW * IN_A_ROW, "relative_error": worst,
            "wrong": int(wrong), "differ_between_devices": int(differing),
            "correct": not wrong and not differing, "seconds": time.perf_counter() - begin,
        }  # fmt: skip

    for rows in given:
        yield row({"rows": rows}, measure, rows)


def _repeat(fused, repetitions, base, state, shared):
    """(largest relative error, wrong calls, calls whose sum is not the same on all devices)."""
    fused, expect = _once(fused), _once(plain)

    def repetition(i, carry):
        state, expected_state, worst, wrong, differing = carry
        done = []
        last = worst
        for call in range(IN_A_ROW):
            u = _summand(base, i * IN_A_ROW + call, last)
            *out, state = fused(u, state=state, **shared)
            done.append((u, out))
            last = out[1][0, 0, 0]
        for u, out in done:
            *expected, expected_state = expect(u, state=expected_state, **shared)
            error = lax.pmax(_error(out, expected), AXES)
            worst = jnp.maximum(worst, error)
            wrong += jnp.where(error < TOLERANCE, 0, 1)  # NaN is wrong
            partial = out[1]
            same = jnp.all(lax.pmax(partial, AXES) == lax.pmin(partial, AXES))
            differing += jnp.where(same, 0, 1)
        return state, expected_state, worst, wrong, differing

    with jax.default_matmul_precision("highest"):
        carry = (state, state, jnp.float32(0), jnp.int32(0), jnp.int32(0))
        state, expected, worst, wrong, differing = lax.fori_loop(0, repetitions, repetition, carry)
    return jnp.maximum(worst, _error(state, expected)), wrong, differing


def _once(fn):
    """`fn` of arrays alone, traced and lowered once for all calls: a kernel takes seconds each."""
    return jax.jit(functools.partial(fn, axes=AXES, **OPTIONS))


def _summand(base, call, last):
    """A summand that differs by call and device, a random wait after `last` is known."""
    rank = lax.axis_index(AXES).astype(jnp.uint32)
    draw = (call.astype(jnp.uint32) * 2 + rank * 7 + 1) * jnp.uint32(2654435761)
    wait = spin((draw >> 16).astype(jnp.int32) % MAX_SPIN, last)
    return base * (1 + (draw >> 8) % 64).astype(jnp.float32) + wait


def _error(out, expected):
    """The largest norm of an error over the norm of what is expected."""

    def one(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.linalg.norm((x - y).ravel()) / jnp.maximum(jnp.linalg.norm(y.ravel()), 1e-6)

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(one, tuple(out), tuple(expected)))))


def variants() -> dict[str, Callable]:
    """What is timed; `alone` does not add up and shows what communication costs.

    The kernel comes last, so that what a hang leaves are the others' rows.
    """

    def nccl(u, axes, **given):
        return conv_mix(lax.psum(u, axes), **given)

    def alone(u, axes, **given):
        return conv_mix(u, **given)

    return {
        "NCCL psum, conv_mix": nccl,
        "NCCL psum, plain conv_mix": plain,
        "conv_mix alone": alone,
        "allreduce_conv_mix": allreduce_conv_mix,
    }


def latency(devices: Sequence[Any], options: argparse.Namespace) -> Iterator[dict | None]:
    """Yields a row for each variant and number of tokens, microseconds a call."""
    runs = {"psum, plain conv_mix": plain} if options.small else variants()
    seconds = 1e-4 if options.small else SECONDS
    yield from latency_rows(mesh_of(devices), problems(options.small), runs, seconds)


def latency_rows(
    mesh: Mesh, given: dict, runs: dict[str, Callable], seconds: float
) -> Iterator[dict | None]:
    """`latency` of any such functions; what they read is in the cache, as a layer leaves it."""
    trips = jax.ShapeDtypeStruct((), jnp.int32)
    loops = {name: on_all(functools.partial(_chain, run), mesh) for name, run in runs.items()}
    programs = side_by_side({
        (name, rows): loop.lower(trips, carry, *args).compile
        for name, loop in loops.items()
        for rows, (carry, args) in given.items()
    })  # fmt: skip
    yield None

    def measure(name, rows):
        times = time_case(programs[name, rows].result(), *given[rows], seconds)
        return {
            "us": statistics.median(times) / CALLS * 1e6,
            "spread_us": (max(times) - min(times)) / CALLS * 1e6,
        }

    for name, rows in programs:
        yield row({"variant": name, "rows": rows}, measure, name, rows)


def _chain(run, trips, carry, shared):
    """`trips` times CALLS calls, each of which sums up what the one before left."""
    run = _once(run)

    def trip(state):
        i, carry = state
        for _ in range(CALLS):
            _, u, _, ring = run(**carry, **shared)
            carry = {"u": u, "state": ring}
        return i + 1, carry

    return lax.while_loop(lambda state: state[0] < trips, trip, (jnp.int32(0), carry))[1]
