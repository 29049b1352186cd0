"""Checks and times allreduce_conv_mix between GPUs, against NCCL and conv_mix in the same loop.

    python scripts/bench_sharded.py [--only check,latency] [--minutes 3.5] [--out FILE.json]

`check` runs it again and again with random skew between the devices, four calls in a row, and
compares each with psum and plain conv_mix. `latency` times a chain of calls in a jitted
`while_loop`, the difference of two trip counts. Parts run in processes of their own, which are
killed when they say nothing for a while: a kernel that hangs ends as a row that says so. Results
are written after every row. With fewer than two GPUs nothing runs, and the output says why.
"""

import argparse
import functools
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1]))
from pallas_kernels.allreduce_conv_mix import allreduce_conv_mix
from pallas_kernels.allreduce_conv_mix.reference import allreduce_conv_mix as plain
from pallas_kernels.conv_mix import conv_mix
from scripts.bench_kernels import time_case
from scripts.kernel_cases.conv_mix import OPTIONS, inputs

ROWS = ((1, 1), (1, 4), (1, 8), (8, 8))  # sequences, tokens of each
IN_A_ROW = 4  # calls of a repetition with nothing but skew between them
MAX_SPIN = 4096  # rounds, some 15 us
CALLS = 8  # of a trip, when timed
TOLERANCE = 5e-3  # of bfloat16 results: norm of the error over the norm of what is expected
AXES = ("tp",)
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}


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


def check(mesh: Mesh, repetitions: int, fused: Callable = allreduce_conv_mix) -> Iterator[dict]:
    """Yields a row for each number of tokens: wrong results, the largest error, the time."""
    for batch, tokens in ROWS:
        carry, (shared,) = inputs(batch, tokens, 1, jax.random.key(tokens))
        run = on_all(functools.partial(_repeat, fused, repetitions // IN_A_ROW), mesh)
        begin = time.perf_counter()
        worst, wrong, differing = map(float, run(carry["u"], carry["state"], shared))
        yield {
            "part": "check", "rows": batch * tokens, "calls": repetitions // IN_A_ROW * IN_A_ROW,
            "relative_error": worst, "wrong": int(wrong), "differ_between_devices": int(differing),
            "correct": not wrong and not differing, "seconds": time.perf_counter() - begin,
        }  # fmt: skip


def _repeat(fused, repetitions, base, state, shared):
    """(largest relative error, wrong calls, calls whose sum is not the same on all devices)."""

    def repetition(i, carry):
        state, expected_state, worst, wrong, differing = carry
        done = []
        last = worst
        for call in range(IN_A_ROW):
            u = _summand(base, i * IN_A_ROW + call, last)
            *out, state = fused(u, **shared, state=state, axes=AXES, **OPTIONS)
            done.append((u, out))
            last = out[1][0, 0, 0]
        for u, out in done:
            *expected, expected_state = plain(
                u, **shared, state=expected_state, axes=AXES, **OPTIONS
            )
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
    """What is timed; the last does not add up and shows what communication costs."""

    def nccl(u, axes, **given):
        return conv_mix(lax.psum(u, axes), **given)

    def alone(u, axes, **given):
        return conv_mix(u, **given)

    return {
        "allreduce_conv_mix": allreduce_conv_mix,
        "NCCL psum, conv_mix": nccl,
        "NCCL psum, plain conv_mix": plain,
        "conv_mix alone": alone,
    }


def latency(mesh: Mesh, runs: dict[str, Callable], target: float = 0.02) -> Iterator[dict]:
    """Yields a row for each number of tokens and variant, microseconds a call."""
    for batch, tokens in ROWS:
        carry, args = inputs(batch, tokens, 1, jax.random.key(0))
        for name, run in runs.items():
            loop = on_all(functools.partial(_chain, run), mesh)
            times = [t / CALLS for t in time_case(loop, carry, args, target)]
            yield {
                "part": "latency", "variant": name, "rows": batch * tokens,
                "us": statistics.median(times) * 1e6,
                "spread_us": (max(times) - min(times)) * 1e6,
            }  # fmt: skip


def _chain(run, trips, carry, shared):
    """`trips` times CALLS calls, each of which sums up what the one before left."""

    def trip(state):
        i, carry = state
        for _ in range(CALLS):
            _, u, _, ring = run(**carry, **shared, axes=AXES, **OPTIONS)
            carry = {"u": u, "state": ring}
        return i + 1, carry

    return lax.while_loop(lambda state: state[0] < trips, trip, (jnp.int32(0), carry))[1]


PARTS = {
    "check": lambda mesh, options: check(mesh, options.repetitions),
    "latency": lambda mesh, options: latency(mesh, variants()),
}


def work(options: argparse.Namespace) -> None:
    """Runs one part; every row is a line of JSON on the standard output."""
    devices = [d for d in jax.devices() if d.platform == "gpu"]
    if len(devices) < 2:
        print(json.dumps({"skipped": f"needs two GPUs in one process, {len(devices)} there"}))
        return
    mesh = Mesh(devices, AXES)
    versions = {"jax": jax.__version__, "jaxlib": jax.lib.__version__}
    head = {"device": devices[0].device_kind, "devices": len(devices), "versions": versions}
    print(json.dumps(head), flush=True)
    for row in PARTS[options.worker](mesh, options):
        print(json.dumps(row), flush=True)


def watch(command: Sequence[str], patience: float, deadline: float) -> Iterator[dict]:
    """Yields the JSON lines of a process; kills it when none comes for `patience` seconds.

    Args:
      deadline: of `time.monotonic`, when it is killed in any case.
    """
    lines: queue.Queue[str | None] = queue.Queue()

    def read(stream):
        for line in stream:
            lines.put(line)
        lines.put(None)

    environment = os.environ | WITHOUT_MULTICAST
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        reader = threading.Thread(target=read, args=(process.stdout,))
        reader.start()
        try:
            while (left := min(patience, deadline - time.monotonic())) > 0:
                line = lines.get(timeout=left)
                if line is None:
                    if process.wait():
                        yield {"error": f"the process ended with {process.returncode}"}
                    return
                if line.startswith("{"):
                    yield json.loads(line)
            yield {"skipped": "the time was up"}
        except queue.Empty:
            yield {"error": f"killed: no result for {left:.0f} s"}
        finally:
            process.kill()
            reader.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts; returns 1 where a result was wrong or missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="check,latency", help="parts, comma-separated")
    parser.add_argument("--minutes", type=float, default=3.5, help="everything ends after these")
    parser.add_argument("--patience", type=float, default=75, help="seconds without a result")
    parser.add_argument("--repetitions", type=int, default=10_000, help="calls of the check")
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--out", type=Path, default=Path("scripts/results/sharded_h200.json"))
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options)
        return 0
    deadline = time.monotonic() + 60 * options.minutes
    git = ["git", "rev-parse", "HEAD"]
    result: dict[str, Any] = {
        "commit": options.commit or subprocess.check_output(git, text=True).strip()
    }
    rows = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for part in options.only.split(","):
        repetitions = f"--repetitions={options.repetitions}"
        command = [sys.executable, __file__, f"--worker={part}", repetitions]
        for row in watch(command, options.patience, deadline):
            print(row, flush=True)
            if "device" in row:
                result |= row
            else:
                rows.append({"part": part} | row)
            options.out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
    return any("error" in row or not row.get("correct", True) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
