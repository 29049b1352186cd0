"""Loads parameters onto devices, from a published or a converted directory.

A model's declarations (`abstract_params`) say what is expected; the checkpoint says in which
format each layer's experts are. Each device gets its part, read from the file by itself.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from checkpoints import orbax_store
from checkpoints.convert import PARAMS, Conversion, is_converted
from checkpoints.convert import convert as convert_directory
from checkpoints.key_map import make_plan
from checkpoints.safetensors_reader import read_index
from checkpoints.transforms import Leaf, bits
from checkpoints.transforms import Path as LeafPath
from inkling_jax import ops, quant
from inkling_jax.config import Config
from inkling_jax.errors import InputError
from inkling_jax.hub import resolve
from inkling_jax.memory import check_fits, device_bytes
from inkling_jax.model import abstract_params, param_specs
from inkling_jax.quant import QuantTensor, Weights
from inkling_jax.settings import read_settings
from pallas_kernels.moe_experts import PackedExperts
from sharding.mesh import (
    MeshConfig,
    MeshError,
    abstract_mesh,
    column_parts,
    current_mesh,
    mesh_axes,
)
from sharding.partition import partition, shard_shapes
from sharding.rules import Axes

PARTS = ("values", "scales", "outer")  # of a packed expert, as `QuantTensor` and files name them


def convert(
    source: str | Path,
    target: str | Path,
    revision: str | None = None,
    dry_run: bool = False,
    progress: bool = True,
    mesh: str | None = None,
) -> Conversion:
    """Converts a published checkpoint to Orbax; see `checkpoints.convert.convert`.

    Args:
      source: published directory or hub id.
      target: the directory to make.
      revision: of a hub id.
      dry_run: check all but a drafter, write nothing.
      progress: show a bar on stderr.
      mesh: refuse a model that this mesh could not run; what is written is the same for all.
    """
    if not isinstance(target, str | Path) or not str(target):
        raise InputError(f"the target is {target!r:.40}, it must be a directory to make")
    directory = resolve(source, revision)
    config = Config.from_file(directory / "config.json")
    if mesh is not None:
        with mesh_mistakes():
            wanted = abstract_mesh(MeshConfig.parse(mesh))
            param_specs(checkpoint_params(directory, config), wanted)
    read_settings(directory, config)  # refused here rather than when the result is loaded
    return convert_directory(
        directory, Path(target).absolute(), expected(config), dry_run, progress
    )


@contextlib.contextmanager
def mesh_mistakes() -> Iterator[None]:
    """Turns the refusal of a mesh into an `InputError`."""
    try:
        yield
    except MeshError as e:
        raise InputError(str(e)) from e


def expected(config: Config) -> dict[LeafPath, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of every parameter by its path; float32 marks what stays float32."""
    flat = nnx.to_flat_state(abstract_params(config, jnp.bfloat16))
    return {_path(path): variable.get_value() for path, variable in flat}


def checkpoint_params(directory: Path, config: Config, dtype: DTypeLike | None = None) -> nnx.State:
    """Returns shapes and dtypes of the parameters as a checkpoint has them, experts packed or not.

    Args:
      directory: published or converted.
      config: its configuration.
      dtype: of floats that are not kept in float32; None leaves them as they are stored.

    Raises:
      InputError: the checkpoint does not hold the parameters of the configuration.
    """
    leaves = _leaves(directory, config, dtype)
    if is_converted(directory):
        orbax_store.check(directory / PARAMS, leaves, cast=True)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), _state(config, leaves)
    )


def load_params(
    directory: Path,
    config: Config,
    dtype: DTypeLike | None = None,
    shardings: Callable[[nnx.State], Any] | None = None,
) -> nnx.State:
    """Loads parameters onto devices; each gets its part, and only that is read for it.

    Args:
      directory: published or converted.
      config: its configuration.
      dtype: of floats that are not kept in float32, None as they are stored; packed experts stay.
      shardings: maps the abstract parameters to a tree like them of shardings; by default all go to
        the default device.

    Raises:
      InputError: the checkpoint is faulty or not of the configuration, or does not fit a device.
    """
    leaves = _state(config, _leaves(directory, config, dtype))
    specs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), leaves)
    if shardings is None:
        here = jax.sharding.SingleDeviceSharding(next(iter(jnp.zeros(()).devices())))
        placed = jax.tree.map(lambda _: here, specs)
    else:
        placed = shardings(specs)
    specs = jax.tree.map(lambda spec, s: spec.update(sharding=s), specs, placed)
    check_fits(device_bytes(jax.tree.leaves(specs)), str(directory))
    if not is_converted(directory):
        return jax.tree.map(_place, leaves, specs)
    paths = [leaf.path for leaf in jax.tree.leaves(leaves)]
    wanted = dict(zip(paths, jax.tree.leaves(specs), strict=True))
    arrays = orbax_store.restore(directory / PARAMS, wanted, cast=True)
    return jax.tree.map(lambda leaf: arrays[leaf.path], leaves)


