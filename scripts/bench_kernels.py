"""Times the decode kernels on a GPU against their floor and the plain-JAX path.

Every figure is the difference of two trip counts of a jitted `while_loop`, so launches cost what
they cost in the product's decode loop. Weights and caches rotate through at least 4 x L2.

    python scripts/bench_kernels.py [--only moe,attention] [--commit HASH] [--out FILE.json]
"""

import argparse
import concurrent.futures
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

sys.path.insert(0, str(Path(__file__).parents[1]))
import kernel_cases


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
      op, variant, shape: what is timed.
      step: (trip, carry, *args) -> carry, with `calls` calls of the op inside.
      setup: () -> (carry, args) on the device; cases with the same `setup` object share its result.
      bytes: read by one call, each weight and key once.
    """

    op: str
    variant: str
    shape: str
    step: Callable
    setup: Callable
    bytes: float
    calls: int = 1


def read_ceiling() -> Case:
    """Sums 4 GB; the factor makes each trip depend on the one before."""
    size = 1 << 30

    def step(i, carry, x):
        return jnp.sum(x * (1 + 0 * carry))

    return Case(
        "read", "xla sum", "4 GB", step,
        lambda: (jnp.float32(0), (jnp.ones(size, jnp.float32),)), 4 * size,
    )  # fmt: skip


def trivial() -> Case:
    """What a launch costs in the loop at least."""

    def step(i, carry):
        for _ in range(2 * kernel_cases.CALLS):
            carry = kernel_cases.trivial_kernel(carry)
        return carry

    return Case(
        "launch", "pallas", "128", step, lambda: (jnp.zeros(128, jnp.float32), ()), 1024,
        2 * kernel_cases.CALLS,
    )  # fmt: skip


def loop(step: Callable) -> Callable:
    """Returns the jitted loop (trips, carry, *args) -> carry around `step`."""

    def run(trips, carry, *args):
        def body(state):
            return state[0] + 1, step(state[0], state[1], *args)

        return lax.while_loop(lambda state: state[0] < trips, body, (jnp.int32(0), carry))[1]

    return jax.jit(run)


def time_case(run: Callable, carry: Any, args: tuple, target: float) -> list[float]:
    """Seconds per trip, five times; `target` seconds per measurement."""

    def elapsed(trips):
        begin = time.perf_counter()
        jax.block_until_ready(run(jnp.int32(trips), carry, *args))
        return time.perf_counter() - begin

    elapsed(2)
    few, more = 4, 24
    one = max((min(elapsed(more) for _ in range(2)) - elapsed(few)) / (more - few), 5e-7)
    more = few + min(max(int(target / one), 20), 20000)
    elapsed(more)  # clocks up
    return [(elapsed(more) - elapsed(few)) / (more - few) for _ in range(5)]


def bench(cases: list[Case], target: float) -> list[dict]:
    """Compiles all cases side by side, then runs one after the other."""
    rows, ceiling, held = [], None, (None, None)

    def compiled(case):
        carry, args = jax.eval_shape(case.setup)
        trips = jax.ShapeDtypeStruct((), jnp.int32)
        begin = time.perf_counter()
        try:
            program = loop(case.step).lower(trips, carry, *args).compile()
        except Exception as error:  # one kernel that fails to build must not hide the others
            return error
        print(f"# {case.op} {case.variant} {case.shape}: {time.perf_counter() - begin:.1f} s")
        return program

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        programs = list(pool.map(compiled, cases))
    for case, program in zip(cases, programs, strict=True):
        row = {"op": case.op, "variant": case.variant, "shape": case.shape}
        try:
            if isinstance(program, Exception):
                raise program
            if held[0] is not case.setup:
                held = (None, None)  # frees the last inputs first
                held = (case.setup, jax.block_until_ready(case.setup()))
            times = [t / case.calls for t in time_case(program, *held[1], target)]
        except Exception as error:
            rows.append(row | {"error": f"{type(error).__name__}: {error}"[:600]})
            print(f"{case.op:10} {case.variant:28} {case.shape:24} FAILED {str(error)[:300]}")
            continue
        median = statistics.median(times)
        rate = case.bytes / median
        ceiling = ceiling or rate  # the first case is the read ceiling
        row |= {
            "us": median * 1e6,
            "spread_us": (max(times) - min(times)) * 1e6,
            "bytes": case.bytes,
            "share_of_ceiling": rate / ceiling,
        }
        rows.append(row)
        print(
            f"{case.op:10} {case.variant:28} {case.shape:24} {row['us']:9.2f} us "
            f"± {row['spread_us'] / 2:6.2f} {case.bytes / 1e6:9.1f} MB {rate / 1e12:6.3f} TB/s "
            f"{100 * rate / ceiling:6.1f} %",
            flush=True,
        )
    return rows


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="comma-separated beginnings of op names")
    parser.add_argument("--commit", default="", help="where the checkout has no git")
    parser.add_argument("--out", type=Path, default=Path("scripts/results/kernels_h200.json"))
    parser.add_argument("--target", type=float, default=0.02, help="seconds per measurement")
    arguments = parser.parse_args()
    names = tuple(arguments.only.split(","))
    cases = [read_ceiling(), trivial()]
    cases += [Case(**c) for c in kernel_cases.cases() if c["op"].startswith(names)]
    commit = (
        arguments.commit
        or subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
    )
    result = {
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "jaxlib": jax.lib.__version__},
        "commit": commit,
        "rows": bench(cases, arguments.target),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
