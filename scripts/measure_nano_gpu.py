"""Measures inkling-jax-nano on one GPU: bfloat16 against float32, and the decode loop's graph.

The decode loop runs in processes of their own, once as it is and once without XLA's command
buffers; the time of a step is the difference of two step counts, so that what a call costs drops
out. Compiling takes minutes on a fresh machine.

  PYTHONPATH=. python3 scripts/measure_nano_gpu.py
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two processes share the GPU

import jax
import jax.numpy as jnp
import numpy as np
from nano import agreement, corpus, questions
from nano.stamp import stamp

import inkling_jax as ij
from inkling_jax import generation
from inkling_jax.prompts import make_prompt
from inkling_jax.reading import read_prompts
from inkling_jax.sampling import keys_from_seeds

HERE = Path(__file__).parent
TEXT_ROWS, CHAT_ITEMS, ROW = 4, 128, 512
FEW, MANY, REPEATS = 64, 320, 5  # decoding steps, and timed pairs of them
CONTEXT = 1024
VARIANTS = {"graph": "", "no_graph": "--xla_gpu_enable_command_buffer="}  # flags for XLA


def main() -> None:
    """Measures, prints and writes the result."""
    args = _arguments()
    if args.loop:
        print(json.dumps(measure_loop(ij.load(args.model))))
        return
    began = time.monotonic()
    argmax = measure_argmax(args.model)
    print(json.dumps(argmax), f"after {time.monotonic() - began:.0f} s", flush=True)
    loop = {}
    for name, flag in VARIANTS.items():
        loop[name] = loop_in_process(args.model, flag)
        print(name, json.dumps(loop[name]), f"after {time.monotonic() - began:.0f} s", flush=True)
    graph, no_graph = (loop[name]["step_us"] for name in VARIANTS)
    result = {
        **stamp(args.model),
        "argmax": argmax,
        "decode_loop": {**loop, "ratio": round(no_graph / graph, 2)},
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(result, indent=1))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def measure_argmax(checkpoint: Path) -> dict[str, Any]:
    """Compares the most probable tokens of held-out text and of replies in both precisions."""
    documents = corpus.build()
    models = [ij.load(checkpoint, dtype=dtype) for dtype in ("bfloat16", "float32")]
    source = questions.make_source(documents, models[0], checkpoint)
    cases = _positions(models[0], source)
    with concurrent.futures.ThreadPoolExecutor() as pool:  # four programs, compiled at a time
        logits = {
            name: [pool.submit(_logits, model, *case[:2]) for model in models]
            for name, case in cases.items()
        }
    found = {}
    for name, (*_, counts) in cases.items():
        low, high = (future.result()[counts] for future in logits[name])
        positions, gaps = agreement.compare(low, high)
        found[name] = {
            "positions": positions,
            "different": len(gaps),
            "share_equal": round(1 - len(gaps) / positions, 5),
            "largest_gap_in_bf16_steps": round(float(gaps.max(initial=0.0)), 3),
            "beyond_one_step": int((gaps > 1).sum()),
        }
    return found


def _positions(model: ij.Engine, source: questions.Source) -> dict[str, tuple[np.ndarray, ...]]:
    """Returns (tokens, lengths, which positions count): text, and what a reply is read from."""
    text = source.tokens[: TEXT_ROWS * ROW].reshape(TEXT_ROWS, ROW)
    everywhere = np.ones(text.shape, bool)
    items = questions.chat_items(source, CHAT_ITEMS)
    width = ROW // 4
    tokens, counts = np.zeros((CHAT_ITEMS, width), np.int32), np.zeros((CHAT_ITEMS, width), bool)
    lengths = np.zeros(CHAT_ITEMS, np.int32)
    for i, item in enumerate(items):
        prompt, reply = questions.prompt_of(model, item).ids, questions.reply_of(model, item)
        lengths[i] = len(prompt) + len(reply)
        tokens[i, : lengths[i]] = prompt + reply
        counts[i, len(prompt) - 1 : lengths[i] - 1] = True
    return {
        "text": (text, np.full(TEXT_ROWS, ROW, np.int32), everywhere),
        "chat": (tokens, lengths, counts),
    }


def _logits(model: ij.Engine, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return np.asarray(_read(model.params, model.config, tokens, lengths))


@functools.partial(jax.jit, static_argnames="config")
def _read(params, config, tokens, lengths):
    cache = ij.init_cache(config.text, *tokens.shape, 1, params["embed"]["weight"].dtype)
    out = ij.forward(params, config, tokens, lengths, cache)
    return ij.unembed(params, config, out.hidden)


def loop_in_process(checkpoint: Path, flag: str) -> dict[str, Any]:
    """Runs `measure_loop` in a new process, with one more flag for XLA."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    command = [sys.executable, __file__, "--loop", "--model", str(checkpoint)]
    environment = {**os.environ, "XLA_FLAGS": flags}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def measure_loop(model: ij.Engine) -> dict[str, Any]:
    """Times a step of the greedy decode loop at batch 1, and whole greedy generation."""
    prompt = list(range(100))
    decode = jax.jit(generation.decode_block, static_argnames=("config", "steps"))
    state = _started(model, prompt)

    def seconds(budget: int) -> float:
        # One program for both counts: a row ends when its budget is spent.
        requests = dataclasses.replace(state.requests, budget=jnp.array([budget + 1]))
        begun = dataclasses.replace(state, requests=requests)
        jax.block_until_ready(begun)
        start = time.perf_counter()
        end, _ = decode(model.params, model.config, begun, MANY)
        count = int(end.count[0])
        took = time.perf_counter() - start
        assert count == budget + 1, (count, budget)
        return took

    seconds(MANY)
    pairs = [(seconds(MANY) - seconds(FEW)) / (MANY - FEW) * 1e6 for _ in range(REPEATS)]
    greedy = ij.SamplingParams(temperature=0.0, max_tokens=MANY, ignore_eos=True)
    rates = []
    for _ in range(3):
        start = time.perf_counter()
        [output] = model.generate([prompt], greedy)
        rates.append(len(output.token_ids) / (time.perf_counter() - start))
    return {
        "step_us": round(statistics.median(pairs), 2),
        "step_us_range": [round(min(pairs), 2), round(max(pairs), 2)],
        "generate_tokens_per_s": round(statistics.median(rates[1:]), 1),
    }


def _started(model: ij.Engine, prompt: list[int]) -> generation.GenerateState:
    """Reads a prompt and draws the first token; no token ends the row."""
    read = make_prompt(model.config, None, prompt)
    logits, rings = read_prompts(model.params, model.config, [read], CONTEXT, 1)
    requests = generation.Requests(
        ij.Sampling.stack([ij.SamplingParams(temperature=0.0)]),
        keys_from_seeds([0]),
        jnp.array([[generation.NO_TOKEN]]),
        jnp.array([MANY]),
    )
    return jax.jit(generation.begin)(logits, rings.cache, requests)[0]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shipped = HERE.parent / "checkpoints" / "inkling-jax-nano"
    parser.add_argument("--model", type=Path, default=shipped)
    parser.add_argument("--loop", action="store_true", help="only time the loop, in this process")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "nano_gpu.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
