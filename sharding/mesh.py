"""Meshes: how many devices work on what, from a short text such as `tp=4,dp=2`.

`tp` becomes one mesh axis per prime factor (`tp0`, `tp1`, … from the outside in): a dimension that
has fewer parts than `tp`, the key/value heads, is split over the outer ones and repeated over the
inner ones. Everything else names the whole group, `mesh_axes(mesh, "tp")`. The switch `sp` has no
devices of its own; a mesh carries it as the name of an axis of one, so that it goes where the mesh
goes and programs are compiled for each of its settings.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

GROUPS = ("dp", "cp", "ep", "tp")  # from the outside in: devices of a tp group are neighbours
Switch = Literal["auto", "on", "off"]
SWITCH = get_args(Switch)


class MeshError(ValueError):
    """A mesh that cannot be had: one sentence that says why and what would work."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """What the devices are for; their number is the product of the sizes.

    Attributes:
      dp: copies of the model, each with its part of the batch.
      cp: parts of the context: of the keys and values of layers that see all of it.
      ep: parts of the experts, each with whole experts; attention is the same in all of them.
      tp: parts of each layer: heads, columns of the experts, rows of the vocabulary.
      sp: whether prefill splits what is not split so, by tokens: residuals, norms, convolutions.
        "auto" leaves short calls whole, see `collectives.splits_tokens`.
    """

    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    sp: Switch = "auto"

    def __post_init__(self):
        for name in GROUPS:
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise MeshError(f"mesh: {name} is {size!r}, it must be a whole number from 1 on")
        if self.sp not in SWITCH:
            raise MeshError(f"mesh: sp is {self.sp!r}, it must be one of {', '.join(SWITCH)}")
        if self.sp == "on" and self.tp == 1:
            raise MeshError(
                "mesh: sp=on splits tokens over the devices of tp, which is 1; give tp=2 or more, "
                "or leave sp out"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `tp=4,dp=2,sp=on`, the name of a preset, or a YAML file of lines such as `tp: 4`.

        Raises:
          MeshError: the text is none of these; the faulty part is named.
        """
        if not isinstance(text, str):
            raise MeshError(f"mesh is {text!r:.40}, it must be a text such as tp=4,dp=2")
        text = PRESETS.get(text, text)
        if text.endswith((".yaml", ".yml")):
            return cls._from_parts(_read_yaml(Path(text)), ":", text)
        return cls._from_parts(text.split(","), "=", "mesh")

    @classmethod
    def _from_parts(cls, parts: Sequence[str], between: str, where: str) -> Self:
        found: dict[str, Any] = {}
        for part in parts:
            name, _, value = part.partition(between)
            name, value = name.strip(), value.strip(" \t\"'")
            size = value.isdecimal() and len(value) < 10
            if not (size if name in GROUPS else name == "sp" and value in SWITCH):
                raise MeshError(
                    f"{where}: {part.strip()!r:.60} is not understood; write sizes of "
                    f"{', '.join(GROUPS)} and sp={'|'.join(SWITCH)}, such as tp=4,dp=2,sp=on, or "
                    f"one of {', '.join(PRESETS)}"
                )
            if name in found:
                raise MeshError(f"{where}: {name} is given twice")
            found[name] = int(value) if name in GROUPS else value
        return cls(**found)

    @property
    def devices(self) -> int:
        """How many devices the mesh has."""
        return math.prod(getattr(self, name) for name in GROUPS)

    @property
    def axes(self) -> dict[str, int]:
        """Names and sizes of the mesh's axes, `tp` as its prime factors."""
        tp = {f"tp{i}": factor for i, factor in enumerate(_prime_factors(self.tp))}
        switch = {} if self.sp == "auto" else {f"sp_{self.sp}": 1}
        return {"dp": self.dp, "cp": self.cp, "ep": self.ep, **tp, **switch}

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in dataclasses.asdict(self).items())


