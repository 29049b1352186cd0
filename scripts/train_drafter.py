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
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from drafting import calibrate, data, loss
from flax import nnx
from nano import batches
from nano.step import compute_dtype, dense_experts

from checkpoints.safetensors_writer import write_published
from inkling_jax.cache import init_cache
from inkling_jax.config import Config
from inkling_jax.drafter import abstract_drafter, init_drafter
from inkling_jax.drafter_config import DrafterConfig
from inkling_jax.load_drafter import config_json, published
from inkling_jax.loading import load_params, pack_for_kernels
from inkling_jax.model import encode_image, forward
from inkling_jax.quant import QuantTensor, dequantize

ANCHORS_LONG, ANCHORS_SHORT = 96, 40  # of a row
WARMUP, LOG_SECONDS, SAVE_SECONDS = 0.03, 10, 60
HELD_OUT_TURNS = 6


class TrainState(NamedTuple):
    """Float32 master parameters by path, and the optimizer's moments."""

    params: dict[str, jax.Array]
    optimizer: optax.OptState


def drafter_config(config: Config, block_size: int, mask_token: int) -> DrafterConfig:
    """Returns a drafter of 4 layers that shares the target's embedding and head."""
    text = config.text
    last = text.num_hidden_layers - 2
    taps = sorted({round(last * i / 4) for i in range(5)})
    return DrafterConfig(
        vocab_size=text.unpadded_vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=4 * text.hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        block_size=block_size,
        mask_token_id=mask_token,
        target_layer_ids=tuple(taps),
        num_target_layers=text.num_hidden_layers,
        markov_rank=64,
        markov_head_type="gated",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        final_logit_softcapping=text.final_logit_softcapping,
        own_embedding=False,
        own_head=False,
    )


def unpacked(params: nnx.State) -> nnx.State:
    """Returns parameters with plain experts, which are faster in large batches."""
    return jax.tree.map(
        lambda w: dequantize(w, compute_dtype()) if isinstance(w, QuantTensor) else w,
        params,
        is_leaf=lambda w: isinstance(w, QuantTensor),
    )


def flatten(params: nnx.State) -> dict[str, jax.Array]:
    """Returns parameters by path in float32."""
    flat = nnx.to_flat_state(params)
    return {"/".join(map(str, p)): v.get_value().astype(jnp.float32) for p, v in flat}


def unflatten(config: DrafterConfig, params: dict[str, Any], dtype: jnp.dtype) -> nnx.State:
    """Undoes `flatten`, in the dtype to compute with."""
    flat = nnx.to_flat_state(abstract_drafter(config, dtype))
    return nnx.from_flat_state(
        [(p, v.replace(params["/".join(map(str, p))].astype(dtype))) for p, v in flat]
    )


def read(target: nnx.State, config: Config, drafter: DrafterConfig, batch: data.Batch):
    """Lets the target read a batch, with the drafter's taps."""
    tiles = (batch.tiles.astype(jnp.float32) / 255 - 0.5) / 0.5
    features = jax.vmap(lambda t, g: encode_image(target, config, t, g))(tiles, batch.grid)
    features = features.reshape(-1, config.text.hidden_size)
    rows, width = batch.tokens.shape
    empty = init_cache(config.text, rows, width, 1, features.dtype)
    out = forward(
        target, config, batch.tokens, batch.lengths, empty, features, batch.image_index,
        taps=drafter.target_layer_ids, experts=dense_experts,
    )  # fmt: skip
    return jax.lax.stop_gradient(out)


def draft_blocks(params, drafter, target, config, batch, key, anchors) -> loss.Blocks:
    """Drafts at random anchors of a batch."""
    out = read(target, config, drafter, batch)
    chosen, real = loss.choose_anchors(batch.mask, key, anchors)
    return loss.blocks(
        unflatten(drafter, params, out.hidden.dtype), drafter, target, config, out,
        batch.tokens, batch.mask, batch.lengths, chosen, real,
    )  # fmt: skip


def make_optimizer() -> optax.GradientTransformation:
    """Adam with decay, for a learning rate of 1."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(0.01),
        optax.scale(-1.0),
    )


def train_step(state, target, batch, seed, rate, *, drafter, config, optimizer, anchors):
    """Returns the new state and a summary of the batch."""

    def objective(params):
        key = jax.random.key(seed)
        found = draft_blocks(params, drafter, target, config, batch, key, anchors)
        return loss.loss(found), loss.summary(found)

    (value, found), gradients = jax.value_and_grad(objective, has_aux=True)(state.params)
    updates, moments = optimizer.update(gradients, state.optimizer, state.params)
    params = jax.tree.map(lambda w, u: w + rate * u, state.params, updates)
    return TrainState(params, moments), {"loss": value, **found}


def anchors_of(batch: data.Batch) -> int:
    """Returns how many anchors a row of a batch gets."""
    return ANCHORS_LONG if batch.tokens.shape[1] > data.PROMPT + data.REPLY else ANCHORS_SHORT


def save(file: Path, state: TrainState, progress: dict[str, Any]) -> None:
    """Writes the state so that a kill at any moment leaves the old or the new one."""
    arrays = {f"a{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
    with file.with_suffix(".tmp").open("wb") as f:
        np.savez(f, progress=json.dumps(progress), **arrays)
    file.with_suffix(".tmp").replace(file)


def restore(file: Path, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Reads what `save` wrote."""
    with np.load(file) as saved:
        leaves, tree = jax.tree.flatten(like)
        arrays = [jnp.asarray(saved[f"a{i}"]) for i in range(len(leaves))]
        return jax.tree.unflatten(tree, arrays), json.loads(str(saved["progress"]))