def pack_for_kernels(params: nnx.State, config: Config) -> nnx.State:
    """Returns the parameters with experts in the kernels' order, where the device has the kernels.

    Under `jax.set_mesh` each device packs its part. The published order is given up matrix stack by
    matrix stack, and its arrays in `params` are deleted: memory has no room for both. Prefill
    unpacks an expert when it needs it.
    """

    def pack(old: Weights, axes: Axes, interleaved: bool) -> PackedExperts:
        new = jax.block_until_ready(_pack(old, axes, interleaved))
        for array in jax.tree.leaves(old):
            array.delete()
        return new

    return _with_packed(params, config, pack)


def packed_shapes(params: nnx.State, config: Config) -> nnx.State:
    """Returns the shapes that `pack_for_kernels` makes of parameters of these shapes."""

    def pack(old: Weights, axes: Axes, interleaved: bool) -> PackedExperts:
        return jax.eval_shape(lambda: _pack(old, axes, interleaved))

    return _with_packed(params, config, pack)


def _with_packed(params: nnx.State, config: Config, pack: Callable[..., PackedExperts]):
    width = config.text.moe_intermediate_size // column_parts()
    dtype: DTypeLike = params["embed"]["weight"].dtype  # pyright: ignore[reportAssignmentType]
    if not ops.packs_experts(config.text.hidden_size, width, dtype):
        return params

    def packed(path: LeafPath, variable: nnx.Variable) -> nnx.Variable:
        if path[-2:] not in (("moe", "w13"), ("moe", "w2")):
            return variable
        return variable.replace(pack(variable.get_value(), variable.axes, path[-1] == "w13"))

    flat = nnx.to_flat_state(params)
    return nnx.from_flat_state([(path, packed(_path(path), v)) for path, v in flat])


@jax.jit(static_argnames=("axes", "interleaved"))
def _pack(weights: Weights, axes: Axes, interleaved: bool) -> PackedExperts:
    """Packs experts of these logical axes, each device its part."""

    def pack(part: Weights, split: tuple[str, ...] = ()) -> PackedExperts:
        # A few experts at a time, as codes take more room than words on the way.
        every = jax.tree.map(lambda a: a[:, None], part)
        packed = jax.lax.map(lambda w: ops.pack_experts(w, interleaved, split), every, batch_size=8)
        return jax.tree.map(lambda a: a[:, 0], packed)

    mesh = current_mesh()
    if mesh is None:
        return pack(weights)
    specs = partition({"experts": weights}, {"experts": axes}, mesh)["experts"]
    part = jax.eval_shape(pack, shard_shapes(weights, specs, mesh))
    lead = jax.tree.leaves(specs)[0]  # words and scales lie like the values
    return jax.shard_map(
        functools.partial(pack, split=mesh_axes(mesh.shape, "tp")),
        in_specs=(specs,),
        out_specs=jax.tree.map(lambda a: PartitionSpec(*lead[: a.ndim]), part),
        check_vma=False,
    )(weights)


def _leaves(directory: Path, config: Config, dtype: DTypeLike | None) -> dict[LeafPath, Leaf]:
    """Returns what the parameters of a directory are made of, with the dtypes to load them in."""
    want = expected(config)
    if not is_converted(directory):
        plan = make_plan(read_index(directory), want, dtype, str(directory))
        return {leaf.path: leaf for leaf in plan.leaves}
    stored = orbax_store.describe(directory / PARAMS)
    found: dict[LeafPath, Leaf] = {}
    for path, spec in want.items():
        name = orbax_store.array_name(path)
        if f"{name}.values" in stored:
            packed = quant.abstract(spec.shape, "nvfp4" if f"{name}.outer" in stored else "mxfp8")
            parts = {(*path, part): getattr(packed, part) for part in PARTS}
        else:
            kept = np.dtype(stored[name]["data_type"]) if name in stored else spec.dtype
            island = spec.dtype == np.float32
            parts = {path: spec.update(dtype=spec.dtype if island else dtype or kept)}
        for part, s in parts.items():
            if s is not None:
                found[part] = Leaf(part, s.shape, s.dtype, bits)
    return found


def _path(path: tuple[Any, ...]) -> LeafPath:
    """A path of Flax, whose keys may by their type be anything that can be compared."""
    return tuple(path)


def _place(leaf: Leaf, spec: jax.ShapeDtypeStruct) -> jax.Array:
    """Reads one array to its devices, and waits: the host never holds two."""
    read = functools.cache(leaf.__getitem__)  # replicas of a part are read once
    array = jax.make_array_from_callback(leaf.shape, spec.sharding, read)
    return jax.block_until_ready(array)


def _state(config: Config, leaves: Mapping[LeafPath, Any]) -> nnx.State:
    """Returns the parameters' tree with one object per array, packed experts as `QuantTensor`."""

    def value(path: LeafPath) -> Any:
        if path in leaves:
            return leaves[path]
        values, scales, outer = (leaves.get((*path, part)) for part in PARTS)
        return QuantTensor(values, scales, outer)  # pyright: ignore[reportArgumentType]

    flat = nnx.to_flat_state(abstract_params(config, jnp.bfloat16))
    return nnx.from_flat_state([(path, v.replace(value(_path(path)))) for path, v in flat])
