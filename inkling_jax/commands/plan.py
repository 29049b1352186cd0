"""`inkling-jax plan`: does a model fit a mesh and how fast can it be, told from shapes alone."""

import argparse
import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

import inkling_jax as ij

GB, MS = 1e9, 1e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model, the mesh, the load and what to do with the plan."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR|small",
        help="published or converted directory, hub id, or small: Inkling 2 Small as published",
    )
    parser.add_argument(
        "--mesh",
        required=True,
        metavar="M",
        help="sizes such as tp=4,dp=2, a preset such as h200-tp4, or a YAML file",
    )
    parser.add_argument(
        "--context", type=int, required=True, metavar="N", help="tokens of a row in the cache"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="rows (default 1)")
    parser.add_argument(
        "--hardware", metavar="H", help="h100, h200 or gb200 (default: the preset's, or h200)"
    )
    parser.add_argument(
        "--prefill", type=int, metavar="N", help="tokens of a row in a prefill (default 8192)"
    )
    parser.add_argument(
        "--acceptance",
        type=float,
        default=3.5,
        metavar="A",
        help="tokens that a round of speculative decoding gives (default 3.5)",
    )
    parser.add_argument(
        "--plot", type=pathlib.Path, metavar="FILE", help="draw memory and times (png, svg, pdf)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Plans, and returns the plan with its sums."""
    # Nothing runs: GPUs stay free, and the versions of what would drive them do not matter.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    draw = _drawing(args.plot) if args.plot else None
    plan = ij.plan(
        args.model,
        args.mesh,
        args.context,
        args.batch,
        hardware=args.hardware,
        prefill_tokens=args.prefill,
        acceptance=args.acceptance,
        progress=not args.json,
    )
    if draw:
        draw(plan, args.plot)
    if not args.json:
        _show(plan)
    sums = {"bytes": plan.memory.total, "fits": plan.fits, "split_saves": plan.split_saves}
    return {**dataclasses.asdict(plan), **sums}


def _drawing(file: pathlib.Path) -> Callable[["ij.Plan", pathlib.Path], None]:
    """Returns what draws; refuses, before minutes pass, what it could not draw."""
    try:
        from inkling_jax.planning import picture
    except ModuleNotFoundError as e:
        raise ij.InputError(f"--plot needs {e.name}: pip install {e.name}") from e
    picture.check(file)
    return picture.draw


def _show(plan: "ij.Plan") -> None:
    print(f"{plan.model} on {plan.mesh} of {plan.hardware}, {plan.context:,} tokens × {plan.batch}")
    _show_memory(plan)
    print(f"\ncompiled for {plan.target}; exchanged in a step")
    for program in plan.programs:
        gb = program.temporaries / GB
        print(f"  {program.name}: {program.seconds} s to compile, {gb:.3f} GB of temporaries")
        for c in program.collectives:
            print(
                f"    {c.count:3} × {c.kind:18} {c.where:22} {c.nbytes / 1e6:10.3f} MB "
                f"among {c.devices} devices"
            )
        for name, choice in program.kernels.items():
            print(f"    {name}: {choice}")
    print(f"\n{'step of one device':18}{'experts':>9}{'GB':>9}{'TFLOP':>9}  ", end="")
    print(f"{'byte floor':>10}{'FLOP floor':>12}{'expected':>10}{'exchange':>10}  ms")
    for step in plan.steps:
        work = step.work
        print(
            f"{work.name:18}{work.hit:9.1f}{work.nbytes / GB:9.2f}{work.flops / 1e12:9.3f}  "
            f"{step.byte_floor / MS:10.2f}{step.flop_floor / MS:12.2f}"
            f"{step.expected / MS:10.2f}{step.communication / MS:10.2f}"
        )
    print(
        "  floors at the data sheet's rates, expected at those of inkling_jax/planning/hardware.py"
    )
    _show_splitting(plan)
    print(
        f"projection, nothing was run: {plan.acceptance} tokens a round are "
        f"{plan.tokens_per_second:,.0f} tokens/s for all rows, without drafting"
    )


def _show_memory(plan: "ij.Plan") -> None:
    memory = plan.memory
    planned = "analytic, at least" if memory.analytic else "by the compiler"
    rows = [(f"{w.part}, {w.format}", w.nbytes) for w in memory.weights] + [
        ("keys and values", memory.keys_values),
        ("convolution states", memory.convolutions),
        (f"temporaries, {planned}", memory.temporaries),
        ("all", memory.total),
    ]
    for name, nbytes in rows:
        print(f"  {name:32}{nbytes / GB:9.3f} GB")
    verdict = "fits" if plan.fits else "does not fit"
    print(f"  a device has {memory.capacity / GB:.0f} GB: this {verdict}; at most fit a batch of")
    print(
        f"  {plan.largest_batch} with this context, {plan.largest_context:,} tokens with this batch"
    )


def _show_splitting(plan: "ij.Plan") -> None:
    if plan.split_saves is None:
        return
    held = [plan.between_collectives[sp] / 2**30 for sp in ("off", "on")]
    all_ = [p.temporaries / 2**30 for p in plan.programs if p.name.startswith("prefill")]
    print(
        f"sp=on is expected to save {plan.split_saves:.0%} of a prefill's time (measured on two "
        "H200s: 4 %;\n  published on GB200s: 22 % at tp=4, 26 % at tp=8);\n"
        f"  it holds {held[1]:.2f} instead of {held[0]:.2f} GiB between collectives, and plans "
        f"{all_[1]:.2f} instead of {all_[0]:.2f} GiB\n  of temporaries (published: 1.3 to 1.9 less)"
        f"{', on a CPU' if plan.memory.analytic else ''}"
    )
