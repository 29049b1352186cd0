"""Trains inkling-jax-nano in pieces that resume from each other.

The schedule follows the share of `--total` minutes of training that is over, so the recipe fits any
machine. A piece ends `--minutes` after its start, compilation included, and saves its state; the
schedule of the `--last` piece ends with it, and an evaluation follows.

  PYTHONPATH=. python3 scripts/train_nano.py --work WORK --out OUT --minutes 9 --total 12
  PYTHONPATH=. python3 scripts/train_nano.py --work WORK --out OUT --minutes 7 --total 12 --last \
    --phase refine
"""

import argparse
import concurrent.futures
import dataclasses
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from nano import batches, evaluate, export, optimizer, pieces, recipe, step, wire
from nano.optimizer import Params
from tokenizers import Tokenizer

PIECES = 3
SAVE_SECONDS, REPORT_SECONDS, LOG_SECONDS = 120, 90, 10
WARMUP, DECAY, ROUNDING = 0.02, 0.5, 0.7  # shares of the total time


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How to train when, by the share of all training that is over.

    Attributes:
      start, end: of this piece, in seconds of `time.monotonic`.
      first: the share at its start.
      length: seconds of all training.
      peak: the largest learning rate.
    """

    start: float
    end: float
    first: float
    length: float
    peak: float

    def share(self, now: float) -> float:
        """Returns the share that is over."""
        return self.first + (now - self.start) / self.length

    def rate(self, share: float) -> float:
        """Warm-up, constant, then linear decay to nothing."""
        return self.peak * min(share / WARMUP, 1.0, max((1 - share) / (1 - DECAY), 0.0))

    def rounding(self, share: float) -> float:
        """Tells, as 0 or 1, whether experts are rounded to their packed formats."""
        return float(share >= ROUNDING)


def save_params(folder: Path, params: Params) -> None:
    """Writes the parameters in bfloat16 as `params-*.npy`, enough to start another run from."""
    flat = np.concatenate([np.asarray(w).astype(jnp.bfloat16).ravel() for w in params.values()])
    for i, piece in enumerate(np.array_split(flat.view(np.uint16), PIECES)):
        np.save(folder / f"params-{i}.npy", piece)


def load_params(folder: Path, like: Params) -> Params:
    """Reads what `save_params` wrote, as float32."""
    pieces = [np.load(folder / f"params-{i}.npy") for i in range(PIECES)]
    flat = np.concatenate(pieces).view(jnp.bfloat16).astype(np.float32)
    ends = np.cumsum([w.size for w in like.values()])
    parts = np.split(flat, ends[:-1])
    return {k: jnp.asarray(x.reshape(like[k].shape)) for k, x in zip(like, parts, strict=True)}


def main() -> None:
    """Runs one piece of the training."""
    args = _arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(args.work / "compiled"))
    began = time.monotonic()
    log = pieces.open_log(args.work / "log.jsonl", began)

    record = batches.prepare(args.work)
    tokenizer_file = args.work / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    config = recipe.nano(
        tokenizer.token_to_id(wire.IMAGE), tokenizer.token_to_id(wire.END_SAMPLING)
    )
    held_out = batches.open_source(args.work, held_out=True)
    phase = dataclasses.asdict(recipe.PHASES[args.phase])
    weights = jnp.array([0.0, *phase.pop("weights")], jnp.float32)  # nothing for what users say
    usual = dataclasses.replace(batches.Sizes(), **vars(args.sizes))
    sizes = dataclasses.replace(batches.Sizes(), **phase | vars(args.sizes))
    log(event="corpus", python=platform.python_version(), jax=jax.__version__, **record)

    params = jax.jit(lambda: step.init_params(config, args.seed))()
    if args.start:
        params = load_params(args.start, params)
    optim = optimizer.make_optimizer(params)
    state = step.TrainState(params, jax.jit(optim.init)(params))
    progress = {"step": 0, "seconds": 0.0, "share": args.share}
    state_file = args.work / "state.npz"
    if state_file.exists():
        state, progress = pieces.restore(state_file, state)
    log(event="start", parameters=sum(w.size for w in params.values()), **progress)

    token_bytes = jnp.array(wire.token_bytes(tokenizer))
    stream = batches.stream(args.work, args.seed * 10**7 + progress["step"], sizes, args.workers)
    batch = next(stream)
    step_fn = jax.jit(lambda *a: step.train_step(*a, config, optim, token_bytes), donate_argnums=0)
    evaluate_fn = evaluate.make_evaluate(config, held_out)
    bf16 = jax.eval_shape(lambda: step.to_state(config, params, step.compute_dtype()))
    zero, quick = jnp.float32(0), evaluate.held_out(held_out, 4, usual)
    with concurrent.futures.ThreadPoolExecutor() as pool:  # both programs compile at a time
        compiled = pool.submit(step_fn.lower(state, batch, zero, zero, weights).compile)
        measure = pool.submit(evaluate_fn.lower(bf16, quick[0]).compile)
        compiled, measure = compiled.result(), measure.result()
    log(event="compiled", temporaries_gb=_temporaries(compiled))

    round_experts = jax.jit(step.rounded)

    def report(name: str, made: list[batches.Batch], rounding: float) -> dict[str, float]:
        chosen = round_experts(state.params, rounding)
        found = evaluate.measure(measure, step.to_state(config, chosen, step.compute_dtype()), made)
        log(event=name, step=progress["step"], **found)
        return found

    if progress["step"] == 0:
        report("held_out", quick, 0.0)
    start, end, first = time.monotonic(), began + args.minutes * 60, progress["share"]
    length = (end - start) / (1 - first) if args.last else args.total * 60
    schedule = Schedule(start, end, first, length, args.rate)
    last = dict.fromkeys(("save", "report", "log"), start)
    steps_at_log, sums = progress["step"], None
    try:
        steps = take_steps(compiled, state, batch, stream, schedule, weights, progress)
        for state, counts, peak in steps:
            now, share = time.monotonic(), progress["share"]
            sums = counts if sums is None else sums + counts
            if now - last["log"] > LOG_SECONDS:
                done, steps_at_log = progress["step"] - steps_at_log, progress["step"]
                found = figures(sums, peak)
                log(
                    step=progress["step"],
                    share=round(share, 3),
                    rate=round(schedule.rate(share), 6),
                    tokens_per_s=round(done * batch.tokens.size / (time.monotonic() - last["log"])),
                    **found,
                )
                if not all(map(math.isfinite, found["loss"].values())):
                    raise FloatingPointError("the loss is not finite")
                last["log"], sums = time.monotonic(), None
            if now - last["report"] > REPORT_SECONDS:
                report("held_out", quick, schedule.rounding(share))
                last["report"] = time.monotonic()
            if now - last["save"] > SAVE_SECONDS:
                pieces.save(state_file, state, progress)
                last["save"] = time.monotonic()
    finally:
        if np.isfinite(np.asarray(state.params["embed/weight"])).all():
            pieces.save(state_file, state, progress)
            save_params(args.out, state.params)
            folder = args.work / "checkpoint"
            export.export(folder, config, state.params, tokenizer_file, packed=True)
            log(event="saved", **progress)
        stream.close()

    if args.last:
        everything = evaluate.held_out(held_out, args.eval_batches, usual)
        result = {
            "packed": report("final_packed", everything, 1.0),
            "bf16": report("final_bf16", everything, 0.0),
            **progress,
            "device": jax.devices()[0].device_kind,
            "python": platform.python_version(),
            "corpus": record,
            "command": " ".join(sys.argv),
        }
        (args.out / "train.json").write_text(json.dumps(result, indent=2) + "\n")
    (args.out / "log.jsonl").write_bytes((args.work / "log.jsonl").read_bytes())


def take_steps(
    compiled: jax.stages.Compiled,
    state: step.TrainState,
    batch: batches.Batch,
    stream: Iterator[batches.Batch],
    schedule: Schedule,
    weights: Float[Array, " tasks"],
    progress: dict[str, Any],
) -> Iterator[tuple[step.TrainState, step.Counts, Float[Array, ""]]]:
    """Trains until the piece or the schedule ends; yields after each step and counts it.

    Args:
      compiled: `step.train_step` of `batch`, the first one, and those of the stream.
      progress: step, seconds and share of the training so far, changed in place.
    """
    spent = progress["seconds"]
    while (now := time.monotonic()) < schedule.end and (share := schedule.share(now)) < 1:
        settings = (jnp.float32(schedule.rate(share)), jnp.float32(schedule.rounding(share)))
        state, counts, peak = compiled(state, batch, *settings, weights)
        seconds = spent + time.monotonic() - schedule.start
        progress |= {"step": progress["step"] + 1, "seconds": seconds, "share": share}
        yield state, counts, peak  # first of all: an interrupt finds the caller with a whole state
        batch = next(stream)
        if progress["step"] % 5 == 0:  # a wait: the host may not run far ahead of the device
            jax.block_until_ready(peak)


def figures(sums: step.Counts, peak: Float[Array, ""]) -> dict[str, Any]:
    """Returns loss and share of exact answers by task, and the imbalance of the experts."""

    def by_task(total: Float[Array, " tasks"], count: Float[Array, " tasks"]) -> dict[str, float]:
        shares = np.asarray(total) / np.maximum(np.asarray(count), 1)
        return {t: round(float(x), 3) for t, x in zip(batches.TASKS, shares, strict=True)}

    return {
        "loss": by_task(sums.nll, sums.tokens),
        "exact": by_task(sums.exact, sums.answers),
        "peak_load": round(float(peak), 2),
    }


def _temporaries(compiled: jax.stages.Compiled) -> float | None:
    analysis = compiled.memory_analysis()
    return round(analysis.temp_size_in_bytes / 1e9, 2) if analysis else None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="corpus, state, checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="parameters, log and evaluation")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this piece")
    parser.add_argument("--total", type=float, default=12.0, help="minutes of training in all")
    parser.add_argument("--phase", choices=recipe.PHASES, default="learn")
    parser.add_argument("--last", action="store_true", help="end the schedule with this piece")
    parser.add_argument("--start", type=Path, help="folder with params-*.npy to begin from")
    parser.add_argument("--share", type=float, default=0.0, help="of the schedule, to begin at")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    parser.add_argument("--eval-batches", type=int, default=40)
    parser.add_argument("--rows", type=int, help="rows of each kind in a batch (for a small trial)")
    parser.add_argument("--length", type=int, help="of long rows, from 512 on (for a small trial)")
    args = parser.parse_args()
    kinds = ("text", "retrieval", "chats")
    chosen = {} if args.rows is None else dict.fromkeys(kinds, args.rows)
    args.sizes = argparse.Namespace(**chosen)
    if args.length:
        args.sizes.length = args.length
    return args


if __name__ == "__main__":
    main()
