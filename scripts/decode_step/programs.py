"""Loops around the product's decode step: traced, compiled side by side, and looked into."""

import concurrent.futures
import os
import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from inkling_jax import ops
from inkling_jax.generation import decode
from inkling_jax.model import forward
from inkling_jax.moe import experts
from scripts.decode_step.parts import MAX_BLOCK, Part, random_cache, random_params

STRIDE = 7919  # between the ids of a step's tokens


class Case(NamedTuple):
    """A program: a part, "kernels" or "plain", tokens a step, and the contexts it is timed at."""

    part: Part
    path: str
    tokens: int
    contexts: tuple[int, ...]

    def __str__(self):
        return f"{self.part.name}/{self.path}/{self.tokens}/{max(self.contexts)}"


def all_cases(parts: list[Part], path: str, contexts: tuple[int, ...]) -> list[Case]:
    """Lists the programs; kernels skip empty slots of a cache, the plain path reads them all."""
    if path == "kernels":
        return [Case(part, path, n, contexts) for part in parts for n in (1, 4, 8)]
    return [Case(p, path, n, (context,)) for p in parts for n in (1, 8) for context in contexts]


def step_loop(case: Case) -> Any:
    """Returns the jitted loop ((tokens, cache), params, trips) -> (tokens, cache)."""
    config = case.part.config

    def step(carry, params):
        tokens, cache = carry
        logits, cache = decode(params, config, tokens, cache)
        drawn = jnp.argmax(logits, axis=-1).astype(jnp.int32) + far_apart(case.tokens)
        return drawn % config.text.unpadded_vocab_size, cache

    def run(carry, params, trips):
        def body(state):
            return state[0] + 1, step(state[1], params)

        return jax.lax.while_loop(lambda state: state[0] < trips, body, (jnp.int32(0), carry))[1]

    return jax.jit(run)


def picks_of_a_step(case: Case) -> Any:
    """Returns a jitted function ((tokens, cache), params) -> picks [layers, tokens, k]."""

    def run(carry, params):
        picked = []

        def watched(z, picks, *rest, **plan):
            picked.append(picks)
            return experts(z, picks, *rest, **plan)

        tokens, cache = carry
        lengths = jnp.full(1, tokens.shape[1], jnp.int32)
        forward(params, case.part.config, tokens, lengths, cache, experts=watched)
        return jnp.stack(picked)

    return jax.jit(run)


def far_apart(tokens: int) -> jax.Array:
    """Ids [1, tokens] that differ."""
    return STRIDE * jnp.arange(tokens, dtype=jnp.int32)[None]


def inputs(case: Case) -> tuple:
    """Returns the shapes of ((tokens, cache), params)."""
    cache = jax.eval_shape(lambda: random_cache(case.part, max(case.contexts), 0))
    params = jax.eval_shape(lambda: random_params(case.part, case.path == "kernels"))
    return (jax.ShapeDtypeStruct((1, case.tokens), jnp.int32), cache), params


def compile_all(path: str, cases: list[Case], deadline: float) -> dict[Case | Part, Any]:
    """Compiles side by side a loop for each case and, for each part, what shows its picks.

    Returns what was ready in time: loops by their case, the others by their part.
    """
    os.environ[ops.SWITCH] = str(int(path == "kernels"))  # is read while functions are traced
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())

    def compiled(name, lowered):
        begin = time.monotonic()
        try:
            program = lowered.compile()
        except Exception as error:  # one that fails to build must not hide the others
            print(f"# {name}: {error}", flush=True)
            raise
        print(f"# {name}: compiled in {time.monotonic() - begin:.0f} s", flush=True)
        return program

    futures = {}
    for case in cases:
        lowered = step_loop(case).lower(*inputs(case), jax.ShapeDtypeStruct((), jnp.int32))
        futures[case] = pool.submit(compiled, case, lowered)
    if path == "kernels":
        for case in {case.part: case._replace(tokens=MAX_BLOCK) for case in cases}.values():
            lowered = picks_of_a_step(case).lower(*inputs(case))
            futures[case.part] = pool.submit(compiled, f"{case.part.name}/picks", lowered)
    concurrent.futures.wait(futures.values(), timeout=max(deadline - time.monotonic(), 0))
    pool.shutdown(wait=False, cancel_futures=True)
    ready = {key: f for key, f in futures.items() if f.done() and not f.cancelled()}
    return {key: f.result() for key, f in ready.items() if not f.exception()}


def launches(program: str) -> tuple[int, int]:
    """Counts what the body of a program's `while` launches (kernels, copies, library calls).

    Returns those of a step, and those of them that belong to a layer.
    """
    body = re.findall(r" while\(.*body=%?([\w.\-]+)", program)[-1]
    text = re.search(rf"^%?{re.escape(body)} .*?\{{\n(.*?)^\}}", program, re.S | re.M)
    assert text, f"the program has no computation {body}"
    free = "parameter|constant|get-tuple-element|tuple|bitcast|iota"
    lines = re.sub(rf"^.* (?:{free})\(.*\n", "", text[1], flags=re.M).splitlines()
    return len(lines), sum("/layer_" in line for line in lines)
