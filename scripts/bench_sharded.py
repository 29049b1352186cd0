"""Checks and times on several GPUs what one GPU cannot show. Multicast stays off.

    python scripts/bench_sharded.py --commit $COMMIT [--only check latency] [--minutes 5.4]

check: allreduce_conv_mix against psum and plain conv_mix, with random skew between the devices.
nano, slice: a model over tp against one GPU, sp on and off: text and logits of the shipped model,
  logits of two layers of full width.
text, drafts, text32, layers: greedy text with sums within allreduce_conv_mix and in front of
  conv_mix: of the shipped model in bfloat16, with its drafter, in float32, and of six layers.
latency: allreduce_conv_mix against NCCL and conv_mix, in a captured loop.
prefill: 8,192 tokens through six layers of full width, tokens split (sp) and not, time and memory
  beside the planner's.
decode: a step of the same layers, with collectives, and of one device's share without them.

Each part is a process of its own. All of them (but nano) compile from the start, and they measure
one after the other, those first whose results do not depend on who else is compiling. A part that
hangs is killed and ends as a row that says so, and so does one that the time does not suffice for.
Results are written after every row. With fewer than two GPUs nothing runs, and the output says why.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.sharded_parts.turns import start, stop, turn
from scripts.time_limit import write_json

# Flags of XLA by part: where speed does not count, nothing is tuned; tuning Triton takes minutes.
UNTUNED, TUNED = "--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false"
PARTS = {
    "check": UNTUNED,
    "nano": UNTUNED,
    "slice": UNTUNED,
    "text": UNTUNED,
    "drafts": UNTUNED,
    "text32": UNTUNED,
    "layers": UNTUNED,
    "latency": TUNED,
    "prefill": TUNED,
    "decode": TUNED,
}
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",  # a fault in multicast can take down the GPUs of a host
    "NVSHMEM_DISABLE_NVLS": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the processes share the GPUs
}
SIMULATED = (
    {"JAX_PLATFORMS": "cpu"},
    "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
)


def environment(part: str, small: bool) -> dict[str, str]:
    """Returns what a part's process finds set."""
    variables, flags = SIMULATED if small else ({}, PARTS[part])
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    return ENVIRONMENT | variables | {"XLA_FLAGS": flags}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts")
    parser.add_argument("--minutes", type=float, default=5.4, help="everything ends after these")
    parser.add_argument("--patience", type=float, default=75, help="seconds without a word")
    parser.add_argument("--repetitions", type=int, default=10_000, help="calls of the check")
    parser.add_argument("--small", action="store_true", help="small sizes on two simulated devices")
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--out", type=Path, default=Path("scripts/results/sharded_h200.json"))
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts; returns 1 where a result was wrong or missing."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.worker:
        from scripts.sharded_parts.worker import work  # JAX, which only workers need

        work(options)
        return 0
    began = time.monotonic()
    git = ["git", "rev-parse", "HEAD"]
    result: dict[str, Any] = {
        "commit": options.commit or subprocess.check_output(git, text=True).strip()
    }
    rows: list[dict[str, Any]] = []
    command = [sys.executable, __file__, *arguments, "--worker"]
    workers = {
        part: start([*command, part], environment(part, options.small)) for part in options.only
    }
    try:
        for part, worker in workers.items():
            for row in turn(worker, options.patience, began + 60 * options.minutes):
                seconds = round(time.monotonic() - began, 1)
                print(f"{seconds:6.1f} s  {part}: {row}", flush=True)
                if "device" in row:
                    result |= row
                else:
                    rows.append({"part": part} | row)
                write_json(options.out, result | {"seconds": seconds, "rows": rows})
    finally:
        for worker in workers.values():
            stop(worker)
    return any("error" in row or not row.get("correct", True) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
