"""Checks the decode kernels on a GPU against float32, then times them against floor and plain JAX.

Inputs are random and new in every run; a result is computed over memory filled with NaN. Every
time is the difference of two trip counts of a jitted `while_loop`, so that launches cost what they
cost in the product's decode loop. Weights and caches rotate through 250 MB (4 x L2), in 16 copies
at most.

The product's kernels come first, then what they are compared with: other tiles, plain JAX, peers.
The result is written after every row, and the script ends within seconds of `--minutes`, whatever
still compiles then. A case that fails or does not compile in time is marked and the next one runs.

    PYTHONPATH=. python3 scripts/bench_kernels.py [--only moe,attention] [--minutes 9]
"""

import argparse
import contextlib
import importlib.metadata
import itertools
import os
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scripts import kernel_cases
from scripts.kernel_cases import Case
from scripts.time_limit import leave, limited, write_json

PATIENCE = 90  # seconds that a group of cases waits for its slowest program


class Programs(NamedTuple):
    """What is compiled for a case; None for what is not compared or not run by XLA."""

    setup: Future
    loop: Future | None
    result: Future | None
    error: Future | None


def compile_group(cases: list[Case], deadline: float) -> list[Programs]:
    """Compiles all programs of the cases side by side, for at most half the time that is left.

    Nothing is timed meanwhile: tracing holds the interpreter, and XLA tries variants on the device.
    """
    begin = time.monotonic()
    pool = ThreadPoolExecutor(os.cpu_count())
    setups = {case.setup: pool.submit(compile_setup, case) for case in cases}
    found = [
        Programs(
            setups[case.setup],
            None if case.outside else pool.submit(compile_loop, case),
            None if case.outside or not case.result else pool.submit(compile_result, case),
            pool.submit(compile_error, case) if case.expected else None,
        )
        for case in cases
    ]
    wait(
        [future for programs in found for future in programs if future],
        timeout=min(PATIENCE, max(deadline - begin, 0) / 2),
    )
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"# {cases[0].op}: compiled for {time.monotonic() - begin:.1f} s", flush=True)
    return found


def compile_setup(case: Case) -> Any:
    """key -> (carry, args)."""
    return jax.jit(case.setup).lower(jax.random.key(0)).compile()


def compile_loop(case: Case) -> Any:
    """(trips, carry, *args) -> carry, with `case.calls` steps in the body of the loop."""

    def loop(trips, carry, *args):
        def body(state):
            trip, carry = state
            for call in range(case.calls):
                # New to XLA in each call: what all calls share it would make once.
                carry, new = lax.optimization_barrier((carry, args))
                carry = case.step(call, carry, *new)
            return trip + 1, carry

        return lax.while_loop(lambda state: state[0] < trips, body, (jnp.int32(0), carry))[1]

    return jax.jit(loop).lower(jnp.int32(0), *_inputs(case)).compile()


def compile_result(case: Case) -> Any:
    """(carry, *args) -> what is compared."""
    assert case.result
    return jax.jit(case.result).lower(*_inputs(case)).compile()


def compile_error(case: Case) -> Any:
    """(result, carry, *args) -> the largest norm of an error over the norm of what is expected."""
    assert case.result and case.expected

    def error(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel())

    def largest(result, *inputs):
        errors = jax.tree.leaves(jax.tree.map(error, result, case.expected(*inputs)))
        return jnp.stack(errors).max()  # NaN where one of them is

    inputs = _inputs(case)
    with jax.default_matmul_precision("highest"):
        return jax.jit(largest).lower(jax.eval_shape(case.result, *inputs), *inputs).compile()


def _inputs(case: Case) -> tuple:
    """The shapes of (carry, *args)."""
    carry, args = jax.eval_shape(case.setup, jax.random.key(0))
    return carry, *args


