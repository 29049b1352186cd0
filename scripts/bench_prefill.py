"""Times the product's `prefill` at full width, on one GPU, with random weights made there.

- `slice`: 8,192 tokens through 12 layers of full width. Kernels against plain JAX in time, and in
  the memory that the compiler plans and the device reports.
- `rank`: the time to the first token of a continuation of 2,200 tokens at a context of 80 K, in one
  call, on what one of four tensor-parallel ranks holds of all layers (its collectives left out).
- `long`: a prompt of 2^20 tokens through 12 narrow layers, in chunks of two lengths; how far the
  last logits differ, and the memory besides weights and cache.

FLOP are counted from shapes (`inkling_jax.planning.floors`), the attention bias not. The matrix
ceiling is an 8192³ bfloat16 product of the same run. A call's floor is, part by part, the longer of
its bytes at the read rate and its FLOP at that ceiling.

    PYTHONPATH=. XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 python3 scripts/bench_prefill.py
      [--minutes 4] [--parts slice,rank,long] [--paths kernels,plain] [--layers 48]

Writes scripts/results/prefill_h200.json after every row and ends within seconds of `--minutes`,
whatever still compiles then.
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from scripts.bench_decode import read_rate, step_seconds
from scripts.decode_step.parts import ROOM, Part, full_size, random_params, smoke_size
from scripts.decode_step.programs import compilers
from scripts.prefill_step.calls import Call, compile_call, first_layers, load_call, narrow
from scripts.prefill_step.times import compare, measure, read_long
from scripts.time_limit import leave, limited, write_json

WAIT = 0.6  # of the time, for what compiles: while something runs nothing should


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens of what is run: `slice` in all, `rank` new and before, `long` in all and by chunk."""

    slice: int = 8192
    rank: int = 2200
    context: int = 80 << 10
    long: int = 1 << 20
    chunks: tuple[int, int] = (8192, 12288)


SMOKE = Sizes(96, 40, 64, 200, (64, 96))


def matrix_rate(n: int) -> float:
    """FLOP a second of an n³ bfloat16 product by XLA."""
    weight = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16) / n**0.5

    @jax.jit
    def run(x, weight, trips):
        def body(state):
            return state[0] + 1, state[1] @ weight @ weight  # one alone would end in a copy

        return jax.lax.while_loop(lambda state: state[0] < trips, body, (jnp.int32(0), x))[1]

    return 2 * 2 * n**3 / statistics.median(step_seconds(run, weight, weight, 1 << 20))


def all_calls(part: Part, paths: Sequence[str], sizes: Sizes) -> list[Call]:
    """Lists the calls of a part."""
    if part.name == "slice":
        return [Call(part, path, sizes.slice, sizes.slice + ROOM) for path in paths]
    if part.name == "rank":
        return [Call(part, "kernels", sizes.rank, sizes.context + sizes.rank + ROOM)]
    return [Call(part, "kernels", chunk, sizes.long) for chunk in sizes.chunks]


def bench(
    calls: list[Call], compiled: dict[Call, Future], sizes: Sizes, ceiling: float, rate: float
) -> Iterator[dict[str, Any]]:
    """Yields the rows of a part; what has not compiled is left out."""
    params, path, long = None, None, []
    for call in calls:
        if not compiled[call].done() or (error := compiled[call].exception()):
            print(f"# {call}: {error if compiled[call].done() else 'not compiled'}", flush=True)
            continue
        if path != call.path:
            del params  # before the next path's are drawn
            path = call.path
            params = jax.block_until_ready(random_params(call.part, path == "kernels"))
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
            print(f"# {call.part.name}/{path}: {size / 1e9:.1f} GB of weights", flush=True)
        program = load_call(call, compiled[call])
        if call.part.name == "long":
            long.append(read_long(call, program, params, sizes.long))
        else:
            context = sizes.context if call.part.name == "rank" else 0
            yield measure(call, program, params, context, ceiling, rate)
    if long:
        yield from compare(long)


