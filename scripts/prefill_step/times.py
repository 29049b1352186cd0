"""Times of calls of `prefill`: one call, and a long prompt chunk by chunk."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from inkling_jax.cache import rollback
from inkling_jax.planning.hardware import peak_rates
from scripts.decode_step.parts import ROOM, random_cache
from scripts.prefill_step.calls import Call, Program, new_cache, work

REPEATS = {"kernels": 5, "plain": 2}


def call_seconds(call: Call, program: Program, params: nnx.State, context: int) -> list[float]:
    """Seconds of a call, several times."""
    cache, times = random_cache(call.part, call.capacity - ROOM, context), []
    vocabulary = call.part.config.text.unpadded_vocab_size
    tokens = jax.random.randint(jax.random.key(2), (1, call.tokens), 0, vocabulary)
    lengths = jnp.full(1, call.tokens, jnp.int32)
    for _ in range(1 + REPEATS[call.path]):
        cache = jax.block_until_ready(rollback(cache, jnp.full(1, context, jnp.int32)))
        begin = time.perf_counter()
        logits, cache = jax.block_until_ready(program.run(params, tokens, lengths, cache))
        times.append(time.perf_counter() - begin)
    if not bool(jnp.isfinite(logits).all()):
        raise FloatingPointError(f"{call}: the logits are not finite")
    return times[1:]


def device_peak() -> int | None:
    """The most bytes that were in use on the device so far."""
    stats = jax.devices()[0].memory_stats()
    return stats and stats["peak_bytes_in_use"]


def measure(
    call: Call, program: Program, params: nnx.State, context: int, ceiling: float, rate: float
) -> dict[str, Any]:
    """Times a call and sets it beside what it has to do."""
    times = call_seconds(call, program, params, context)
    todo, seconds = work(call.part, context, call.tokens), statistics.median(times)
    rates = peak_rates(rate, ceiling, link=1.0)
    return {
        "part": call.part.name,
        "path": call.path,
        "layers": call.part.config.text.num_hidden_layers,
        "tokens": call.tokens,
        "context": context,
        "ms": 1e3 * seconds,
        "spread_ms": 1e3 * (max(times) - min(times)),
        "flop": todo.flops,
        "flop_by_part": {name: part.flops for name, part in todo.parts.items()},
        "share_of_matrix_ceiling": todo.flops / seconds / ceiling,
        "floor_ms": 1e3 * todo.expected(rates),
        "temporary_bytes": program.temporaries,
        "device_peak_bytes": device_peak(),
        "chosen": program.chosen,
    }


def read_long(call: Call, program: Program, params: nnx.State, total: int) -> dict[str, Any]:
    """Reads `total` tokens in chunks of a call, the last one shorter; keeps the last logits."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, call.part.config.text.unpadded_vocab_size, (1, total), np.int32)
    cache, times = new_cache(call), []
    for at in range(0, total, call.tokens):
        chunk = ids[:, at : at + call.tokens]
        count = chunk.shape[1]
        chunk = jnp.asarray(np.pad(chunk, ((0, 0), (0, call.tokens - count))))
        begin = time.perf_counter()
        logits, cache = program.run(params, chunk, jnp.full(1, count, jnp.int32), cache)
        logits = jax.block_until_ready(logits)
        times.append(time.perf_counter() - begin)
    return {
        "part": "long",
        "path": call.path,
        "layers": call.part.config.text.num_hidden_layers,
        "tokens": total,
        "chunk": call.tokens,
        "seconds": sum(times[1:]) + statistics.median(times),  # the first one loads the program
        "first_chunk_ms": 1e3 * times[1],
        "last_chunk_ms": 1e3 * times[-2],
        "temporary_bytes": program.temporaries,
        "cache_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(cache)),
        "device_peak_bytes": device_peak(),
        "chosen": program.chosen,
        "logits": np.asarray(logits[0]),
    }


def compare(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields rows of `read_long` with how far their last logits are from the first one's."""
    first = rows[0]["logits"]
    for row in rows:
        logits = row.pop("logits")
        error = float(np.linalg.norm(logits - first) / np.linalg.norm(first))
        yield row | {"differs": error, "same_token": bool(logits.argmax() == first.argmax())}
