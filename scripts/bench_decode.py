"""Times the product's `decode` in a jitted `while_loop` at full width, on one GPU.

Two parts of Inkling 2 Small fit one H200: `slice`, 12 layers of full width, and `rank`, what one of
four tensor-parallel ranks holds of all 48 layers (its collectives are left out). Weights, keys and
values are random and made on the device. Each step reads the tokens that the one before drew.

A step's time is the difference of two trip counts of one program. Its floor is the bytes that it
must read at the read rate measured first in the same run; how many experts differ among a step's
picks is counted by a program of its own. Kernels and plain JAX take the same steps.

    PYTHONPATH=. XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 python3 scripts/bench_decode.py
      [--minutes 8] [--parts slice,rank] [--paths kernels,plain] [--tokens 1,8,4]
      [--contexts 8192,102400]

What is named first is compiled and timed first. Writes scripts/results/decode_h200.json after every
row and ends within seconds of `--minutes`, whatever still compiles then; at the end a plot beside
the result.
"""

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scripts.decode_step.parts import (
    MAX_BLOCK,
    ROOM,
    Part,
    bytes_of_a_step,
    full_size,
    random_cache,
    random_params,
    smoke_size,
)
from scripts.decode_step.profile import ms_by_kernel
from scripts.decode_step.programs import (
    Case,
    Program,
    all_cases,
    as_they_are_ready,
    far_apart,
    load_picks,
    start_compiling,
)
from scripts.time_limit import leave, limited, write_json

ACCEPTANCE = 3.5  # tokens a step, of the peer's announcement: for the projection
SECONDS = 0.2  # per measurement
FEW = 4  # trips
LABEL = 24  # letters of a kernel's name in the plot


def step_seconds(program: Any, carry: Any, params: Any, most: int) -> list[float]:
    """Seconds per trip, five times: the difference of a few and at most `most` trips."""

    def elapsed(trips):
        begin = time.perf_counter()
        jax.block_until_ready(program(carry, params, jnp.int32(trips)))
        return time.perf_counter() - begin

    elapsed(FEW)
    one = max((elapsed(2 * FEW) - elapsed(FEW)) / FEW, 1e-6)
    many = min(max(FEW + int(SECONDS / one), 2 * FEW), most)
    elapsed(many)  # clocks up
    return [(elapsed(many) - elapsed(FEW)) / (many - FEW) for _ in range(5)]