def poison(result: Any) -> None:
    """Fills with NaN the memory that the allocator will give to the program's next outputs."""
    memory = result.memory_analysis()
    sizes = [a.size * a.dtype.itemsize for a in jax.tree.leaves(result.out_info)]
    sizes.append(memory.temp_size_in_bytes)
    blocks = [np.full(-(-size // 4), np.nan, np.float32) for size in sizes]
    jax.block_until_ready([jax.device_put(block) for block in blocks * 2])


def time_case(loop: Any, carry: Any, args: tuple, target: float) -> list[float]:
    """Seconds per trip, five times; `target` seconds per measurement."""

    def elapsed(trips):
        begin = time.perf_counter()
        jax.block_until_ready(loop(jnp.int32(trips), carry, *args))
        return time.perf_counter() - begin

    few, more = 2, 8
    elapsed(few)
    one = max((min(elapsed(more) for _ in range(2)) - elapsed(few)) / (more - few), 5e-7)
    more = few + min(max(int(target / one), 4), 20000)
    elapsed(more)  # clocks up
    return [(elapsed(more) - elapsed(few)) / (more - few) for _ in range(5)]


def bench(cases: Iterable[Case], key: jax.Array, target: float, deadline: float) -> Iterator[dict]:
    """Yields a row per case; neighbours of an op are compiled side by side, then run in turn."""
    ceilings: dict[str, float] = {}
    setup, inputs = None, None
    for _, group in itertools.groupby(cases, key=lambda case: (case.op, case.compared)):
        group = list(group)
        for case, programs in zip(group, compile_group(group, deadline), strict=True):
            row = {"op": case.op, "variant": case.variant, "shape": case.shape}
            try:
                if time.monotonic() > deadline:
                    raise TimeoutError
                if setup is not case.setup:
                    setup = inputs = None  # frees the last inputs first
                    inputs = jax.block_until_ready(programs.setup.result(timeout=0)(key))
                    setup = case.setup
                row |= measure(case, programs, *inputs, target)
                ceiling = "product" if case.flops else case.ceiling
                rate = row["flops" if case.flops else "bytes"] / row["us"]
                if case.op == "limit":
                    ceilings[case.variant] = rate
                if ceiling in ceilings:
                    row["share_of_ceiling"] = rate / ceilings[ceiling]
            except (TimeoutError, CancelledError):
                row["skipped"] = "the time was up"
            except ImportError as error:
                row["skipped"] = f"not installed: {error}"
            except Exception as error:  # one that fails must not hide the others
                row["error"] = f"{type(error).__name__}: {error}"[:600]
            print(f"{case.op:12} {case.variant:18} {case.shape:34}", describe(row), flush=True)
            yield row


def measure(case: Case, programs: Programs, carry: Any, args: tuple, target: float) -> dict:
    """Checks and times one case; TimeoutError where a program is not compiled yet."""
    _, loop, result, error = (future and future.result(timeout=0) for future in programs)
    row = {}
    if case.outside:
        out, times = case.outside(carry, *args)
    else:
        if result:
            poison(result)
        out = result and result(carry, *args)
        times = [t / case.calls for t in time_case(loop, carry, args, target)]
    if error:
        relative = float(error(out, carry, *args))
        row = {"relative_error": relative, "correct": relative <= case.tolerance}
    return row | {
        "us": statistics.median(times) * 1e6,
        "spread_us": (max(times) - min(times)) * 1e6,
        "bytes": case.bytes,
        "flops": case.flops,
    }


def versions() -> Iterator[tuple[str, str]]:
    """Yields name and version of what computes, where it is installed."""
    for name in ("jax", "jaxlib", "jax-triton", "tokamax", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def describe(row: dict) -> str:
    """The figures of a row."""
    if "us" not in row:
        return f"FAILED {row['error']}" if "error" in row else row["skipped"]
    verdict = "not compared"
    if "correct" in row:
        verdict = f"{'' if row['correct'] else 'WRONG, '}error {row['relative_error']:.1e}"
    work = f"{row['bytes'] / 1e6:9.1f} MB"
    if row["flops"]:
        work = f"{row['flops'] / row['us'] / 1e6:5.1f} TFLOP/s"
    return (
        f"{row['us']:9.2f} us ± {row['spread_us'] / 2:6.2f} {work} "
        f"{100 * row.get('share_of_ceiling', jnp.nan):6.1f} % of the ceiling, {verdict}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 where a case failed or was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="comma-separated beginnings of op names")
    parser.add_argument("--minutes", type=float, default=9, help="ends soon after these")
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--out", type=Path, default=Path("scripts/results/kernels_h200.json"))
    parser.add_argument("--target", type=float, default=0.02, help="seconds per measurement")
    options = parser.parse_args(arguments)
    git = ["git", "rev-parse", "HEAD"]
    seed = int.from_bytes(os.urandom(4))
    wanted = ("limit", *options.only.split(","))
    cases = [case for case in kernel_cases.cases() if case.op.startswith(wanted)]
    rows = []
    with limited(options.minutes) as deadline:
        result = {
            "device": jax.devices()[0].device_kind,
            "versions": dict(versions()),
            "commit": options.commit or subprocess.check_output(git, text=True).strip(),
            "seed": seed,
        }
        for row in bench(cases, jax.random.key(seed), options.target, deadline):
            rows.append(row)
            write_json(options.out, result | {"rows": rows})
    failed = [row for row in rows if "error" in row or not row.get("correct", True)]
    print(f"# {len(rows)} cases, {len(failed)} failed or wrong, in {options.out}")
    return bool(failed)


if __name__ == "__main__":
    leave(main())