def with_ratios(rows: list[dict]) -> list[dict]:
    """Adds to the slice's row of the kernels how many times longer plain JAX takes."""
    plain = {row["part"]: row["ms"] for row in rows if row["path"] == "plain"}
    return [
        row | {"plain_takes": plain[row["part"]] / row["ms"]}
        if row["path"] == "kernels" and row["part"] in plain
        else row
        for row in rows
    ]


def describe(row: dict[str, Any]) -> str:
    """A line of the table."""
    peak = (row["device_peak_bytes"] or 0) / 1e9
    memory = f"{row['temporary_bytes'] / 1e9:6.2f} GB temporary, device peak so far {peak:.1f} GB"
    text = f"{row['part']:6}{row['path']:8} {row['layers']} layers {row['tokens']} tok "
    if row["part"] == "long":
        return (
            f"{text}by {row['chunk']}: {row['seconds']:.1f} s, chunks {row['first_chunk_ms']:.1f} "
            f"to {row['last_chunk_ms']:.1f} ms, {memory}, logits differ by {row['differs']:.1e}"
        )
    text += (
        f"at {row['context']}: {row['ms']:.1f} ms ± {row['spread_ms'] / 2:.1f}, floor "
        f"{row['floor_ms']:.1f}, {100 * row['share_of_matrix_ceiling']:.1f} % of the matrix "
        f"ceiling, {memory}"
    )
    return text + (f", plain {row['plain_takes']:.1f} x" if "plain_takes" in row else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    args = _arguments(arguments)
    git = ["git", "rev-parse", "HEAD"]
    sizes = SMOKE if args.smoke else Sizes()
    parts = smoke_parts() if args.smoke else all_parts(args.layers)
    with limited(args.minutes) as deadline:
        pool = compilers()
        calls = {name: all_calls(parts[name], args.paths, sizes) for name in args.parts}
        flat = [call for name in args.parts for call in calls[name]]
        compiled = {call: pool.submit(compile_call, call) for call in flat}
        pool.shutdown(wait=False)
        for part, packed in {(call.part, call.path == "kernels") for call in flat}:
            random_params(part, packed)  # compiles what draws them, meanwhile
        wait(compiled.values(), timeout=WAIT * (deadline - time.monotonic()))
        ceiling = matrix_rate(64 if args.smoke else 8192)
        rate = read_rate(1 << 20 if args.smoke else 1 << 32)
        print(f"# {ceiling / 1e12:.0f} TFLOP/s, reading at {rate / 1e12:.2f} TB/s", flush=True)
        result = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "commit": args.commit or subprocess.check_output(git, text=True).strip(),
            "left_out": "collectives, image tower",
            "matrix_flop_per_second": ceiling,
            "read_bytes_per_second": rate,
            "rows": [],
        }
        for name in args.parts:
            for row in bench(calls[name], compiled, sizes, ceiling, rate):
                print(describe(row), flush=True)
                result["rows"] = with_ratios([*result["rows"], row])
                write_json(args.out, result)
        print("", *map(describe, result["rows"]), sep="\n")


def all_parts(layers: int) -> dict[str, Part]:
    """Returns the parts by name; `layers` are those of the rank."""
    parts = {part.name: part for part in full_size()}
    rank = parts["rank"]
    return parts | {"rank": first_layers(rank, layers), "long": narrow(12)}


def smoke_parts() -> dict[str, Part]:
    """Returns parts so small that a CPU runs them, in float32."""
    [rank] = smoke_size()
    return {name: rank._replace(name=name) for name in ("slice", "rank", "long")}


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    def words(text):
        return tuple(text.split(","))

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=4, help="ends soon after these")
    parser.add_argument("--parts", type=words, default=("slice", "rank"), help="and long")
    parser.add_argument("--paths", type=words, default=("kernels", "plain"), help="of the slice")
    parser.add_argument("--layers", type=int, default=48, help="of the rank")
    parser.add_argument("--smoke", action="store_true", help="tiny parts, for a CPU")
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--out", type=Path, default=Path("scripts/results/prefill_h200.json"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
    leave(0)