def export(folder: Path, config: DrafterConfig, params: dict[str, Any]) -> None:
    """Writes the drafter in DeepSpec's layout, bfloat16."""
    tensors = published(config, unflatten(config, params, jnp.dtype(jnp.bfloat16)))
    write_published(folder, tensors.items(), config_json(config))


def main() -> None:
    """Runs one piece of the training."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(args.work / "compiled"))
    began = time.monotonic()
    log_file = (args.out / "log.jsonl").open("a")

    def log(**fields: Any) -> None:
        line = json.dumps({"at": round(time.monotonic() - began, 1), **fields})
        print(line, flush=True)
        log_file.write(line + "\n")
        log_file.flush()

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
        state, progress = restore(state_file, state)
    elif args.start:
        state, _ = restore(args.start, state)
    log(event="start", parameters=sum(w.size for w in params.values()), **progress)

    continuations = data.Continuations(drawing, config, source)
    stream = data.stream(args.work, continuations, progress["step"], args.pool, args.workers)
    step = functools.partial(train_step, drafter=drafter, config=config, optimizer=optimizer)

    def compile_for(batch: data.Batch):
        count = anchors_of(batch)
        jitted = jax.jit(functools.partial(step, anchors=count), donate_argnums=0)
        return jitted.lower(state, target, batch, jnp.int32(0), jnp.float32(0)).compile()

    def rate_at(share: float) -> float:
        return args.rate * min(share / WARMUP, 1.0, max(1.2 * (1 - share), 0.0))

    queue, futures = [], {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        while len(queue) < data.TURNS:  # some of every shape
            queue.append(next(stream))
            if (shape := queue[-1].tokens.shape) not in futures:
                futures[shape] = pool.submit(compile_for, queue[-1])
        programs = {shape: future.result() for shape, future in futures.items()}
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
            state, found = programs[batch.tokens.shape](
                state, target, batch, jnp.int32(progress["step"]), jnp.float32(rate_at(share))
            )
            queue.append(next(stream))
            progress |= {"step": progress["step"] + 1, "seconds": spent + now - start}
            if now - last["log"] > LOG_SECONDS:
                found = {k: np.round(np.asarray(v), 4).tolist() for k, v in found.items()}
                log(step=progress["step"], share=round(share, 3), rows=len(batch.tokens), **found)
                if not np.isfinite(found["loss"]):
                    raise FloatingPointError("the loss is not finite")
                last["log"] = time.monotonic()
            if now - last["save"] > SAVE_SECONDS:
                save(state_file, state, progress)
                last["save"] = time.monotonic()
    finally:
        save(state_file, state, progress)
        export(args.out / "drafter", drafter, state.params)
        log(event="saved", **progress)
        stream.close()

    if args.last:
        held_out = data.Continuations(
            drawing, config, batches.open_source(args.work, held_out=True)
        )
        held_out._run = continuations._run
        measure = jax.jit(
            functools.partial(draft_blocks, drafter=drafter, config=config, anchors=ANCHORS_SHORT)
        )
        made = []
        for i in range(HELD_OUT_TURNS):
            made += [*held_out.make(10**6 + i), data.make_replies(held_out.source, i)]
        found = [
            measure(state.params, target=target, batch=batch, key=jax.random.key(i))
            for i, batch in enumerate(made)
        ]
        result = calibrated(args.out, drafter, state, found)
        log(event="calibrated", **result)


def calibrated(out: Path, drafter: DrafterConfig, state: TrainState, found) -> dict[str, Any]:
    """Fits temperatures on half of the held-out blocks, exports, and measures on the other half."""
    said, accept, counts = (
        np.concatenate([np.asarray(getattr(b, name)) for b in found])
        for name in ("confidence", "accept", "counts")
    )
    half = len(said) // 2
    fitted, _ = calibrate.temperatures(said[:half], accept[:half], counts[:half])
    said = np.clip(said, 1e-6, 1 - 1e-6)
    score = np.log(said / (1 - said))
    scaled = 1 / (1 + np.exp(-score / np.array(fitted)))
    whole = counts[half:, -1]
    result: dict[str, Any] = {"temperatures": fitted}
    truth = np.cumprod(accept[half:][whole], axis=1)
    result["accept"] = np.round(accept[half:][whole].mean(axis=0), 4).tolist()
    result["length"] = round(float(1 + truth.sum(axis=1).mean()), 3)
    for name, values in (("before", said), ("after", scaled)):
        survival = np.cumprod(values[half:][whole], axis=1)
        error = calibrate.calibration_error(survival.ravel(), truth.ravel())
        result[name] = {
            "error": round(error, 4),
            "reliability": calibrate.reliability(survival.ravel(), truth.ravel()),
        }
    config = dataclasses.replace(drafter, confidence_temperatures=tuple(fitted))
    export(out / "drafter", config, state.params)
    (out / "calibration.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result, out / "calibration.png")
    return result


def plot(result: dict[str, Any], file: Path) -> None:
    """Draws how often drafts survive against how sure the drafter was of it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(4.5, 4.5))
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
    for name in ("before", "after"):
        said, truth, _ = zip(*result[name]["reliability"], strict=True)
        label = f"{name} scaling: error {100 * result[name]['error']:.1f} %"
        axes.plot(said, truth, marker="o", label=label)
    axes.set(xlabel="survival that was said", ylabel="survival that was found")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


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
