"""Measures speculative decoding: speed, acceptance by kind of prompt, a budget shared by rows.

  PYTHONPATH=. python3 scripts/bench_spec.py --model MODEL --work WORK --out RESULT

Prompts are held out: chat questions, small tasks over a passage, and starts of documents, drawn
from nano's corpus in WORK, none twice. Replies go to their end, and for acceptance also on behind
it. Speed is told twice: of replies of the engine, the tokens after the first by the time after the
first, as ids, with what the call of the loop costs once; and of the loop alone, which is what long
replies come to.
Sharing is what a batch gains where its rows share a budget of drafts instead of choosing alone.
Writes RESULT.json after each step, and RESULT.png; the table goes to stdout. The run ends within
`--minutes`; another one keeps what acceptance RESULT.json has of enough tokens.
"""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from nano import batches
from nano.stamp import stamp
from speculation.acceptance import acceptance
from speculation.prompts import ASKED, KINDS, Prompt, some
from speculation.sharing import sharing
from speculation.speed import PLAIN, compare, compile_all, verifying, with_drafts
from time_limit import leave, limited, write_json

import inkling_jax as ij
from inkling_jax.drafting import with_costs
from inkling_jax.kernel_choice import chosen
from inkling_jax.prompts import make_prompt

PLOTTED = ("speed", "acceptance")
PARTS = (*PLOTTED, "sharing")
TEMPERATURES = (1.0, 0.0)
TOKENS = 128
WHOLE, FIXED = "whole replies", f"{TOKENS} tokens"  # the second goes on behind a stop id
CONTEXT = 640  # holds the longest prompt and its reply, so that one program serves all


def main() -> None:
    """Measures what was asked for in the time that there is."""
    args = _arguments()
    with limited(args.minutes) as end:
        batches.prepare(args.work, Path(args.model) / "tokenizer.json")
        source = batches.open_source(args.work, held_out=True)
        drafts = max(args.widths)
        engine = ij.load(args.model, drafter="auto", draft_tokens=drafts, context=CONTEXT)
        if engine.speculator is None:
            raise SystemExit(f"{args.model} has no drafter")
        file = args.out.with_suffix(".json")
        earlier = json.loads(file.read_text()) if file.exists() else {}
        result: dict[str, Any] = {
            **earlier,
            **stamp(Path(args.model)),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "drafts": drafts,
        }
        measures = {
            "speed": measure_speed,
            "acceptance": measure_acceptance,
            "sharing": measure_sharing,
        }
        for part in args.parts:
            for _ in measures[part](engine, source, args, result, end):
                write_json(file, result | {"kernels": chosen()})
        if any(part in result for part in PLOTTED):
            plot(result, args.out.with_suffix(".png"))
        leave(0)


def measure_speed(
    engine: ij.Engine,
    source: batches.Source,
    args: argparse.Namespace,
    result: dict[str, Any],
    end: float,
) -> Iterator[None]:
    """Adds speed by kind and temperature, each loop on the same prompts; yields after each step."""
    widest = verifying(engine.speculator, engine.speculator.drafts)
    plain, drafted = with_drafts(engine, None), with_drafts(engine, widest)
    asked = {kind: _as_ids(engine, some(kind, source, args.prompts)) for kind in ASKED}
    first = [prompts[0] for prompts in asked.values()]
    compile_all({"plain": plain, "speculative": drafted}, first, TOKENS)
    auto = with_costs(engine.params, engine.config, widest)
    fixed = {str(width): with_drafts(engine, verifying(widest, width)) for width in args.widths}
    engines = {PLAIN: plain, **fixed, "auto": with_drafts(engine, auto)}
    result["cost_by_width"] = np.round(np.asarray(auto.cost, float), 2).tolist()
    print(f"costs by width: {result['cost_by_width']}", flush=True)
    result["speed"] = {}
    for kind, prompts in asked.items():
        for temperature in TEMPERATURES:
            name = f"{kind}, temperature {temperature:g}"
            result["speed"][name] = compare(engines, prompts, temperature, TOKENS)
            for loop, figures in result["speed"][name].items():
                print(f"{name}, drafts {loop}: {speed_line(figures)}", flush=True)
            yield
            if time.monotonic() > end:
                return


def _as_ids(engine: ij.Engine, prompts: Sequence[Prompt]) -> list[list[int]]:
    return [make_prompt(engine.config, engine.tokenizer, prompt).ids for prompt in prompts]


