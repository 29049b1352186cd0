"""How the arrays of a model lie on a mesh, derived from their shapes and logical axes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sharding.mesh import MeshConfig, MeshError, current_mesh, group_size, mesh_axes
from sharding.rules import Axes, DoesNotSplitError, spec

MOST_PARTS = 128  # of a group; larger ones are not offered when a mesh is refused


def partition(
    tree: Mapping[str, Any], axes: Mapping[str, Axes], mesh: Mesh | AbstractMesh
) -> dict[str, Any]:
    """Returns the `PartitionSpec` of every array.

    Args:
      tree: arrays, shapes or containers of them, by name. The arrays of a container (values,
        scales, … of a packed tensor) share their leading dimensions, so each is split like them,
        and further ones are whole; scales, one per group of values, thus keep shards to whole
        groups.
      axes: the logical axes of each name.
      mesh: its devices are not looked at.

    Raises:
      MeshError: some dimension does not divide; the sizes that would work are listed.
    """

    def specs(value: Any, names: Axes, sizes: Mapping[str, int]) -> Any:
        return jax.tree.map(lambda a: spec(_names(names, a), a.shape, sizes), value)

    found = {}
    for name, value in tree.items():
        try:
            found[name] = specs(value, axes[name], mesh.shape)
        except DoesNotSplitError as e:
            raise MeshError(_refusal(e, name, tree, axes, mesh)) from e
    return found


def _names(axes: Axes, array: Any) -> Axes:
    """Returns the logical axes of one array of a container that has these."""
    rank = len(array.shape)
    return (*axes, *(None,) * (rank - len(axes)))[:rank]


def _refusal(
    error: DoesNotSplitError,
    name: str,
    tree: Mapping[str, Any],
    axes: Mapping[str, Axes],
    mesh: Mesh | AbstractMesh,
) -> str:
    """Says what does not divide, and which sizes of the group divide everything."""
    distinct = {(_names(axes[n], a), a.shape) for n, v in tree.items() for a in jax.tree.leaves(v)}

    def works(size: int) -> bool:
        try:
            for names, shape in distinct:
                spec(names, shape, dataclasses.replace(MeshConfig(), **{error.group: size}).axes)
        except DoesNotSplitError:
            return False
        return True

    fitting = [str(n) for n in range(1, MOST_PARTS + 1) if works(n)]
    return (
        f"{name}: {error.name} of size {error.size} cannot be split by "
        f"{error.group}={group_size(mesh.shape, error.group)}; "
        f"{error.group} can be {', '.join(fitting)}"
    )


def shard_shapes(tree: Any, specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Returns the shapes of what one device has of arrays that lie like this."""

    def shape(array: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        part = NamedSharding(mesh, spec).shard_shape(array.shape)
        return jax.ShapeDtypeStruct(part, array.dtype)

    return jax.tree.map(shape, tree, specs)


def by_row(tree: Any) -> Any:
    """Splits arrays [B, …] over the parts of the batch; without a mesh nothing happens."""
    mesh = current_mesh()
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, PartitionSpec(mesh_axes(mesh.shape, "dp")))


def everywhere(tree: Any) -> Any:
    """Gives every device, and so every process, all of the arrays, for the host to read."""
    if current_mesh() is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, PartitionSpec())
