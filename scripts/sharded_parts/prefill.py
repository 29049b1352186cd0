"""Prefill of some layers of full width over tp: tokens split (sp) or not, time and memory."""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from inkling_jax import moe
from inkling_jax.cache import Cache, cache_specs, init_cache
from inkling_jax.config import Config
from inkling_jax.model import forward, unembed
from inkling_jax.planning import floors, programs
from inkling_jax.planning.hardware import HARDWARE
from inkling_jax.planning.shapes import place
from scripts.decode_step.parts import MAX_BLOCK, Part
from scripts.sharded_parts.programs import row, side_by_side
from scripts.sharded_parts.slices import (
    Slice,
    copies,
    drawn,
    join,
    some_layers,
    stored,
    tokens_of,
)
from sharding.mesh import Switch, make_mesh

TOKENS, FEW_TOKENS = 8192, 64  # all of them new; where sizes are small
REPEATS = 4
SWITCHES: tuple[Switch, ...] = ("on", "off")  # in this order, as a peak of memory only rises
PLANNED = HARDWARE["h200"]


def prefill(devices: Sequence[Any], options: argparse.Namespace) -> Iterator[dict | None]:
    """Yields what the planner says of the memory, then rows with the model's experts and without.

    Times are of tokens split (sp) and not, in turn. Experts take most of the time and splitting
    spares none of it, so what it saves shows more without them. Memory is what the compiler plans
    for the program, and by how much a run exceeds what the last device holds: on it no weights were
    drawn. Predicted times are the planner's of these very layers.
    """
    part, count = some_layers(devices, options.small), FEW_TOKENS if options.small else TOKENS
    cases = [(experts, sp) for experts in EXPERTS for sp in SWITCHES]
    compiled = side_by_side(
        {case: _lower_prefill(part, *case, count).compile for case in cases}
        | {sp: functools.partial(_plan, part, sp, count, options.small) for sp in SWITCHES}
    )
    yield None
    shares = copies(drawn(part.rank), devices)

    def measure(experts: str) -> dict[str, Any]:
        runs, found = {}, {}
        for sp in SWITCHES:
            mesh, program = part.mesh(sp), compiled[experts, sp].result()
            with jax.set_mesh(mesh):
                cache = jax.jit(functools.partial(_empty_cache, part.whole, count))()
            params, tokens = join(shares, stored(part.whole, mesh)), tokens_of(part, count)
            runs[sp] = functools.partial(program, params, tokens, cache)
            found[sp] = _memory(program, runs[sp], devices[-1])
        for sp, times in _in_turn(runs).items():
            found[sp] |= {
                "ms": 1e3 * statistics.median(times),
                "spread_ms": 1e3 * (max(times) - min(times)),
                "predicted_ms": 1e3 * _work(part, experts, sp, count).expected(PLANNED.reachable),
            }
        return {f"sp={sp}": figures for sp, figures in found.items()} | {
            f"{name}saved": 1 - found["on"][f"{name}ms"] / found["off"][f"{name}ms"]
            for name in ("", "predicted_")
        }

    for sp in SWITCHES:
        yield row({"planned": f"sp={sp}"}, compiled[sp].result)
    for experts in EXPERTS:
        yield row({"experts": experts, "tokens": count}, measure, experts)


def _no_experts(z, picks, weights, *_, **__):
    """What experts give in shape and dtype, from all that devices have told each other for them."""
    return z.astype(jnp.float32) * jnp.sum(jnp.where(picks < 0, 0, weights), -1, keepdims=True)


EXPERTS = {"of the model": moe.experts, "left out": _no_experts}


def _lower_prefill(part: Slice, experts: str, sp: Switch, count: int) -> jax.stages.Lowered:
    mesh, tokens = part.mesh(sp), jax.ShapeDtypeStruct((1, count), jnp.int32)
    cache = jax.eval_shape(functools.partial(_empty_cache, part.whole, count))
    cache = place(cache, cache_specs(cache, mesh), mesh)
    run = functools.partial(_prefill, part.whole.config, EXPERTS[experts])
    with jax.set_mesh(mesh):
        return jax.jit(run).lower(stored(part.whole, mesh), tokens, cache)


def _prefill(
    config: Config,
    experts: Callable,
    params: nnx.State,
    tokens: Int[Array, "1 T"],
    cache: Cache,
) -> tuple[Float[Array, "1 V"], Cache]:
    """`generation.prefill` with these experts."""
    lengths = jnp.full(1, tokens.shape[1], jnp.int32)
    out = forward(params, config, tokens, lengths, cache, experts=experts)
    return unembed(params, config, out.hidden[:, -1]), out.cache


def _empty_cache(part: Part, capacity: int) -> Cache:
    return init_cache(part.config.text, 1, capacity, MAX_BLOCK, part.dtype)


def _memory(program: Any, run: Callable[[], Any], device: Any) -> dict[str, int]:
    """Bytes of the program's temporaries; by how much a run exceeds what the device holds."""
    before = device.memory_stats()
    jax.block_until_ready(run())
    after = device.memory_stats()
    found = {"temporaries": program.memory_analysis().temp_size_in_bytes}
    if after and after["peak_bytes_in_use"] > before["peak_bytes_in_use"]:
        found["peak"] = after["peak_bytes_in_use"] - before["bytes_in_use"]
    return found


def _in_turn(runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of each, again and again one after the other."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - begin)
            print(f"# {name}: {times[name][-1]:.3f} s", flush=True)
    return times


def _plan(part: Slice, sp: Switch, count: int, small: bool) -> dict[str, int]:
    """Bytes of temporaries as planned without a device, and those live between collectives."""
    target = "cpu" if small else "cuda"
    mesh = make_mesh(part.config(sp), programs.devices(target, PLANNED, len(part.devices)))
    params = stored(part.whole, mesh)
    program = programs.compile_program(
        "prefill", part.whole.config, params, mesh, target, 1, count, count
    )
    return {
        "temporaries": program.temporaries,
        "between_collectives": floors.activation_bytes(part.shard(), count, sp == "on"),
    }


def _work(part: Slice, experts: str, sp: Switch, count: int) -> floors.Work:
    work = floors.step("prefill", part.shard(), 1, 0, count, 1, sp == "on")
    if experts == "left out":
        del work.parts["experts"]
    return work