# On GPUs tp alone: it divides the keys and values too, so that the longest context fits in either
# memory beside the weights; cp and ep are for several of those at a time. On simulated devices one
# copy of the model is split in every way there is, prompts of any length included.
PRESETS = {
    "gb200-tp4": "tp=4",
    "gb200-tp8": "tp=8",
    "h200-tp4": "tp=4",
    "h200-tp8": "tp=8",
    "cpu8": "cp=2,ep=2,tp=2,sp=on",
}


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Arranges devices, by default the first ones that JAX sees.

    These lie in the order of their ids, from 0 on, as kernels need that read other devices' memory;
    where a mesh has another order, Pallas refuses to lower them.

    Raises:
      MeshError: there are fewer devices than the mesh needs, or processes would be left out.
    """
    found = jax.devices() if devices is None else devices
    if config.devices > len(found):
        raise MeshError(
            f"mesh {config} needs {config.devices} devices, {len(found)} are there; use at most "
            f"{len(found)}{_more_cpu_devices(found, config.devices)}"
        )
    used = list(found[: config.devices])
    left_out = {d.process_index for d in found} - {d.process_index for d in used}
    if left_out:
        raise MeshError(
            f"mesh {config} uses {config.devices} of {len(found)} devices and none of the "
            f"processes {sorted(left_out)}; use all devices, or start fewer processes"
        )
    shape = tuple(config.axes.values())
    return Mesh(np.array(used).reshape(shape), tuple(config.axes), (AxisType.Auto,) * len(shape))


def abstract_mesh(config: MeshConfig) -> AbstractMesh:
    """Returns the mesh without its devices, for questions about shapes."""
    axes = config.axes
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def current_mesh() -> AbstractMesh | None:
    """Returns the mesh of `jax.set_mesh` that code runs under, None on one device or in a shard."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual in mesh.axis_types:
        return None
    return mesh


def mesh_axes(sizes: Mapping[str, int], group: str) -> tuple[str, ...]:
    """Returns the axes of a mesh that make up a group, those of one device left out.

    Args:
      sizes: `mesh.shape`.
      group: one of `GROUPS`.
    """
    names = (name for name in sizes if name.rstrip("0123456789") == group)
    return tuple(name for name in names if sizes[name] > 1)


def group_size(sizes: Mapping[str, int], group: str) -> int:
    """Returns over how many devices a group splits things; `sizes` is `mesh.shape`."""
    return math.prod(sizes[axis] for axis in mesh_axes(sizes, group))


def sequence_switch(sizes: Mapping[str, int]) -> Switch:
    """Returns what the mesh's configuration says of `sp`; `sizes` is `mesh.shape`."""
    return "on" if "sp_on" in sizes else "off" if "sp_off" in sizes else "auto"


def batch_parts() -> int:
    """Returns how many parts a batch is split into where code runs."""
    return _parts("dp")


def slot_parts() -> int:
    """Returns how many parts the slots of a full layer's cache are split into where code runs."""
    return _parts("cp")


def column_parts() -> int:
    """Returns how many parts the columns of an expert are split into where code runs."""
    return _parts("tp")


def _parts(group: str) -> int:
    mesh = current_mesh()
    return 1 if mesh is None else group_size(mesh.shape, group)


def _prime_factors(n: int) -> list[int]:
    factors, p = [], 2
    while n > 1:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return factors


def _read_yaml(file: Path) -> list[str]:
    """Returns the `name: value` lines of flat YAML, which needs no parser."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as e:
        raise MeshError(f"{file}: is not text in UTF-8, write lines such as tp: 4") from e
    except (OSError, ValueError) as e:
        raise MeshError(f"{file}: cannot be read ({getattr(e, 'strerror', None) or e})") from e
    bare = (line.partition("#")[0].strip() for line in lines)
    return [line for line in bare if line and line != "---"]


def _more_cpu_devices(found: Sequence[Any], wanted: int) -> str:
    if not found or found[0].platform != "cpu":
        return ""
    return f", or simulate more with XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
