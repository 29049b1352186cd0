"""Loops around the product's decode step: compiled side by side, and looked into."""

import ctypes
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from inkling_jax import kernel_choice
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


class Program(NamedTuple):
    """A compiled loop, what its body launches (see `launches`), and what `ops` chose for it."""

    run: Any
    launches: tuple[int, int]
    chosen: dict[str, str]


def start_compiling(cases: list[Case]) -> tuple[dict[Case, Future], Future | None]:
    """Compiles a loop for each case and, with kernels, what shows the picks of the longest step.

    Each in a process of its own: tracing the kernels of 48 layers is minutes of Python, which
    threads would share. Returns what `load` takes.
    """
    pool = compilers()
    loops = {case: pool.submit(_compile_loop, case) for case in cases}
    picks = pool.submit(_compile_picks, cases[0]) if cases[0].path == "kernels" else None
    pool.shutdown(wait=False)  # once all is compiled
    return loops, picks


def compilers() -> ProcessPoolExecutor:
    """Returns processes that compile, and that end when this one does."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # for the new processes
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(os.cpu_count(), context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    set_signal_of_parents_death = 1
    ctypes.CDLL(None).prctl(set_signal_of_parents_death, signal.SIGKILL)


def _compile_loop(case: Case) -> tuple[bytes, tuple[int, int], dict[str, str]]:
    trips = jax.ShapeDtypeStruct((), jnp.int32)
    program = _compile(case, "loop", step_loop, trips)
    return serialize(program)[0], launches(program.as_text()), kernel_choice.chosen()


def _compile_picks(case: Case) -> tuple[bytes]:
    program = _compile(case._replace(tokens=MAX_BLOCK), "picks", picks_of_a_step)
    return (serialize(program)[0],)


def _compile(case, name, make, *more):
    switch = str(int(case.path == "kernels"))
    os.environ[kernel_choice.SWITCH] = switch  # is read while functions are traced
    begin = time.monotonic()
    lowered = make(case).lower(*inputs(case), *more)
    traced = time.monotonic()
    program = lowered.compile()
    took = f"{traced - begin:.0f} s of tracing, {time.monotonic() - traced:.0f} s of compiling"
    print(f"# {case} {name}: {took}", flush=True)
    return program


def load_loop(case: Case, compiled: Future) -> Program:
    """Loads the loop of a case."""
    binary, counted, chosen = compiled.result()
    carry, params = inputs(case)
    trees = jax.tree.structure(((carry, params, 0), {})), jax.tree.structure(carry)
    return Program(load(binary, trees), counted, chosen)


def load_picks(case: Case, compiled: Future) -> Any:
    """Loads what shows the picks of a step."""
    [binary] = compiled.result()
    return load(binary, (jax.tree.structure((inputs(case), {})), jax.tree.structure(0)))


def load(binary, trees):
    """Loads what `serialize` gave, of the trees of its (args, kwargs) and of its result."""
    return deserialize_and_load(binary, *trees, execution_devices=jax.devices()[:1])


def as_they_are_ready(
    loops: dict[Case, Future], path: str, beside: list[Future], deadline: float
) -> Iterator[tuple[Case, Program]]:
    """Yields a path's programs; waits for all of them, but each time half the time that is left.

    While one runs nothing should compile, as XLA tries variants on the device; that goes for what
    compiles `beside` them, too.
    """
    pending = [case for case in loops if case.path == path]
    while pending and (left := deadline - time.monotonic()) > 0:
        wait([loops[case] for case in pending] + beside, timeout=left / 2)
        for case in [case for case in pending if loops[case].done()]:
            pending.remove(case)
            if error := loops[case].exception():  # must not hide the others
                print(f"# {case}: {type(error).__name__}: {error}", flush=True)
            else:
                yield case, load_loop(case, loops[case])


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
