"""Measures speculative decoding: acceptance by kind of prompt and position, and speed by width.

  PYTHONPATH=. python3 scripts/bench_spec.py --model MODEL --drafter auto --work WORK --out RESULT

Prompts are held out: chat questions, small tasks over a passage, and starts of documents, drawn
from nano's corpus in WORK. Writes RESULT.json and RESULT.png; the table goes to stdout.
"""

import argparse
import concurrent.futures
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from nano import batches, tasks
from nano.stamp import stamp

import inkling_jax as ij
from inkling_jax.engine import Engine
from inkling_jax.proposing import Speculator

KINDS = ("chat", "tasks", "text")
TOKENS = 128
ROWS = 8  # of a batch: with a block of 8 tokens a row, the most that the experts' kernel takes


def draw(kind: str, source: batches.Source, seed: int) -> str | list[int]:
    """Draws a prompt: a question, a question about a passage, or the start of a document."""
    rng = np.random.default_rng([11, KINDS.index(kind), seed])
    if kind == "chat":
        return tasks.chat_task(rng, source.words, source.facts)[0]
    start = int(rng.integers(len(source.tokens) - 512))
    if kind == "text":
        return [int(t) for t in source.tokens[start : start + int(rng.integers(48, 128))]]
    names = tasks.keys(rng, source.words, 3)
    text = source.tokenizer.decode(source.tokens[start : start + int(rng.integers(64, 256))])
    name = next(iter(names))
    return f"{tasks.hide(rng, text, names)}\n\n{tasks.ask(name, names[name])[0]}"


def acceptance(
    engine: Engine, kind: str, source: batches.Source, temperature: float, prompts: int
) -> dict[str, Any]:
    """Returns tokens per round with a 95 % interval over prompts, and acceptance by position.

    Replies may end early; prompts are drawn until `prompts` times `TOKENS` tokens are there.
    """
    outputs: list[ij.GenerationOutput] = []
    while sum(len(o.token_ids) - 1 for o in outputs) < prompts * TOKENS:
        seeds = range(len(outputs), len(outputs) + ROWS)
        settings = [
            ij.SamplingParams(temperature=temperature, max_tokens=TOKENS + 1, seed=i) for i in seeds
        ]
        outputs += engine.generate([draw(kind, source, i) for i in seeds], settings)
    rounds = np.array([len(o.stats["rounds"]) for o in outputs])
    tokens = np.array([len(o.token_ids) - 1 for o in outputs])
    draws = np.random.default_rng(0).integers(len(outputs), size=(500, len(outputs)))
    spread = tokens[draws].sum(axis=1) / np.maximum(rounds[draws].sum(axis=1), 1)
    entries = [entry for o in outputs for entry in o.stats["rounds"]]
    accepted = np.array([entry["accepted"] for entry in entries])
    proposed = np.array([entry["proposed"] for entry in entries])
    places = range(1, proposed.max() + 1)
    return {
        "prompts": len(outputs),
        "tokens": int(tokens.sum()),
        "acceptance_length": round(float(tokens.sum() / rounds.sum()), 3),
        "interval": np.round(np.quantile(spread, [0.025, 0.975]), 3).tolist(),
        "acceptance_by_position": [
            round(float((accepted[proposed >= n] >= n).mean()), 4) for n in places
        ],
        "verified_widths": np.bincount(proposed, minlength=proposed.max() + 1).tolist(),
    }


def speed(
    engine: Engine, prompts: list[Any], temperature: float, ignore_eos: bool
) -> dict[str, float]:
    """Returns tokens per second of decoding one row at a time, the first prompt for warming up."""
    tokens, seconds, rounds = 0, 0.0, 0
    for i, prompt in enumerate([prompts[0], *prompts]):
        setting = ij.SamplingParams(
            temperature=temperature, max_tokens=TOKENS + 1, seed=i, ignore_eos=ignore_eos
        )
        [output] = engine.generate([prompt], setting)
        if i:
            tokens += len(output.token_ids) - 1
            seconds += output.stats["decode_seconds"]
            rounds += len(output.stats.get("rounds", output.token_ids[1:]))
    return {
        "tokens_per_second": round(tokens / seconds, 1),
        "ms_per_round": round(1e3 * seconds / rounds, 4),
        "tokens_per_round": round(tokens / rounds, 3),
    }


