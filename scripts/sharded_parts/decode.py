"""A decoding step of some layers of full width over tp, with its collectives and without."""

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from inkling_jax import ops
from inkling_jax.cache import cache_specs
from inkling_jax.model import param_specs
from inkling_jax.planning import floors
from inkling_jax.planning.hardware import HARDWARE
from inkling_jax.planning.shapes import place
from scripts.bench_decode import read_rate, step_seconds
from scripts.decode_step.parts import ROOM, bytes_of_a_step, random_cache, random_params
from scripts.decode_step.programs import Case, step_loop
from scripts.sharded_parts.programs import row, side_by_side
from scripts.sharded_parts.slices import copies, join_cache, join_params, shapes, some_layers

CONTEXT, SHORT_CONTEXT = 8192, 64  # tokens read before; where sizes are small
PATHS = ("plain", "kernels")
PLANNED = HARDWARE["h200"].reachable


def decode(devices: Sequence[Any], options: argparse.Namespace) -> Iterator[dict | None]:
    """Yields the read ceiling, then a row for plain JAX and kernels, over tp and without the rest.

    "share" is what one device holds, as a model of its own: the same weights and products without
    collectives. A step reads one token, so of the experts exactly those that it picks.
    """
    part = some_layers(devices, options.small)
    context = SHORT_CONTEXT if options.small else CONTEXT
    mesh, over = part.mesh(), f"tp={len(devices)}"
    lowered, chosen = {}, {}
    for path in PATHS:
        os.environ[ops.SWITCH] = str(int(path == "kernels"))  # is read while functions are traced
        lowered[path, "share"] = _lower_decode(Case(part.rank, path, 1, (context,)), None)
        lowered[path, over] = _lower_decode(Case(part.whole, path, 1, (context,)), mesh)
        chosen[path] = ops.chosen()
    compiled = side_by_side({case: program.compile for case, program in lowered.items()})
    yield None
    rate = read_rate(1 << 20 if options.small else 1 << 32)
    yield {"read_bytes_per_second": rate}

    text = part.whole.config.text
    local, cache = random_params(part.rank, packed=False), random_cache(part.rank, context, context)
    size = bytes_of_a_step(part.rank, local, text.num_experts_per_tok, context)
    work = floors.step("decode", part.shard(), 1, context, 1, 1)
    token = jnp.zeros((1, 1), jnp.int32)
    given = {
        "share": ((token, cache), local),
        over: (
            (token, join_cache(part, copies(cache, devices), mesh, context)),
            join_params(part, copies(local, devices), mesh),
        ),
    }

    def measure(path: str, where: str) -> dict[str, Any]:
        times = step_seconds(compiled[path, where].result(), *given[where], ROOM)
        middle = statistics.median(times)
        expected = work.expected(PLANNED)
        if where == "share":
            expected -= work.communication(PLANNED)
        return {
            "ms": 1e3 * middle,
            "spread_ms": 1e3 * (max(times) - min(times)),
            "bytes": size,
            "floor_ms": 1e3 * size / rate,
            "share_of_ceiling": size / rate / middle,
            "predicted_ms": 1e3 * expected,
            "chosen": chosen[path],
        }

    for path, where in compiled:
        yield row({"path": path, "where": where, "context": context}, measure, path, where)


def _lower_decode(case: Case, mesh: Mesh | None) -> jax.stages.Lowered:
    params = shapes(case.part)
    cache = jax.eval_shape(lambda: random_cache(case.part, case.contexts[0], 0))
    token, trips = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 1), ()))
    if mesh is None:
        return step_loop(case).lower((token, cache), params, trips)
    with jax.set_mesh(mesh):
        cache = place(cache, cache_specs(cache, mesh), mesh)
        params = place(params, param_specs(params, mesh), mesh)
        return step_loop(case).lower((token, cache), params, trips)