def speed_line(figures: dict[str, Any]) -> str:
    """Says a loop's two speeds: of replies, and without what a call costs."""
    low, high = figures["times_plain_interval"]
    return (
        f"{figures['tokens_per_second']:.0f} tokens/s after the first token, "
        f"{figures['times_plain']:.2f} ({low:.2f} to {high:.2f}) x plain; a call costs "
        f"{figures['ms_per_call']:.2f} ms once, then a round {figures['ms_per_round']:.3f} ms for "
        f"{figures['tokens_per_round']:.2f} tokens: the loop alone is "
        f"{figures['loop_times_plain']:.2f} x plain"
    )


def measure_acceptance(
    engine: ij.Engine,
    source: batches.Source,
    args: argparse.Namespace,
    result: dict[str, Any],
    end: float,
) -> Iterator[None]:
    """Adds acceptance by kind and temperature; yields after each step."""
    found = result.setdefault("acceptance", {})
    lengths = [(kind, WHOLE) for kind in KINDS] + [(kind, FIXED) for kind in ASKED]
    steps = [(*step, temperature) for step in lengths for temperature in TEMPERATURES]
    for kind, length, temperature in steps:
        known = found.setdefault(f"{kind}, temperature {temperature:g}", {})
        if length in known and known[length]["tokens"] >= args.tokens:
            continue
        setting = ij.SamplingParams(
            temperature=temperature, max_tokens=TOKENS + 1, ignore_eos=length == FIXED, logprobs=0
        )
        known[length] = acceptance(engine, kind, source, setting, args.tokens, end)
        print(f"{kind}, temperature {temperature:g}, {length}: {known[length]}", flush=True)
        yield


def measure_sharing(
    engine: ij.Engine,
    source: batches.Source,
    args: argparse.Namespace,
    result: dict[str, Any],
    end: float,
) -> Iterator[None]:
    """Adds batches of rows by kind and temperature, continued behind a reply's end."""
    if time.monotonic() > end:
        return
    widest = verifying(engine.speculator, engine.speculator.drafts)
    chooses = with_costs(engine.params, engine.config, widest)
    engine = dataclasses.replace(engine, speculator=chooses)
    found = result["sharing"] = {}
    for kind in KINDS:
        for temperature in TEMPERATURES:
            if time.monotonic() > end:
                return
            setting = ij.SamplingParams(
                temperature=temperature, max_tokens=TOKENS + 1, ignore_eos=True
            )
            name = f"{kind}, temperature {temperature:g}"
            found[name] = sharing(engine, kind, source, setting)
            print(f"{name}, rows of a batch: {found[name]}", flush=True)
            yield


def plot(result: dict[str, Any], file: Path) -> None:
    """Draws acceptance by position and tokens per second by width, whichever was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = [part for part in PLOTTED if part in result]
    figure, axes = pyplot.subplots(1, len(parts), figsize=(6 * len(parts), 4), squeeze=False)
    for part, axis in zip(parts, axes[0], strict=True):
        for i, (name, found) in enumerate(result[part].items()):
            if part == "acceptance":
                values = found[WHOLE]["acceptance_by_position"]
                axis.plot(range(1, len(values) + 1), values, marker="o", label=name)
                axis.set(xlabel="draft", ylabel="share accepted, with all before it", ylim=(0, 1))
            else:
                rates = [figures["tokens_per_second"] for figures in found.values()]
                places = [place + 0.2 * (i - 1.5) for place in range(len(rates))]
                axis.bar(places, rates, 0.2, label=name)
                axis.set(xlabel="drafts verified", ylabel="tokens/s after the first, one row")
                axis.set_xticks(range(len(rates)), list(found))
        axis.legend(fontsize=7)
    figure.suptitle(f"{result['device']}, whole replies, {result['drafts']} drafts")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="directory with a drafter")
    parser.add_argument("--work", type=Path, required=True, help="nano's corpus")
    parser.add_argument("--out", type=Path, required=True, help="result, without a suffix")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--minutes", type=float, default=9.5, help="after which the run has ended")
    parser.add_argument("--prompts", type=int, default=100, help="of each kind to time")
    parser.add_argument("--tokens", type=int, default=100 * TOKENS, help="of each kind, at least")
    parser.add_argument("--widths", type=int, nargs="+", default=[3, 5, 7])
    return parser.parse_args()


if __name__ == "__main__":
    main()
