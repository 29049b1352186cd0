"""A decoding step of some layers of full width over tp, with its collectives and without."""

import argparse
import contextlib
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from inkling_jax import kernel_choice, ops
from inkling_jax.cache import Cache, cache_specs
from inkling_jax.planning import floors
from inkling_jax.planning.hardware import HARDWARE
from inkling_jax.planning.shapes import place
from scripts.bench_decode import read_rate, step_seconds
from scripts.decode_step.parts import ROOM, Part, bytes_of_a_step, random_cache
from scripts.decode_step.programs import Case, step_loop
from scripts.sharded_parts.programs import row, side_by_side
from scripts.sharded_parts.slices import copies, drawn, join, on, some_layers, stored

CONTEXT, SHORT_CONTEXT = 8192, 64  # tokens read before; where sizes are small
PSUM = "kernels, psum"
PATHS = ("plain", PSUM, "kernels")  # the last adds up within a kernel
PLANNED = HARDWARE["h200"].reachable


def decode(devices: Sequence[Any], options: argparse.Namespace) -> Iterator[dict | None]:
    """Yields the read ceiling, then a row for each path, over tp and for a device's share alone.

    "share" is what one device holds, as a model of its own: the same weights and products without
    collectives. A step reads one token, so of the experts exactly those that it picks.
    """
    part = some_layers(devices, options.small)
    context = SHORT_CONTEXT if options.small else CONTEXT
    places: dict[str, tuple[Part, Mesh | None]] = {
        "share": (part.rank, None),
        f"tp={len(devices)}": (part.whole, part.mesh()),
    }
    paths = PATHS[:1] if options.small else PATHS  # where there is no GPU all are plain
    lowered, chosen = {}, {}
    for path in paths:
        for where, (held, mesh) in places.items():
            with choosing(path):
                lowered[path, where] = _lower_decode(Case(held, path, 1, (context,)), mesh)
        chosen[path] = kernel_choice.chosen()
    compiled = side_by_side({case: program.compile for case, program in lowered.items()})
    yield None
    rate = read_rate(1 << 20 if options.small else 1 << 32)
    yield {"read_bytes_per_second": rate}
    shard = part.shard()
    picks = part.whole.config.text.num_experts_per_tok
    token = jnp.zeros((1, 1), jnp.int32)

    def measure(path: str, where: str, params: nnx.State, cache: Cache) -> dict[str, Any]:
        held, mesh = places[where]
        size = bytes_of_a_step(part.rank, params, picks, context)
        with choosing(path):
            work = floors.step("decode", shard, 1, context, 1, 1)
            if mesh:
                params = join(copies(params, devices), stored(held, mesh))
        if mesh:
            cache = join(copies(cache, devices), _cache_of(held, context, mesh))
        times = step_seconds(compiled[path, where].result(), (token, cache), params, ROOM)
        middle = statistics.median(times)
        expected = work.expected(PLANNED) - (0 if mesh else work.communication(PLANNED))
        return {
            "ms": 1e3 * middle,
            "spread_ms": 1e3 * (max(times) - min(times)),
            "bytes": size,
            "floor_ms": 1e3 * size / rate,
            "share_of_ceiling": size / rate / middle,
            "predicted_ms": 1e3 * expected,
        } | ({"chosen": chosen[path]} if mesh else {})

    for path in paths:
        with choosing(path):
            share = drawn(part.rank), random_cache(part.rank, context, context)
        for where in places:
            name = {"path": path, "where": where, "context": context}
            yield row(name, measure, path, where, *share)
        del share  # before the next is drawn


@contextlib.contextmanager
def choosing(path: str) -> Iterator[None]:
    """Makes `ops` choose what the path is about."""
    switch = mock.patch.dict(os.environ, {kernel_choice.SWITCH: str(int(path != "plain"))})
    rows = ops.REDUCED_ROWS if path == "kernels" else 0
    with switch, mock.patch.object(ops, "REDUCED_ROWS", rows):
        yield


def _lower_decode(case: Case, mesh: Mesh | None) -> jax.stages.Lowered:
    token, trips = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 1), ()))
    carry = (token, _cache_of(case.part, case.contexts[0], mesh))
    with on(mesh):
        return step_loop(case).lower(carry, stored(case.part, mesh), trips)


def _cache_of(part: Part, context: int, mesh: Mesh | None) -> Cache:
    """Its shapes, and where they lie on a mesh."""
    cache = jax.eval_shape(lambda: random_cache(part, context, 0))
    return place(cache, cache_specs(cache, mesh), mesh) if mesh else cache
