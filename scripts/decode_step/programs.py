"""Loops around the product's decode step: traced, compiled side by side, and looked into."""

import itertools
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from inkling_jax import ops
from inkling_jax.generation import decode
from inkling_jax.model import forward
from inkling_jax.moe import experts
from scripts.decode_step.parts import MAX_BLOCK, Part, params_shapes, random_cache

STRIDE = 7919  # between the ids of a step's tokens


class Case(NamedTuple):
    """A program: a part, "kernels" or "plain", tokens a step, and the contexts it is timed at."""

    part: Part
    path: str
    tokens: int
    contexts: tuple[int, ...]

    def __str__(self):
        return f"{self.part.name}/{self.path}/{self.tokens}/{max(self.contexts)}"


def all_cases(
    part: Part, path: str, tokens: tuple[int, ...], contexts: tuple[int, ...]
) -> list[Case]:
    """Lists a part's programs; kernels skip empty slots of a cache, the plain path reads them."""
    if path == "kernels":
        return [Case(part, path, n, contexts) for n in tokens]
    return [Case(part, path, n, (context,)) for n in tokens for context in contexts]


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
    tokens = jax.ShapeDtypeStruct((1, case.tokens), jnp.int32)
    return (tokens, cache), params_shapes(case.part, case.path == "kernels")


class Compiling(NamedTuple):
    """What compiles in the background.

    Attributes:
      loops: the loop of each case.
      picks: shows what the largest kernel step picks; None without kernels.
      chosen: of each path, what `ops` chose while its programs were traced.
    """

    loops: dict[Case, Future]
    picks: Future | None
    chosen: dict[str, dict[str, str]]


def start_compiling(cases: list[Case], deadline: float) -> Compiling:
    """Traces a part's programs until the deadline, each of which then compiles by itself."""
    pool = ThreadPoolExecutor(os.cpu_count())
    loops, picks, chosen = {}, None, {}

    def compiled(name, lowered):
        begin = time.monotonic()
        try:
            program = lowered.compile()
        except Exception as error:  # one that fails to build must not hide the others
            print(f"# {name}: {error}", flush=True)
            raise
        print(f"# {name}: compiled in {time.monotonic() - begin:.0f} s", flush=True)
        return program

    def start(name, fn, *shapes):
        begin = time.monotonic()
        lowered = fn.lower(*shapes)
        print(f"# {name}: traced in {time.monotonic() - begin:.0f} s", flush=True)
        return pool.submit(compiled, name, lowered)

    for path, group in itertools.groupby(cases, key=lambda case: case.path):
        os.environ[ops.SWITCH] = str(int(path == "kernels"))  # is read while functions are traced
        for case in group:
            if time.monotonic() > deadline:
                break
            trips = jax.ShapeDtypeStruct((), jnp.int32)
            loops[case] = start(str(case), step_loop(case), *inputs(case), trips)
            chosen[path] = ops.chosen()
        if path == "kernels" and time.monotonic() < deadline:
            case = cases[0]._replace(tokens=MAX_BLOCK)
            picks = start(f"{case.part.name}/picks", picks_of_a_step(case), *inputs(case))
    return Compiling(loops, picks, chosen)


def as_they_are_ready(
    loops: dict[Case, Future], path: str, deadline: float
) -> Iterator[tuple[Case, Any]]:
    """Yields a path's programs; waits for all of them, but each time half the time that is left.

    While one runs nothing should compile, as XLA tries variants on the device.
    """
    pending = [case for case in loops if case.path == path]
    while pending and (left := deadline - time.monotonic()) > 0:
        wait([loops[case] for case in pending], timeout=left / 2)
        for case in [case for case in pending if loops[case].done()]:
            pending.remove(case)
            if not loops[case].exception():
                yield case, loops[case].result()


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
