"""The full model's programs, compiled without weights and without the devices.

With JAX's CUDA plugin they are compiled for the GPU: its kernels, its collectives and the memory
that its compiler plans. Otherwise they are compiled for simulated CPU devices, which shows that
everything fits together; the CPU's own use of memory says nothing about a GPU's.
"""

import collections
import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import time
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from inkling_jax import kernel_choice, ops
from inkling_jax.cache import cache_specs
from inkling_jax.config import Config
from inkling_jax.generation import decode, prefill
from inkling_jax.model import param_specs
from inkling_jax.planning.floors import Collective
from inkling_jax.planning.hardware import Hardware
from inkling_jax.planning.shapes import abstract_cache, place
from sharding.mesh import mesh_axes

Target = Literal["cuda", "cpu"]
# Code that never runs need not be tuned.
OPTIONS: dict[Target, dict[str, Any]] = {
    "cuda": {"xla_gpu_autotune_level": 0},
    "cpu": {"xla_backend_optimization_level": 0},
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      name: of the step.
      seconds: that lowering and compiling took.
      arguments, temporaries: bytes that the compiler plans on each device.
      collectives: what it asks the devices to exchange.
      kernels: what computes each operation that has a kernel, of those that decoding uses.
    """

    name: str
    seconds: float
    arguments: int
    temporaries: int
    collectives: tuple[Collective, ...]
    kernels: dict[str, str]


def default_target() -> Target:
    """Returns what this installation can compile for."""
    return "cuda" if importlib.util.find_spec("jax_cuda13_plugin") else "cpu"


def devices(target: Target, hardware: Hardware, count: int) -> Sequence[Any]:
    """Returns devices to compile for, at least `count` where they can be had.

    GPUs need not be there. The CPU stands for several devices if JAX has not looked for any yet.
    """
    if target == "cuda":
        return topologies.get_topology_desc(
            platform="cuda",
            target_config=hardware.target_config,
            topology=f"1x{count}x1",
            topology_name="planned",
        ).devices
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    return jax.devices("cpu")


def compile_program(
    name: str,
    config: Config,
    params: nnx.State,
    mesh: Mesh,
    target: Target,
    rows: int,
    context: int,
    tokens: int,
) -> Program:
    """Compiles one step, as `inkling_jax.decode` or `inkling_jax.prefill` under the mesh.

    Args:
      name: of the step, a prefill if it begins so.
      params: shapes.
      mesh: of devices of the target.
      rows, context: of the cache.
      tokens: new ones of each row.
    """
    cache = abstract_cache(config.text, rows, context, mesh)

    def ids(*shape: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, jax.P(mesh_axes(mesh.shape, "dp")))
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    step, lengths = (prefill, (ids(rows),)) if name.startswith("prefill") else (decode, ())
    began = time.perf_counter()
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, static_argnames="config", donate_argnames="cache")
        lowered = jitted.lower(
            place(params, param_specs(params, mesh), mesh),
            config,
            ids(rows, tokens),
            *lengths,
            place(cache, cache_specs(cache, mesh), mesh),
        )
    compiled = lowered.compile(compiler_options=OPTIONS[target])
    memory: Any = compiled.memory_analysis()
    return Program(
        name,
        round(time.perf_counter() - began, 1),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        read_collectives(compiled.as_text() or ""),
        {} if lengths else kernel_choice.chosen(),
    )


_LINE = re.compile(
    r"= (?P<shape>\S.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|"
    r"collective-permute)(?P<start>-start)?\((?P<rest>.*)"
)
_PEERS = re.compile(
    r'= (?P<shape>\S.*?) custom-call\((?P<rest>.*xla_replica_ids = "(?P<ids>.*?)".*)'
)
_OUTER = re.compile(r"jit\([^)]*\)/|shard_map/|layer_\d+/")  # say nothing of what is exchanged
_ARRAY = re.compile(r"\b([a-z]+[0-9a-z]*)\[([0-9,]*)\]")


def read_collectives(hlo: str) -> tuple[Collective, ...]:
    """Returns the collectives of a compiled program's text, equal ones of all layers together.

    Kernels that read what other devices have are among them: one summand from each, as large as
    the running sum that they give.
    """
    found: collections.Counter[tuple] = collections.Counter()
    for line in hlo.splitlines():
        if match := _LINE.search(line):
            devices = _group(match["rest"])
            shape = match["shape"]
            if match["start"] and shape.startswith("(("):  # (inputs, outputs)
                shape = shape.partition("), ")[2]
            nbytes = sum(_array_bytes(*array) for array in _ARRAY.findall(shape))
            if match["kind"] == "reduce-scatter":
                nbytes *= devices  # the text has each device's slice only
            found[match["kind"], _scope(match["rest"]), nbytes, devices] += 1
        elif match := _PEERS.search(line):
            floats = [a for a in _ARRAY.findall(match["shape"]) if a[0] == "f32"]
            where = _scope(match["rest"]).removesuffix(f"/{ops.REDUCE_MIX}")
            devices = match["ids"].count(",") + 1
            found[ops.REDUCE_MIX, where, _array_bytes(*floats[0]), devices] += 1
    return tuple(
        Collective(kind, where, count, nbytes, devices)
        for (kind, where, nbytes, devices), count in found.items()
    )


def _array_bytes(dtype: str, shape: str) -> int:
    bits = 8 if dtype == "pred" else int((re.findall(r"\d+", dtype) or ["0"])[0])
    return math.prod(int(n) for n in shape.split(",") if n) * bits // 8


def _group(rest: str) -> int:
    """Returns how many devices take part, from any of XLA's three ways to write it."""
    if named := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    if tiled := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(tiled[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return listed[1].count(",") + 1
    return 2  # pairs of a permutation


def _scope(rest: str) -> str:
    """Returns the named scopes that a collective belongs to, layers not told apart."""
    name = (re.findall(r'op_name="([^"]*)"', rest) or [""])[0]
    paths = _OUTER.sub("", name).replace("(", "").replace(")", "").split(":")
    return " + ".join(dict.fromkeys(path.rpartition("/")[0] for path in paths)) or "model"