def main() -> None:
    """Runs all measurements and writes them down."""
    args = _arguments()
    batches.prepare(args.work, Path(args.model) / "tokenizer.json")
    source = batches.open_source(args.work, held_out=True)
    auto = ij.load(args.model, drafter=args.drafter, draft_tokens="auto")
    drafter = auto.speculator
    if drafter is None or drafter.cost is None:
        raise SystemExit(f"{args.drafter}: no drafter was found")
    result: dict[str, Any] = {
        **stamp(Path(args.model)),
        "block_size": drafter.drafts,
        "cost_by_width": np.round(np.asarray(drafter.cost), 3).tolist(),
        "acceptance": {},
        "speed": {},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")

    def with_width(width: int | str | None) -> Engine:
        if width == "auto":
            return auto
        chosen = None if width is None else Speculator(drafter.params, drafter.config, width)
        return dataclasses.replace(auto, speculator=chosen)

    whole = with_width(drafter.drafts)
    for kind in KINDS:
        for temperature in (0.0, 1.0):
            found = acceptance(whole, kind, source, temperature, args.prompts)
            result["acceptance"][f"{kind}, temperature {temperature:g}"] = found
            low, high = found["interval"]
            print(
                f"{kind:6} temperature {temperature:g}: {found['acceptance_length']:.2f} tokens "
                f"a round [{low:.2f}, {high:.2f}], by position {found['acceptance_by_position']}",
                flush=True,
            )
            write()
    prompts = [draw(kind, source, 500 + i) for i in range(args.speed) for kind in KINDS[:2]]
    if not prompts:
        return
    engines = {"none": with_width(None)} | {str(w): with_width(w) for w in (*args.widths, "auto")}
    with concurrent.futures.ThreadPoolExecutor() as pool:  # programs compile at the same time
        list(pool.map(lambda e: speed(e, prompts[:2], 1.0, ignore_eos=True), engines.values()))
    for name, engine in engines.items():
        result["speed"][name] = {
            "whole replies": speed(engine, prompts, 1.0, ignore_eos=False),
            f"{TOKENS} tokens": speed(engine, prompts, 1.0, ignore_eos=True),
        }
        print(f"drafts {name}: {result['speed'][name]}", flush=True)
        write()
    plot(result, args.out.with_suffix(".png"))


def plot(result: dict[str, Any], file: Path) -> None:
    """Draws acceptance by position and tokens per second by width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for name, found in result["acceptance"].items():
        values = found["acceptance_by_position"]
        left.plot(range(1, len(values) + 1), values, marker="o", label=name)
    left.set(xlabel="draft", ylabel="share accepted, with all before it", ylim=(0, 1))
    left.legend(fontsize=7)
    names = list(result["speed"])
    rates = [result["speed"][name]["whole replies"]["tokens_per_second"] for name in names]
    right.bar(names, rates)
    right.set(xlabel="drafts verified", ylabel="tokens per second, one row, whole replies")
    figure.suptitle(f"{result['device']}, block of {result['block_size']}")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="published or converted directory")
    parser.add_argument("--drafter", default="auto", help="its directory, or auto")
    parser.add_argument("--work", type=Path, required=True, help="nano's corpus")
    parser.add_argument("--out", type=Path, required=True, help="result, without a suffix")
    parser.add_argument("--prompts", type=int, default=112, help="of each kind, at least")
    parser.add_argument("--speed", type=int, default=32, help="prompts of each kind to time, or 0")
    parser.add_argument("--widths", type=int, nargs="*", default=[3, 5, 7])
    return parser.parse_args()


if __name__ == "__main__":
    main()
