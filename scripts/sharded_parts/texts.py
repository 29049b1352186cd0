"""Greedy text over tp: sums within the kernel that ends a sublayer, and NCCL's in front of it."""

import argparse
import collections
import concurrent.futures
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

import inkling_jax as ij
from inkling_jax import generation, speculative
from inkling_jax.config import Config
from inkling_jax.planning.programs import read_collectives
from inkling_jax.proposing import Speculator
from inkling_jax.sampling import Sampling, keys_from_seeds
from scripts.sharded_parts.agreement import NANO, TOLERANCE
from scripts.sharded_parts.decode import PSUM, choosing
from scripts.sharded_parts.programs import row
from scripts.sharded_parts.slices import drawn_whole, on, some_layers, tokens_of

WAYS = ("kernels", PSUM)
PROMPT, APART = 120, 40  # tokens of each row's prompt, and from one prompt's start to the next's
REPLY, SHORT_REPLY = 64, 4  # tokens; where sizes are small
DRAFTS = 7  # a round reads as many tokens as are added up within the kernel
Text = tuple[Int[Array, "B n"], Float[Array, "B n"]]  # ids and their log probabilities


class Model(NamedTuple):
    """What gives text, and the devices that it is spread over."""

    config: Config
    params: nnx.State
    speculator: Speculator | None
    mesh: Mesh


def nano(
    devices: Sequence[Any],
    options: argparse.Namespace,
    dtype: str,
    rows: Sequence[int],
    drafts: int | None = None,
) -> Iterator[dict | None]:
    """Yields a row for each number of prompts that the shipped model continues together."""
    drafter = None if drafts is None else "auto"
    engine = ij.load(
        NANO, dtype=dtype, mesh=f"tp={len(devices)}", drafter=drafter, draft_tokens=drafts
    )
    assert engine.tokenizer is not None and engine.mesh is not None
    print("# nano is loaded", flush=True)
    ids = np.array(engine.tokenizer.encode(json.__doc__), np.int32)
    model = Model(engine.config, engine.params, engine.speculator, engine.mesh)
    prompts = [np.stack([ids[APART * i :][:PROMPT] for i in range(n)]) for n in rows]
    yield from _compared(model, {"model": "nano", "dtype": dtype, "drafts": drafts}, prompts)


def layers(devices: Sequence[Any], options: argparse.Namespace) -> Iterator[dict | None]:
    """Yields a row for one prompt to six layers of full width."""
    part = some_layers(devices, options.small)
    mesh = part.mesh()
    model = Model(part.whole.config, drawn_whole(part.whole, mesh), None, mesh)
    name = {"model": "six layers", "dtype": jnp.dtype(part.whole.dtype).name}
    reply = SHORT_REPLY if options.small else REPLY
    yield from _compared(model, name, [np.asarray(tokens_of(part, PROMPT))], reply)


def _compared(
    model: Model, name: dict[str, Any], prompts: Sequence[np.ndarray], reply: int = REPLY
) -> Iterator[dict | None]:
    """Yields a row for each batch [B, T] of prompts; all programs compile at once."""
    with concurrent.futures.ThreadPoolExecutor(len(WAYS) * len(prompts)) as pool:
        programs = [
            {way: pool.submit(_lower(model, way, tokens, reply).compile) for way in WAYS}
            for tokens in prompts
        ]
        print("# all is lowered", flush=True)
        yield None

        def compare(tokens: np.ndarray, compiled: dict[str, Any]) -> dict[str, Any]:
            found = {way: program.result() for way, program in compiled.items()}
            texts = [found[way](model.params, model.speculator, tokens) for way in WAYS]
            exchanges = {way: _exchanges(program) for way, program in found.items()}
            return {"exchanges": exchanges} | agree(*texts, TOLERANCE[name["dtype"]])

        for tokens, compiled in zip(prompts, programs, strict=True):
            yield row({**name, "rows": len(tokens)}, compare, tokens, compiled)


def _lower(model: Model, way: str, tokens: np.ndarray, reply: int) -> jax.stages.Lowered:
    rows, width = tokens.shape

    def run(params: nnx.State, speculator: Speculator | None, tokens: jax.Array) -> Text:
        lengths, stop_ids = jnp.full(rows, width, jnp.int32), jnp.full((rows, 1), -1, jnp.int32)
        greedy = Sampling.stack([ij.SamplingParams(temperature=0.0)] * rows)
        asked = (tokens, lengths, greedy, keys_from_seeds(range(rows)), reply)
        if speculator is None:
            found, _ = generation.generate(params, model.config, *asked, stop_ids=stop_ids)
        else:
            found, *_ = speculative.generate(
                params, model.config, speculator, *asked, stop_ids=stop_ids
            )
        return found.ids, found.logprobs

    with choosing(way), on(model.mesh):
        return jax.jit(run).lower(model.params, model.speculator, tokens)


def _exchanges(program: jax.stages.Compiled) -> dict[str, int]:
    """Returns how many collectives of each kind a program has."""
    counts: collections.Counter[str] = collections.Counter()
    for found in read_collectives(program.as_text() or ""):
        counts[found.kind] += found.count
    return dict(counts)


def agree(found: Text, expected: Text, tolerance: float) -> dict[str, Any]:
    """Compares texts token by token, and log probabilities up to where a text differs."""
    (ids, logprobs), (other_ids, other_logprobs) = jax.device_get((found, expected))
    same = (ids == other_ids).cumprod(axis=1).astype(bool)
    largest = float(np.max(np.abs(logprobs - other_logprobs), where=same, initial=0.0))
    equal = int(same.all(axis=1).sum())
    return {
        "tokens": ids.shape[1],
        "equal_texts": equal,
        "largest_difference": largest,
        "correct": equal == len(ids) and largest < tolerance,
    }
