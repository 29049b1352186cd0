"""Trains a DSpark drafter for a model, which stays as it is.

Pieces resume from each other; the learning rate follows the share of `--total` minutes of training
that is over. Each piece ends `--minutes` after its start, writes the drafter to OUT/drafter in
DeepSpec's layout, and the `--last` one calibrates its confidences on held-out text.

  PYTHONPATH=. python3 scripts/train_drafter.py --model MODEL --work WORK --out OUT --minutes 9

WORK holds nano's corpus as `scripts/train_nano.py` made it; it is made where it is absent.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from drafting import calibrate, data
from drafting.loss import Blocks
from drafting.step import (
    ANCHORS_SHORT,
    TrainState,
    anchors_of,
    draft_blocks,
    drafter_config,
    export,
    flatten,
    make_optimizer,
    train_step,
    unpacked,
)
from flax import nnx
from nano import batches, pieces
from nano.step import compute_dtype

from inkling_jax.config import Config
from inkling_jax.drafter import init_drafter
from inkling_jax.loading import load_params, pack_for_kernels

WARMUP, LOG_SECONDS, SAVE_SECONDS = 0.03, 10, 60
HELD_OUT_TURNS = 6


def learning_rate(share: float, peak: float) -> float:
    """Warm-up, constant, then linear decay to nothing, by the share of the time that is over."""
    return peak * min(share / WARMUP, 1.0, max(1.2 * (1 - share), 0.0))


def main() -> None:
    """Runs one piece of the training."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(args.work / "compiled"))
    began = time.monotonic()
    log = pieces.open_log(args.out / "log.jsonl", began)

    batches.prepare(args.work, args.model / "tokenizer.json")
    source = batches.open_source(args.work, held_out=False)
    config = Config.from_file(args.model / "config.json")
    if (args.model / "tokenizer.json").read_bytes() != (args.work / "tokenizer.json").read_bytes():
        raise SystemExit(f"{args.work}: holds a corpus with another tokenizer than {args.model}")
    loaded = load_params(args.model, config, compute_dtype())
    target, drawing = unpacked(loaded), pack_for_kernels(loaded, config)
    mask_token = source.tokenizer.token_to_id("<|pad|>")
    drafter = drafter_config(config, args.block_size, mask_token)
    optimizer = make_optimizer()
    params = jax.jit(lambda: flatten(init_drafter(drafter, jax.random.key(args.seed))))()
    state = TrainState(params, jax.jit(optimizer.init)(params))
    progress = {"step": 0, "seconds": 0.0}
    state_file = args.out / "state.npz"
    if state_file.exists():
        state, progress = pieces.restore(state_file, state)
    elif args.start:
        state, _ = pieces.restore(args.start, state)
    log(event="start", parameters=sum(w.size for w in params.values()), **progress)

    continuations = data.Continuations(drawing, config, source)
    stream = data.stream(args.work, continuations, progress["step"], args.pool, args.workers)
    step = functools.partial(train_step, drafter=drafter, config=config, optimizer=optimizer)
    queue, programs = _compile(step, state, target, stream)
    log(event="compiled", shapes=[list(shape) for shape in programs])

    start, spent = time.monotonic(), progress["seconds"]
    end = began + args.minutes * 60 - (args.reserve if args.last else 5)
    length = (end - start + spent) if args.last else args.total * 60
    last = {"log": start, "save": start}
    try:
        while (now := time.monotonic()) < end:
            batch = queue.pop(0)
            share = (spent + now - start) / length
            if share >= 1:
                break
            settings = (jnp.int32(progress["step"]), jnp.float32(learning_rate(share, args.rate)))
            state, found = programs[batch.tokens.shape](state, target, batch, *settings)
            queue.append(next(stream))
            progress |= {"step": progress["step"] + 1, "seconds": spent + now - start}
            if now - last["log"] > LOG_SECONDS:
                found = {k: np.round(np.asarray(v), 4).tolist() for k, v in found.items()}
                log(step=progress["step"], share=round(share, 3), rows=len(batch.tokens), **found)
                if not np.isfinite(found["loss"]):
                    raise FloatingPointError("the loss is not finite")
                last["log"] = time.monotonic()
            if now - last["save"] > SAVE_SECONDS:
                pieces.save(state_file, state, progress)
                last["save"] = time.monotonic()
    finally:
        pieces.save(state_file, state, progress)
        export(args.out / "drafter", drafter, state.params)
        log(event="saved", **progress)
        stream.close()

    if args.last:
        held_out = continuations.of(batches.open_source(args.work, held_out=True))
        draft = jax.jit(
            functools.partial(draft_blocks, drafter=drafter, config=config, anchors=ANCHORS_SHORT)
        )
        result = _calibrate(held_out, functools.partial(draft, state.params, target=target))
        fitted = tuple(result["temperatures"])
        calibrated = dataclasses.replace(drafter, confidence_temperatures=fitted)
        export(args.out / "drafter", calibrated, state.params)
        (args.out / "calibration.json").write_text(json.dumps(result, indent=1) + "\n")
        calibrate.plot(result, args.out / "calibration.png")
        log(event="calibrated", **result)


def _compile(
    step: Callable[..., Any], state: TrainState, target: nnx.State, stream: Iterator[data.Batch]
) -> tuple[list[data.Batch], dict[tuple[int, ...], jax.stages.Compiled]]:
    """Returns the stream's first batches, some of every shape, and the step by shape."""

    def compile_for(batch: data.Batch) -> jax.stages.Compiled:
        count = anchors_of(batch)
        jitted = jax.jit(functools.partial(step, anchors=count), donate_argnums=0)
        return jitted.lower(state, target, batch, jnp.int32(0), jnp.float32(0)).compile()

    queue, futures = [], {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        while len(queue) < data.TURNS:
            queue.append(next(stream))
            if (shape := queue[-1].tokens.shape) not in futures:
                futures[shape] = pool.submit(compile_for, queue[-1])
        return queue, {shape: future.result() for shape, future in futures.items()}


def _calibrate(held_out: data.Continuations, draft: Callable[..., Blocks]) -> dict[str, Any]:
    """Fits the confidences' temperatures to drafts of held-out batches, and measures them."""
    made = []
    for i in range(HELD_OUT_TURNS):
        made += [*held_out.make(10**6 + i), data.make_replies(held_out.source, i)]
    found = [draft(batch=batch, key=jax.random.key(i)) for i, batch in enumerate(made)]
    said, accept, counts = (
        np.concatenate([np.asarray(getattr(blocks, name)) for blocks in found])
        for name in ("confidence", "accept", "counts")
    )
    return calibrate.assess(said, accept, counts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="published directory")
    parser.add_argument("--work", type=Path, required=True, help="nano's corpus")
    parser.add_argument("--out", type=Path, required=True, help="drafter, state, log, calibration")
    parser.add_argument("--start", type=Path, help="state.npz of another run, for a new schedule")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this piece")
    parser.add_argument("--total", type=float, default=8.0, help="minutes of training in all")
    parser.add_argument("--last", action="store_true", help="end the schedule, then calibrate")
    parser.add_argument("--reserve", type=float, default=60.0, help="seconds for the calibration")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--block-size", type=int, default=7)
    parser.add_argument("--pool", type=int, default=40, help="batches of continuations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    return parser.parse_args()


if __name__ == "__main__":
    main()
