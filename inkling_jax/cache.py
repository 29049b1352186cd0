"""What a model remembers of the tokens it has read.

Every buffer is a ring by position: the token at position p lies in slot p mod S. Full layers hold
their whole capacity, beyond which `forward` reads no row, so their ring never wraps. Sliding layers
and convolutions hold what is still visible plus `max_block` slots more, so that a block of at most
`max_block` tokens can be written and taken back: `rollback` only lowers the lengths, and slots of
rejected tokens are out of sight until they are written again.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from inkling_jax.config import TextConfig
from sharding.collectives import Part
from sharding.mesh import current_mesh, slot_parts
from sharding.partition import partition
from sharding.rules import Axes

_pytree = functools.partial(jax.tree_util.register_dataclass, meta_fields=[])


@functools.partial(_pytree, data_fields=["k", "v", "attn", "mlp"])
@dataclasses.dataclass(frozen=True)
class ConvState:
    """The last inputs of a layer's four short convolutions, float32."""

    k: Float[Array, "B Sc K d"]
    v: Float[Array, "B Sc K d"]
    attn: Float[Array, "B Sc D"]
    mlp: Float[Array, "B Sc D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values as attention reads them, and the inputs of the convolutions.

    sliding: static; whether the slots are a window's ring, not the whole capacity.
    """

    k: Float[Array, "B S K d"]
    v: Float[Array, "B S K d"]
    conv: ConvState
    sliding: bool = dataclasses.field(metadata={"static": True})


@functools.partial(_pytree, data_fields=["layers", "length"])
@dataclasses.dataclass(frozen=True)
class Cache:
    """The state of a batch; `length[b]` tokens of row b have been read."""

    layers: tuple[LayerCache, ...]
    length: Int[Array, " B"]


def init_cache(
    config: TextConfig, batch: int, capacity: int, max_block: int, dtype: DTypeLike
) -> Cache:
    """Returns an empty cache for `capacity` tokens a row.

    Args:
      max_block: the longest block of tokens that may be taken back, at least 1.
      dtype: of keys and values.

    Under `jax.set_mesh` it lies on the mesh as `cache_specs` says, of a capacity rounded up to one
    that `cp` divides.
    """
    conv_slots = config.conv_kernel_size - 1 + max_block
    whole = capacity + -capacity % slot_parts()
    layers = []
    for i in range(config.num_hidden_layers):
        shape = config.attention(i)
        slots = whole if shape.window is None else shape.window + max_block
        heads = (shape.kv_heads, shape.head_dim)
        kv = functools.partial(jnp.zeros, (batch, slots, *heads), dtype)
        head_conv = functools.partial(jnp.zeros, (batch, conv_slots, *heads), jnp.float32)
        conv = functools.partial(jnp.zeros, (batch, conv_slots, config.hidden_size), jnp.float32)
        state = ConvState(head_conv(), head_conv(), conv(), conv())
        layers.append(LayerCache(kv(), kv(), state, shape.sliding))
    return on_mesh(Cache(tuple(layers), jnp.zeros(batch, jnp.int32)))


def on_mesh(cache: Cache) -> Cache:
    """Lays a cache out as `cache_specs` says; without a mesh nothing happens."""
    mesh = current_mesh()
    if mesh is None:
        return cache
    return jax.lax.with_sharding_constraint(cache, cache_specs(cache, mesh))


def cache_specs(cache: Cache, mesh: Mesh | AbstractMesh) -> Any:
    """Returns how a cache lies on a mesh, a `PartitionSpec` for each array.

    What attention reads is split like the heads, the slots of full layers also over `cp`, so that
    each device has a run of positions. The inputs of the two other convolutions are few (c - 1 +
    max_block rows a layer) and known to every device after the sum of the heads or experts, so each
    keeps all of them, and no one has to be asked for any.
    """
    leaves, tree = jax.tree.flatten_with_path(cache)
    heads, hidden = ("batch", None, "kv_heads", None), ("batch", None, "embed")
    axes: list[Axes] = []
    for layer in cache.layers:
        kv = heads if layer.sliding else ("batch", "slots", "kv_heads", None)
        axes += [kv] * 2 + [heads] * 2 + [hidden] * 2
    axes.append(("batch",))
    names = [f"cache{jax.tree_util.keystr(path)}" for path, _ in leaves]
    arrays = {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}
    specs = partition(arrays, dict(zip(names, axes, strict=True)), mesh)
    return jax.tree.unflatten(tree, [specs[name] for name in names])


def rollback(cache: Cache, length: Int[Array, " B"]) -> Cache:
    """Takes back the tokens from position `length[b]` on; at most `max_block` of them."""
    return dataclasses.replace(cache, length=length)


def write(
    buffer: Shaped[Array, "B S ..."],
    new: Shaped[Array, "B T ..."],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    part: Part | None = None,
) -> Shaped[Array, "B S ..."]:
    """Writes row b's first `count[b]` of T entries at positions `start[b]`…; padding is dropped.

    Args:
      part: which part of the ring the buffer is, whose slots alone are written; None: all of it.
    """
    own, row = buffer.shape[1], jnp.arange(buffer.shape[0])[:, None]
    first, slots = part or (0, own)
    if new.shape[1] > slots:  # only the last ones stay
        kept = jnp.minimum(count, slots)
        start, t = start + count - kept, (count - kept)[:, None] + jnp.arange(slots)
        new, count = new[row, jnp.minimum(t, new.shape[1] - 1)], kept
    t = jnp.arange(new.shape[1])
    slot = (start[:, None] + t) % slots - first
    slot = jnp.where((t < count[:, None]) & (slot >= 0), slot, own)
    return buffer.at[row, slot].set(new.astype(buffer.dtype), mode="drop")


def read_before(
    buffer: Shaped[Array, "B S ..."], start: Int[Array, " B"], n: int
) -> Shaped[Array, "B n ..."]:
    """Returns the entries of positions `start[b] - n`…`start[b] - 1`, zeros before position 0."""
    position = start[:, None] + jnp.arange(-n, 0)
    row = jnp.arange(buffer.shape[0])[:, None]
    found = buffer[row, position % buffer.shape[1]]
    before = (position < 0).reshape(*position.shape, *(1,) * (buffer.ndim - 2))
    return jnp.where(before, jnp.zeros((), buffer.dtype), found)
