"""Measures inkling-jax-nano on held-out questions and text.

Every question is a prompt of its own, made with the product's tokenizer, chat template and
preprocessing; an answer counts if greedy generation gives exactly it.

  PYTHONPATH=. python3 scripts/eval_nano.py
  PYTHONPATH=. python3 scripts/eval_nano.py --items 20 --out /tmp/few.json   # on a CPU
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from nano import corpus, questions, step, teacher
from nano.questions import TRAINED_LENGTH, Item
from nano.stamp import stamp
from train_nano import load_params

import inkling_jax as ij

HERE = Path(__file__).parent
BEYOND = 2 * TRAINED_LENGTH  # length of the prompts beyond the trained length
GREEDY = ij.SamplingParams(temperature=0.0, max_tokens=96)


def main() -> None:
    """Measures the model and writes the result."""
    args = _arguments()
    began = time.monotonic()
    documents = corpus.build()
    model = ij.load(args.model)
    source = questions.make_source(documents, model, args.model)
    tasks = make_tasks(model, source, args.items)
    print(f"items drawn after {time.monotonic() - began:.0f} s", flush=True)
    trained = json.loads(args.train.read_text()) if args.train.exists() else {}
    result = {
        **stamp(args.model),
        "corpus_sha256": source.sha256,
        "corpus_as_trained": source.sha256 == trained.get("corpus", {}).get("sha256"),
        "packed": measure(model, source, tasks, args.items),
        "by_generation": by_generation(model, tasks, args.generate),
    }
    if args.masters:
        unpacked = dataclasses.replace(model, params=unrounded(model, args.masters))
        result["bf16"] = measure(unpacked, source, tasks, args.items)
    result["training_run"] = {name: trained.get(name) for name in ("packed", "bf16")}
    result["seconds"] = round(time.monotonic() - began, 1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


def make_tasks(model: ij.Engine, source: questions.Source, count: int) -> dict[str, list[Item]]:
    """Returns the items of each task, `count` each but of those that are only reported."""
    few = max(count // 5, 1)
    text = model.config.text
    far = max(text.sliding_window_size, text.rel_extent)  # nothing local reaches back so far
    edges = [text.sliding_window_size, far, 2 * far, 4 * far, TRAINED_LENGTH, BEYOND]

    def draw(seed: int, length: int, low: int, high: int, number: int) -> list[Item]:
        made = questions.retrieval_items(model, source, seed, length)
        fitting = (_in_bin(item, d, edges) for d, item in made if low < d <= high)
        return list(itertools.islice(fitting, number))

    return {
        "picture": questions.picture_items(count),
        "retrieval": draw(0, TRAINED_LENGTH, far, TRAINED_LENGTH, count),
        "retrieval_near": draw(1, TRAINED_LENGTH, 0, far, few),
        "retrieval_beyond": draw(2, BEYOND, TRAINED_LENGTH, BEYOND, few),
        "chat": questions.chat_items(source, count),
    }


def _in_bin(item: Item, distance: int, edges: Sequence[int]) -> Item:
    """Names the group of a hidden key by the range that its distance falls in."""
    low, high = next((a, b) for a, b in itertools.pairwise((0, *edges)) if distance <= b)
    return item._replace(group=f"{low + 1} to {high} tokens back")


def measure(
    model: ij.Engine, source: questions.Source, tasks: dict[str, list[Item]], windows: int
) -> dict[str, Any]:
    """Returns bits per byte and, for every task, the share of exact answers."""
    batch_tokens = TRAINED_LENGTH * (8 if jax.default_backend() == "gpu" else 1)

    def exact(task: str) -> dict[str, Any]:
        verdicts = teacher.exact(model, tasks[task], batch_tokens)
        groups: dict[str, list[bool]] = {}
        for item, right in zip(tasks[task], verdicts, strict=True):
            groups.setdefault(item.group, []).append(right)
        print(task, share(verdicts), flush=True)
        return {**share(verdicts), "groups": {g: share(v) for g, v in groups.items()}}

    with concurrent.futures.ThreadPoolExecutor() as pool:  # programs compile at the same time
        text = pool.submit(teacher.bits_per_byte, model, source, windows, batch_tokens)
        found = dict(zip(tasks, pool.map(exact, tasks), strict=True))
        return {"text": text.result(), **found}


def share(verdicts: Sequence[bool]) -> dict[str, Any]:
    """Returns counts, the share of right answers and its 95 % interval (Wilson)."""
    n, right, z = len(verdicts), sum(verdicts), 1.96
    p, z2 = right / n, z * z / n
    middle = (p + z2 / 2) / (1 + z2)
    half = z * math.sqrt(p * (1 - p) / n + z2 / n / 4) / (1 + z2)
    interval = [round(middle - half, 4), round(middle + half, 4)]
    return {"items": n, "exact": right, "share": round(p, 4), "interval": interval}


def by_generation(
    model: ij.Engine, tasks: dict[str, list[Item]], count: int
) -> dict[str, dict[str, int]]:
    """Generates the first answers of each task, as a user would, and compares the verdicts."""

    def compare(items: list[Item]) -> dict[str, int]:
        chosen = items[:count]
        images = [[] if item.picture is None else [item.picture] for item in chosen]
        outputs = model.generate([item.question for item in chosen], GREEDY, images=images)
        pairs = zip(outputs, chosen, strict=True)
        right = [o.text == item.answer and o.finish_reason == "stop" for o, item in pairs]
        expected = teacher.exact(model, chosen, TRAINED_LENGTH)
        same = sum(a == b for a, b in zip(right, expected, strict=True))
        return {"items": len(chosen), "exact": sum(right), "same_verdict": same}

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(tasks, pool.map(compare, tasks.values()), strict=True))


def unrounded(model: ij.Engine, folder: Path) -> Any:
    """Returns the parameters as training left them, without the experts' rounding."""
    like = step.to_flat(ij.abstract_params(model.config))
    dtype = jnp.dtype(model.params["embed"]["weight"].dtype)
    return step.to_state(model.config, load_params(folder, like), dtype)


def show(result: dict[str, Any]) -> None:
    """Prints a table: a line per task, a column per form of the experts."""
    forms = [name for name in ("packed", "bf16") if name in result]
    print(f"{result['device']}, {result['seconds']} s", *forms, sep="\t")
    print("bits per byte", *(result[f]["text"]["bits_per_byte"] for f in forms), sep="\t")
    for task in result["by_generation"]:
        shares = (f"{result[f][task]['exact']}/{result[f][task]['items']}" for f in forms)
        print(task, *shares, sep="\t")
    print("by generation", result["by_generation"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shipped = HERE.parent / "checkpoints" / "inkling-jax-nano"
    parser.add_argument("--model", type=Path, default=shipped)
    parser.add_argument("--items", type=int, default=600, help="per task")
    parser.add_argument("--generate", type=int, default=16, help="of them also by generation")
    parser.add_argument("--masters", type=Path, help="folder of params-*.npy, to compare with")
    parser.add_argument("--train", type=Path, default=HERE / "results" / "nano_train.json")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "nano_eval.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
