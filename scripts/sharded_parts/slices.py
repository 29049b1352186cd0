"""Layers of full width with random weights, over tp: whole, or the same share on every device."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from inkling_jax import ops
from inkling_jax.config import FULL, SLIDING, inkling2_small
from inkling_jax.loading import pack_for_kernels, packed_shapes
from inkling_jax.model import param_shardings, param_specs
from inkling_jax.planning.floors import Shard
from inkling_jax.planning.shapes import device_weights, place
from inkling_jax.quant import Format
from scripts.decode_step.parts import Part, one_of, random_params, text_only
from scripts.decode_step.programs import far_apart
from sharding.mesh import MeshConfig, Switch, abstract_mesh, make_mesh

SMALL: dict[str, Any] = dict(
    hidden_size=64, num_attention_heads=12, num_key_value_heads=2, head_dim=16,
    swa_num_attention_heads=12, swa_num_key_value_heads=2, swa_head_dim=16,
    sliding_window_size=16, rel_extent=16, n_routed_experts=16, moe_intermediate_size=64,
    vocab_size=512, unpadded_vocab_size=500,
)  # fmt: skip


class Slice(NamedTuple):
    """Some layers: all of them, what one of `ranks` devices has of them, and the devices."""

    whole: Part
    rank: Part
    devices: Sequence[Any]

    def config(self, sp: Switch = "auto") -> MeshConfig:
        """All devices as `tp`."""
        return MeshConfig(tp=len(self.devices), sp=sp)

    def mesh(self, sp: Switch = "auto") -> Mesh:
        """The devices so arranged."""
        return make_mesh(self.config(sp), self.devices)

    def shard(self) -> Shard:
        """What one device has of them, as the planner sees it."""
        weights = device_weights(stored(self.whole, self.mesh()), abstract_mesh(self.config()))
        return Shard(self.whole.config.text, self.config(), weights)


def few_layers(devices: Sequence[Any], dtype: DTypeLike, small: bool) -> Slice:
    """Returns two layers, one of each kind of attention and of experts."""
    return _slice(devices, (SLIDING, FULL), ("nvfp4", "mxfp8"), dtype, small)


def some_layers(devices: Sequence[Any], small: bool) -> Slice:
    """Returns six layers, kinds in the proportion of the model's 48."""
    kinds = (*(SLIDING,) * 5, FULL)
    formats: tuple[Format, ...] = (*("nvfp4",) * 5, "mxfp8")
    # The CPU has no products of bfloat16 that give float32.
    return _slice(devices, kinds, formats, jnp.float32 if small else jnp.bfloat16, small)


def _slice(
    devices: Sequence[Any],
    kinds: tuple[str, ...],
    formats: tuple[Format, ...],
    dtype: DTypeLike,
    small: bool,
) -> Slice:
    layers = {"num_hidden_layers": len(kinds), "layer_types": kinds}
    text = dataclasses.replace(inkling2_small().text, **layers, **(SMALL if small else {}))
    whole = Part("whole", text_only(text), formats, dtype)
    return Slice(whole, whole._replace(config=text_only(one_of(len(devices), text))), devices)


def stored(part: Part, mesh: Mesh | None) -> nnx.State:
    """Returns the shapes of its parameters as `load` leaves them, and where they lie on a mesh."""
    params = jax.eval_shape(lambda: random_params(part, packed=False))
    with on(mesh):
        params = packed_shapes(params, part.config)
    return place(params, param_specs(params, mesh), mesh) if mesh else params


def on(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Lets functions run over a mesh; None is one device."""
    return jax.set_mesh(mesh) if mesh else contextlib.nullcontext()


def drawn(part: Part) -> nnx.State:
    """Returns random parameters as `load` leaves them, on one device."""
    text = part.config.text
    packed = ops.packs_experts(text.hidden_size, text.moe_intermediate_size, part.dtype)
    return random_params(part, packed)


def drawn_whole(part: Part, mesh: Mesh | None) -> nnx.State:
    """Returns random parameters as `load` leaves them, spread over the mesh."""
    params = random_params(part, packed=False)
    with on(mesh):
        if mesh:
            params = jax.device_put(params, param_shardings(params, mesh))
        return pack_for_kernels(params, part.config)


def tokens_of(part: Slice, count: int) -> jax.Array:
    """Returns one row of so many ids that differ."""
    return far_apart(count) % part.whole.config.text.unpadded_vocab_size


def copies(share: Any, devices: Sequence[Any]) -> list[Any]:
    """Returns the arrays of the first device on each."""
    return [jax.device_put(share, device) for device in devices]


def join(shares: Sequence[Any], whole: Any) -> Any:
    """Returns the arrays, shaped and placed like `whole`, of which each device has its share."""

    def joined(whole: jax.ShapeDtypeStruct, *arrays: jax.Array) -> jax.Array:
        return jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, arrays)

    return jax.tree.map(joined, whole, *shares)
