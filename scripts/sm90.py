"""Compiles functions for an H200 on a machine without a GPU, and reads what ptxas made of them.

Needs the CUDA wheels (`jax[cuda13]`); nothing here touches a device.
"""

import contextlib
import dataclasses
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    SingleDeviceSharding,
)
from jax.sharding import PartitionSpec as P

from inkling_jax.planning.hardware import HARDWARE

H200 = HARDWARE["h200"].target_config


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one kernel takes of a multiprocessor; `spills` is bytes stored plus bytes loaded."""

    name: str
    registers: int
    spills: int
    shared: int
    cubin: Path


def h200_mesh(axes: dict[str, int]) -> Mesh:
    """Returns a mesh of H200s of one host, with these names and sizes of axes."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=H200,
        topology=f"1x1x{math.prod(axes.values())}",
        topology_name="h200",
    )
    return Mesh(np.reshape(topology.devices, tuple(axes.values())), tuple(axes))


def compile_h200(
    fn: Callable,
    *args: Any,
    dump: Path | None = None,
    donate_argnums: tuple[int, ...] = (),
    mesh: Mesh | None = None,
) -> Any:
    """Compiles `fn` of arrays for one H200, or for several.

    Args:
      fn: a function that can be jitted; with a mesh, its `shard_map`.
      *args: arrays or ShapeDtypeStructs (pytrees of them), with a mesh the same on all devices.
      dump: folder for XLA's dump, PTX included.
      donate_argnums: as `jax.jit` takes them.
      mesh: from `h200_mesh`; Pallas-Triton does not lower for it.
    """
    if mesh:
        sharding = NamedSharding(mesh, P())
    else:
        sharding = SingleDeviceSharding(h200_mesh({"x": 1}).devices.item())
    device = AbstractDevice("NVIDIA H200", None, "cuda")
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    options = {"xla_dump_to": str(dump), "xla_dump_emitter_re": ".*"} if dump else {}
    one = AbstractMesh((1,), ("x",), axis_types=(AxisType.Manual,), abstract_device=device)
    with contextlib.nullcontext() if mesh else jax.sharding.use_abstract_mesh(one):
        lowered = jax.jit(fn, donate_argnums=donate_argnums).lower(*shapes)
    return lowered.compile(compiler_options=options)


def resources(fn: Callable, *args: Any, folder: Path | None = None) -> list[Resources]:
    """Returns the resources of every kernel of `fn` by ptxas; arguments as `compile_h200`."""
    dump = folder or Path(tempfile.mkdtemp())
    compile_h200(fn, *args, dump=dump)
    found = []
    for ptx in sorted(dump.glob("*.ptx")):
        ptxas = Path(jax.__file__).parents[1] / "nvidia/cu13/bin/ptxas"
        cubin = ptx.with_suffix(".cubin")
        command = [ptxas, "-v", "-arch=sm_90a", ptx, "-o", cubin]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        for part in log.split("Compiling entry function")[1:]:
            spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", part))
            registers = int(re.findall(r"Used (\d+) registers", part)[0])
            shared = int((re.findall(r"(\d+) bytes smem", part) or ["0"])[0])
            found.append(Resources(part.split("'")[1], registers, spills, shared, cubin))
    return found
