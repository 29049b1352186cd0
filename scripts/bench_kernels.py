"""Checks the decode kernels on a GPU against float32, then times them against floor and plain JAX.

Inputs are random and new in every run; a result is computed over memory filled with NaN. Every
time is the difference of two trip counts of a jitted `while_loop`, so that launches cost what they
cost in the product's decode loop. Weights and caches rotate through at least 4 x L2. The result is
written after every row; a case that fails is marked and the next one runs.

    python scripts/bench_kernels.py [--only moe,attention] [--minutes 9] [--out FILE.json]
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts import kernel_cases
from scripts.kernel_cases import Case


class Programs(NamedTuple):
    """A case compiled; `result` and `expected` are None where there is nothing to compare."""

    loop: Any
    result: Any
    expected: Any


def compile_case(case: Case) -> Programs:
    """Compiles the loop around `case.step`, and both sides of the comparison."""
    begin = time.perf_counter()
    inputs = jax.eval_shape(case.setup, jax.random.key(0))
    carry, args = inputs

    def loop(trips, carry, *args):
        def body(state):
            return state[0] + 1, case.step(state[0], state[1], *args)

        return lax.while_loop(lambda state: state[0] < trips, body, (jnp.int32(0), carry))[1]

    def compiled(fn: Callable | None, *args):
        return fn and jax.jit(fn).lower(*args).compile()

    trips = jax.ShapeDtypeStruct((), jnp.int32)
    programs = [compiled(loop, trips, carry, *args), compiled(case.result, carry, *args)]
    with jax.default_matmul_precision("highest"):
        programs.append(compiled(case.expected, carry, *args))
    print(f"# {name(case)}: compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    return Programs(*programs)


def relative_error(programs: Programs, carry: Any, args: tuple) -> float:
    """The largest norm of an error over the norm of what is expected; NaN where one is NaN."""
    expected = jax.block_until_ready(programs.expected(carry, *args))
    memory = programs.result.memory_analysis()
    sizes = [a.nbytes for a in jax.tree.leaves(expected)] + [memory.temp_size_in_bytes]
    # Freed again, these are where the allocator puts outputs and temporaries of the same sizes.
    poison = [jnp.full(-(-size // 4), jnp.nan, jnp.float32) for size in sizes * 2]
    jax.block_until_ready(poison)
    del poison
    out = programs.result(carry, *args)

    def error(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel())

    return float(np.max(jax.tree.leaves(jax.tree.map(error, out, expected))))


def time_case(loop: Any, carry: Any, args: tuple, target: float) -> list[float]:
    """Seconds per trip, five times; `target` seconds per measurement."""

    def elapsed(trips):
        begin = time.perf_counter()
        jax.block_until_ready(loop(jnp.int32(trips), carry, *args))
        return time.perf_counter() - begin

    elapsed(2)
    few, more = 4, 24
    one = max((min(elapsed(more) for _ in range(2)) - elapsed(few)) / (more - few), 5e-7)
    more = few + min(max(int(target / one), 20), 20000)
    elapsed(more)  # clocks up
    return [(elapsed(more) - elapsed(few)) / (more - few) for _ in range(5)]


def name(case: Case) -> str:
    """The words of its row."""
    return f"{case.op:12} {case.variant:18} {case.shape:34}"


def bench(cases: Iterable[Case], key: jax.Array, target: float, deadline: float) -> Iterator[dict]:
    """Yields a row per case; each op's cases are compiled side by side, then run one by one."""
    ceiling, setup, inputs = None, None, None
    for _, group in itertools.groupby(cases, key=lambda case: case.op):
        group = list(group)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            programs = [pool.submit(compile_case, case) for case in group]
            concurrent.futures.wait(programs, timeout=max(deadline - time.monotonic(), 0))
            for case, program in zip(group, programs, strict=True):
                row = {"op": case.op, "variant": case.variant, "shape": case.shape}
                try:
                    if program.cancel() or time.monotonic() > deadline:
                        row["skipped"] = "the time was up"
                    else:
                        if setup is not case.setup:
                            setup = inputs = None  # frees the last inputs first
                            inputs = jax.block_until_ready(case.setup(key))
                            setup = case.setup
                        row |= measure(case, program.result(), *inputs, target)
                        ceiling = ceiling or row["bytes"] / row["us"]  # of the first case
                        row["share_of_ceiling"] = row["bytes"] / row["us"] / ceiling
                except Exception as error:  # one that fails must not hide the others
                    row["error"] = f"{type(error).__name__}: {error}"[:600]
                print(name(case), describe(row), flush=True)
                yield row


def measure(case: Case, programs: Programs, carry: Any, args: tuple, target: float) -> dict:
    """Checks and times one case."""
    row = {}
    if programs.expected:
        error = relative_error(programs, carry, args)
        row = {"relative_error": error, "correct": error <= case.tolerance}
    times = [t / case.calls for t in time_case(programs.loop, carry, args, target)]
    return row | {
        "us": statistics.median(times) * 1e6,
        "spread_us": (max(times) - min(times)) * 1e6,
        "bytes": case.bytes,
    }


def describe(row: dict) -> str:
    """The figures of a row."""
    if "us" not in row:
        return f"FAILED {row['error']}" if "error" in row else row["skipped"]
    verdict = "not compared"
    if "correct" in row:
        verdict = f"{'' if row['correct'] else 'WRONG, '}error {row['relative_error']:.1e}"
    return (
        f"{row['us']:9.2f} us ± {row['spread_us'] / 2:6.2f} {row['bytes'] / 1e6:9.1f} MB "
        f"{100 * row['share_of_ceiling']:6.1f} % of the ceiling, {verdict}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 where a case failed or was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="comma-separated beginnings of op names")
    parser.add_argument("--minutes", type=float, default=9, help="starts no case after these")
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--out", type=Path, default=Path("scripts/results/kernels_h200.json"))
    parser.add_argument("--target", type=float, default=0.02, help="seconds per measurement")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    git = ["git", "rev-parse", "HEAD"]
    seed = int.from_bytes(os.urandom(4))
    result = {
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "jaxlib": jax.lib.__version__},
        "commit": options.commit or subprocess.check_output(git, text=True).strip(),
        "seed": seed,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    wanted = ("limit", *options.only.split(","))
    cases = [case for case in kernel_cases.cases() if case.op.startswith(wanted)]
    rows = []
    for row in bench(cases, jax.random.key(seed), options.target, deadline):
        rows.append(row)
        options.out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
    failed = [row for row in rows if "error" in row or not row.get("correct", True)]
    print(f"# {len(rows)} cases, {len(failed)} failed or wrong, in {options.out}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
