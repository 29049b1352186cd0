"""Which mesh axes split which dimension of an array: one table, read by logical name."""

import math
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from sharding.mesh import mesh_axes

Axes = tuple[str | None, ...]  # the logical name of each dimension of an array

RULES: Mapping[str, str | None] = {
    "batch": "dp",
    "slots": "cp",  # of caches that hold the whole context
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",  # fewer of them than devices are repeated, see REPEATED
    "experts": "ep",
    "expert_width": "tp",
    "embed": None,
    "vision_embed": None,  # the image tower is small: every device has all of it
    "vision_heads": None,
    "vision_mlp": None,
}
REPEATED = {"kv_heads"}  # neighbours share a part where a dimension has fewer parts than devices


class DoesNotSplitError(ValueError):
    """A dimension that its mesh axes do not divide."""

    def __init__(self, name: str, size: int, group: str):
        super().__init__(f"{name} of size {size} does not split over {group}")
        self.name, self.size, self.group = name, size, group


def spec(axes: Axes, shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns how an array lies on a mesh.

    Args:
      axes: the logical name of each dimension; None is never split.
      shape: of the whole array.
      sizes: `mesh.shape`.

    Raises:
      DoesNotSplitError: a dimension is not divided by the devices it should be split over.
      ValueError: a name has no rule, or two dimensions would be split over the same devices.
    """
    parts, used = [], set()
    for name, size in zip(axes, shape, strict=True):
        if name is not None and name not in RULES:
            raise ValueError(f"axis {name!r} has no rule, known are {', '.join(RULES)}")
        group = RULES[name] if name else None
        split = _split(name, size, group, sizes) if name and group else ()
        if used & set(split):
            raise ValueError(f"axes {axes}: two of them would be split over {group}")
        used |= set(split)
        parts.append(split[0] if len(split) == 1 else split or None)
    return PartitionSpec(*parts)


def _split(name: str, size: int, group: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes that a dimension is split over."""
    names = mesh_axes(sizes, group)
    devices = math.prod(sizes[n] for n in names)
    if size % devices == 0:
        return names
    if name in REPEATED:
        for n in range(len(names)):
            if math.prod(sizes[axis] for axis in names[:n]) == size:
                return names[:n]
    raise DoesNotSplitError(name, size, group)
