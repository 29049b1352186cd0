"""Measures speculative decoding: acceptance by kind of prompt and position, and speed by width.

  PYTHONPATH=. python3 scripts/bench_spec.py --model MODEL --drafter auto --work WORK --out RESULT

Prompts are held out: chat questions, small tasks over a passage, and starts of documents, drawn
from nano's corpus in WORK. Each is continued to the end of its reply, and for a fixed number of
tokens. Writes RESULT.json after each step, and RESULT.png; the table goes to stdout.

The run ends within `--minutes`: a step gets its share of what is left, results say how many tokens
they are of, and what is compiling when the time is over is given up.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from nano import batches, tasks
from nano.stamp import stamp
from time_limit import limited, write_json

import inkling_jax as ij
from inkling_jax.engine import Engine
from inkling_jax.proposing import Speculator

KINDS = ("chat", "tasks", "text")
TOKENS = 128
WHOLE, FIXED = "whole replies", f"{TOKENS} tokens"  # the second goes on behind a stop id
CONTEXT = 640  # holds the longest prompt and its reply, so that one program serves all
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


def settings(seeds: range, temperature: float, length: str) -> list[ij.SamplingParams]:
    """Returns what each reply of a batch is drawn with."""
    shared = {"temperature": temperature, "max_tokens": TOKENS + 1, "ignore_eos": length == FIXED}
    return [ij.SamplingParams(seed=i, **shared) for i in seeds]


def acceptance(
    engine: Engine,
    kind: str,
    source: batches.Source,
    temperature: float,
    length: str,
    tokens: int,
    end: float,
) -> dict[str, Any]:
    """Returns tokens per round with a 95 % interval over prompts, and acceptance by position.

    Prompts are drawn until they have given as many tokens as asked for, or the time is over.
    """
    outputs: list[ij.GenerationOutput] = []
    while sum(len(o.token_ids) - 1 for o in outputs) < tokens:
        seeds = range(len(outputs), len(outputs) + ROWS)
        prompts = [draw(kind, source, i) for i in seeds]
        outputs += engine.generate(prompts, settings(seeds, temperature, length))
        if time.monotonic() > end:
            break
    rounds = np.array([len(o.stats["rounds"]) for o in outputs])
    counts = np.array([len(o.token_ids) - 1 for o in outputs])
    draws = np.random.default_rng(0).integers(len(outputs), size=(500, len(outputs)))
    spread = counts[draws].sum(axis=1) / np.maximum(rounds[draws].sum(axis=1), 1)
    entries = [entry for o in outputs for entry in o.stats["rounds"]]
    accepted = np.array([entry["accepted"] for entry in entries])
    proposed = np.array([entry["proposed"] for entry in entries])
    places = range(1, proposed.max() + 1)
    return {
        "prompts": len(outputs),
        "tokens": int(counts.sum()),
        "acceptance_length": round(float(counts.sum() / rounds.sum()), 3),
        "interval": np.round(np.quantile(spread, [0.025, 0.975]), 3).tolist(),
        "acceptance_by_position": [
            round(float((accepted[proposed >= n] >= n).mean()), 4) for n in places
        ],
        "verified_widths": np.bincount(proposed, minlength=proposed.max() + 1).tolist(),
    }


def speed(
    engines: dict[str, Engine], prompts: list[Any], temperature: float, length: str, end: float
) -> dict[str, dict[str, float]]:
    """Returns tokens per second of decoding one row at a time, by each engine in turn.

    All continue the same prompts, as many as there is time for; the first one is for warming up.
    """
    sums = {name: np.zeros(3) for name in engines}  # tokens, seconds, rounds
    done = 0
    for i, prompt in enumerate([prompts[0], *prompts]):
        for name, engine in engines.items():
            [output] = engine.generate([prompt], settings(range(i, i + 1), temperature, length))
            rounds = len(output.stats.get("rounds", output.token_ids[1:]))
            if i:
                seconds = output.stats.get("decode_seconds", 0.0)  # none after a reply of one token
                sums[name] += len(output.token_ids) - 1, seconds, rounds
        done = i
        if i and time.monotonic() > end:
            break
    return {
        name: {
            "prompts": done,
            "tokens_per_second": round(tokens / seconds, 1),
            "ms_per_round": round(1e3 * seconds / rounds, 4),
            "tokens_per_round": round(tokens / rounds, 3),
        }
        for name, (tokens, seconds, rounds) in sums.items()
    }


def main() -> None:
    """Runs all measurements in the time that they have."""
    args = _arguments()
    with limited(args.minutes) as end:
        measure(args, end)


def measure(args: argparse.Namespace, end: float) -> None:
    """Writes down what there is after each step."""
    jax.config.update("jax_compilation_cache_dir", str(args.work / "compiled"))
    batches.prepare(args.work, Path(args.model) / "tokenizer.json")
    source = batches.open_source(args.work, held_out=True)
    auto = ij.load(args.model, drafter=args.drafter, draft_tokens="auto", context=CONTEXT)
    drafter = auto.speculator
    if drafter is None or drafter.cost is None:
        raise SystemExit(f"{args.drafter}: no drafter was found")
    result: dict[str, Any] = {
        **stamp(Path(args.model)),
        "block_size": drafter.drafts,
        "cost_by_width": np.round(np.asarray(drafter.cost), 3).tolist(),
        "speed": {},
        "acceptance": {},
    }
    write = functools.partial(write_json, args.out.with_suffix(".json"), result)

    def with_width(width: int | str | None) -> Engine:
        if width == "auto":
            return auto
        chosen = None if width is None else Speculator(drafter.params, drafter.config, width)
        return dataclasses.replace(auto, speculator=chosen)

    write()
    timed = [None, *args.widths, "auto"] if args.speed else []
    engines = {str(width or "none"): with_width(width) for width in timed}
    whole = with_width(drafter.drafts)
    prompts = [draw(kind, source, 500 + i) for i in range(args.speed) for kind in KINDS[:2]]
    with concurrent.futures.ThreadPoolExecutor() as pool:  # programs compile at the same time
        batch = [draw("chat", source, i) for i in range(ROWS)]
        first = settings(range(ROWS), 1.0, WHOLE)
        compiled = [pool.submit(e.generate, prompts[:1], first[:1]) for e in engines.values()]
        compiled += [pool.submit(whole.generate, batch, first)]
        for future in compiled:
            future.result()
    classes = [(kind, temperature) for kind in KINDS for temperature in (0.0, 1.0)]
    left = 2 * (len(classes) + len(KINDS) * bool(prompts))  # timing gets the time of three classes

    def share(parts: int) -> float:
        """The moment at which a step of so many of the parts that are left ends."""
        nonlocal left
        now = time.monotonic()
        left, until = left - parts, now + (end - now) * parts / (left + 1)
        return until

    if prompts:
        for length in (WHOLE, FIXED):
            found = speed(engines, prompts, 1.0, length, share(len(KINDS)))
            for name, figures in found.items():
                result["speed"].setdefault(name, {})[length] = figures
                print(f"drafts {name}, {length}: {figures}", flush=True)
            write()
    for kind, temperature in classes:
        name = f"{kind}, temperature {temperature:g}"
        result["acceptance"][name] = {}
        for length in (WHOLE, FIXED):
            wanted, until = args.prompts * TOKENS, share(1)
            found = acceptance(whole, kind, source, temperature, length, wanted, until)
            result["acceptance"][name][length] = found
            low, high = found["interval"]
            print(
                f"{name}, {length}: {found['acceptance_length']:.2f} tokens a round "
                f"[{low:.2f}, {high:.2f}] of {found['tokens']}, by position "
                f"{found['acceptance_by_position']}",
                flush=True,
            )
            write()
    plot(result, args.out.with_suffix(".png"))


def plot(result: dict[str, Any], file: Path) -> None:
    """Draws acceptance by position and tokens per second by width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = bool(result["speed"])
    figure, axes = pyplot.subplots(1, 1 + timed, figsize=(5 + 5 * timed, 4), squeeze=False)
    left, right = axes[0, 0], axes[0, -1]
    for name, found in result["acceptance"].items():
        values = found[WHOLE]["acceptance_by_position"]
        left.plot(range(1, len(values) + 1), values, marker="o", label=name)
    left.set(xlabel="draft", ylabel="share accepted, with all before it", ylim=(0, 1))
    left.legend(fontsize=7)
    if timed:
        rates = [found[WHOLE]["tokens_per_second"] for found in result["speed"].values()]
        right.bar(list(result["speed"]), rates)
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
    parser.add_argument("--minutes", type=float, default=9.5, help="after which the run has ended")
    parser.add_argument("--speed", type=int, default=32, help="prompts of each kind to time, or 0")
    parser.add_argument("--widths", type=int, nargs="*", default=[3, 5, 7])
    return parser.parse_args()


if __name__ == "__main__":
    main()