def read_rate(size: int) -> float:
    """Bytes per second at which XLA sums an array of `size` bytes."""
    x = jnp.ones(size // 4, jnp.float32)

    @jax.jit
    def run(total, x, trips):
        def body(state):
            total = state[1]
            for _ in range(4):
                total = jnp.sum(x * (1 + 0 * total))  # each sum waits for the one before
            return state[0] + 1, total

        return jax.lax.while_loop(lambda state: state[0] < trips, body, (jnp.int32(0), total))[1]

    return 4 * x.nbytes / statistics.median(step_seconds(run, jnp.float32(0), x, ROOM))


def distinct_experts(case: Case, compiled: Future, params: nnx.State) -> dict[int, float]:
    """Returns how many experts a layer reads, on the average, for the first n of 8 tokens.

    Nothing where the program that shows the picks failed to build.
    """
    if error := compiled.exception():
        print(f"# {case.part.name} picks: {type(error).__name__}: {error}", flush=True)
        return {}
    context = max(case.contexts)
    tokens = far_apart(MAX_BLOCK) % case.part.config.text.unpadded_vocab_size
    carry = (tokens, random_cache(case.part, context, context))
    picks = np.asarray(load_picks(case, compiled)(carry, params))
    counts = range(1, MAX_BLOCK + 1)
    return {n: statistics.mean(np.unique(layer[:n]).size for layer in picks) for n in counts}


def measure(case: Case, program: Program, params: nnx.State, context: int) -> dict[str, Any]:
    """Times a case at one context."""
    tokens = far_apart(case.tokens) % case.part.config.text.unpadded_vocab_size
    carry = (tokens, random_cache(case.part, max(case.contexts), context))
    times = [1e3 * t for t in step_seconds(program.run, carry, params, ROOM // MAX_BLOCK)]
    by_kernel = ms_by_kernel(
        lambda trips: program.run(carry, params, jnp.int32(trips)), FEW, 2 * FEW
    )
    of_step, of_layers = program.launches
    return {
        "part": case.part.name,
        "path": case.path,
        "tokens": case.tokens,
        "context": context,
        "ms": statistics.median(times),
        "spread_ms": max(times) - min(times),
        "launches": of_step,
        "launches_per_layer": of_layers / case.part.config.text.num_hidden_layers,
        "chosen": program.chosen,
        "ms_by_kernel": by_kernel,
    }


def against_floor(row: dict, part: Part, params: nnx.State, distinct: dict, rate: float) -> dict:
    """Returns what the time means: bytes, floor, share; for a rank's verify step a projection."""
    size = bytes_of_a_step(part, params, distinct[row["tokens"]], row["context"])
    floor = 1e3 * size / rate
    found = {
        "distinct_experts": distinct[row["tokens"]],
        "bytes": size,
        "floor_ms": floor,
        "share_of_ceiling": floor / row["ms"],
    }
    if part.name == "rank" and row["tokens"] == MAX_BLOCK:
        found["projected_tokens_per_second"] = 1e3 * ACCEPTANCE / row["ms"]
    return found


def bench(part: Part, cases: list[Case], rate: float, deadline: float) -> Iterator[dict[str, Any]]:
    """Yields the rows of a part that the time allows, path by path."""
    loops, picks = start_compiling(cases)
    for path in dict.fromkeys(case.path for case in cases):
        if time.monotonic() > deadline:
            return
        params = jax.block_until_ready(random_params(part, path == "kernels"))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        print(f"# {part.name}/{path}: {size / 1e9:.1f} GB", flush=True)
        counts, distinct = [picks] if picks and path == "kernels" else [], {}
        for case, program in as_they_are_ready(loops, path, counts, deadline):
            if counts and counts[0].done():
                distinct = distinct_experts(case, counts.pop(), params)
            for context in case.contexts:
                if time.monotonic() > deadline:
                    return
                row = measure(case, program, params, context)
                yield row | (against_floor(row, part, params, distinct, rate) if distinct else {})
        del params  # before the next path's are drawn


def with_ratios(rows: list[dict]) -> list[dict]:
    """Adds to rows of the kernels how many times longer plain JAX takes, where it ran."""

    def place(row):
        return row["part"], row["tokens"], row["context"]

    plain = {place(row): row["ms"] for row in rows if row["path"] == "plain"}
    return [
        row | {"plain_takes": plain[place(row)] / row["ms"]}
        if row["path"] == "kernels" and place(row) in plain
        else row
        for row in rows
    ]


def describe(row: dict[str, Any]) -> str:
    """A line of the table."""
    text = (
        f"{row['part']:6}{row['path']:8} {row['tokens']} tok {row['context']:7} context "
        f"{row['ms']:8.3f} ms ± {row['spread_ms'] / 2:5.3f} "
        f"{row['launches_per_layer']:6.1f} launches a layer"
    )
    if "bytes" in row:
        text += f" {row['bytes'] / 1e9:6.2f} GB {100 * row['share_of_ceiling']:5.1f} % of ceiling"
    if "projected_tokens_per_second" in row:
        text += f", projection {row['projected_tokens_per_second']:.0f} tok/s"
    if "plain_takes" in row:
        text += f", plain {row['plain_takes']:.1f} x"
    return text


def plot(result: dict[str, Any], target: Path) -> None:
    """Draws each row's time, for kernels above the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted(result["rows"], key=lambda row: (row["part"], row["path"], row["tokens"]))
    names = [f"{r['part']} {r['path']}\n{r['tokens']} tok, {r['context']}" for r in rows]
    size = (3 + 0.7 * len(rows), 10)
    figure, (whole, parts) = pyplot.subplots(2, figsize=size, layout="constrained", sharex=True)
    whole.bar(names, [r["ms"] for r in rows], label="measured")
    whole.bar(names, [r.get("floor_ms", 0) for r in rows], label="bytes at the read rate")
    whole.set_title(f"decode on one {result['device']}, collectives left out")
    below = np.zeros(len(rows))
    for kernel, shares in longest_kernels(rows).items():
        parts.bar(names, shares, bottom=below, label=kernel[:LABEL])
        below += shares
    parts.set_title("the same by kernel; what overlaps counts twice")
    parts.tick_params(axis="x", labelrotation=90)
    for axes in (whole, parts):
        axes.set_ylabel("ms per step")
        axes.legend(fontsize="small")
    figure.savefig(target)


def longest_kernels(rows: list[dict], most: int = 9) -> dict[str, np.ndarray]:
    """Milliseconds of each row for the kernels that take the longest in all, and for the rest."""
    names = {name for row in rows for name in row["ms_by_kernel"]}
    taken = {n: np.array([row["ms_by_kernel"].get(n, 0.0) for row in rows]) for n in names}
    order = sorted(names, key=lambda name: -taken[name].sum())
    shown = {name: taken[name] for name in order[:most]}
    return shown | {"others": sum((taken[name] for name in order[most:]), np.zeros(len(rows)))}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    args = _arguments(arguments)
    git = ["git", "rev-parse", "HEAD"]
    with limited(args.minutes) as deadline:
        rate = read_rate(1 << 20 if args.smoke else 1 << 32)
        print(f"# reading at {rate / 1e12:.2f} TB/s", flush=True)
        result = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "commit": args.commit or subprocess.check_output(git, text=True).strip(),
            "left_out": "collectives, drafter, sampling (argmax instead), image tower",
            "projection": f"{ACCEPTANCE} tokens a step of {MAX_BLOCK}, with all this left out",
            "read_bytes_per_second": rate,
            "rows": [],
        }
        parts = {part.name: part for part in (smoke_size() if args.smoke else full_size())}
        for part in (parts[name] for name in args.parts):
            cases = [
                c for path in args.paths for c in all_cases(part, path, args.tokens, args.contexts)
            ]
            for row in bench(part, cases, rate, deadline):
                print(describe(row), flush=True)
                result["rows"] = with_ratios([*result["rows"], row])
                write_json(args.out, result)
        print("", *map(describe, result["rows"]), sep="\n")
        if result["rows"]:
            plot(result, args.out.with_suffix(".png"))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    def words(text):
        return tuple(text.split(","))

    def numbers(text):
        return tuple(map(int, words(text)))

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=8, help="ends soon after these")
    parser.add_argument("--parts", type=words, default=("slice", "rank"), help="of the model")
    parser.add_argument("--paths", type=words, default=("kernels", "plain"))
    parser.add_argument("--tokens", type=numbers, default=(1, 8, 4), help="a step, at most 8")
    parser.add_argument("--contexts", type=numbers, default=(8 << 10, 100 << 10))
    parser.add_argument("--smoke", action="store_true", help="a tiny rank, for a CPU")
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--out", type=Path, default=Path("scripts/results/decode_h200.json"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
    leave(0)
