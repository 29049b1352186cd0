"""The whole model: embedding → layers → logits, parameters and cache in, cache out.

`Model` holds parameters only. The functions below take them as a pytree (the `nnx.State` of
`nnx.split(Model(config))`), so that they can be jitted, donated and sharded like any other array.
Under `jax.set_mesh`, `forward` and `unembed` run their body on every device's shards: widths come
from the parameters' shapes, and `Collectives` says where devices add up what each has, and gather
what each has of the tokens.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from inkling_jax.cache import Cache, cache_specs
from inkling_jax.config import Config, TextConfig
from inkling_jax.decoder_layer import DecoderLayer
from inkling_jax.layers import RMSNorm, einsum, fill_params, param, softcap
from inkling_jax.moe import Experts, experts
from inkling_jax.residual import Reader, Residual
from inkling_jax.vision import VisionTower
from sharding.collectives import Collectives, splits_tokens
from sharding.mesh import current_mesh, mesh_axes
from sharding.partition import partition


class Embedding(nnx.Module):
    """One row per token of the (padded) vocabulary."""

    def __init__(self, vocab: int, hidden: int, dtype: DTypeLike):
        self.weight = param((vocab, hidden), ("vocab", "embed"), dtype)


class Model(nnx.Module):
    """Inkling 2: parameters only; see `forward`.

    Args:
      dtype: of all parameters but those that the reference keeps in float32.
    """

    def __init__(self, config: Config, dtype: DTypeLike = jnp.float32):
        text = config.text
        self.embed = Embedding(text.vocab_size, text.hidden_size, dtype)
        self.embed_norm = RMSNorm(text.hidden_size, text.rms_norm_eps, dtype)
        self.layers = nnx.List(
            [DecoderLayer(text, i, dtype) for i in range(text.num_hidden_layers)]
        )
        self.output_query = param((text.hidden_size,), ("embed",), jnp.float32, "zeros")
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps, dtype)
        self.unembed = Embedding(text.vocab_size, text.hidden_size, dtype)
        self.vision = VisionTower(config.vision, dtype)


@functools.cache
def graphdef(config: Config) -> nnx.GraphDef:
    """Returns the structure that `nnx.merge` joins with parameters to a `Model`."""
    return nnx.split(Model(config))[0]


def abstract_params(config: Config, dtype: DTypeLike = jnp.float32) -> nnx.State:
    """Returns the parameters' shapes, dtypes and logical axes, without values."""
    return nnx.split(Model(config, dtype))[1]


def init_params(config: Config, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> nnx.State:
    """Draws parameters at random: normal with variance 1 / fan-in, norms one, biases zero."""
    return fill_params(abstract_params(config, dtype), key)


def param_specs(params: nnx.State, mesh: Mesh | AbstractMesh) -> nnx.State:
    """Returns how parameters lie on a mesh: their tree with a `PartitionSpec` for each array.

    Raises:
      MeshError: the mesh does not divide them.
    """
    flat = [("/".join(map(str, path)), path, v) for path, v in nnx.to_flat_state(params)]
    values = {name: v.get_value() for name, _, v in flat}
    specs = partition(values, {name: v.axes for name, _, v in flat}, mesh)
    return nnx.from_flat_state([(path, v.replace(specs[name])) for name, path, v in flat])


def param_shardings(params: nnx.State, mesh: Mesh) -> nnx.State:
    """Returns `param_specs` with the devices, as `jax.device_put` and `load_params` take them."""
    return jax.tree.map(functools.partial(NamedSharding, mesh), param_specs(params, mesh))


class Forward(NamedTuple):
    """What one pass over new tokens gives.

    hidden: [B, T, D] after the final norm, ready for `unembed`.
    cache: the cache with the new tokens read.
    taps: the outputs of the layers asked for, [B, T, D] each (-1: the embedding output).
    """

    hidden: Float[Array, "B T D"]
    cache: Cache
    taps: tuple[Float[Array, "B T D"], ...]


def forward(
    params: nnx.State,
    config: Config,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    cache: Cache,
    features: Float[Array, "P D"] | None = None,
    image_index: Int[Array, "B T"] | None = None,
    *,
    taps: tuple[int, ...] = (),
    experts: Experts = experts,
) -> Forward:
    """Reads new tokens after those in the cache.

    A row whose tokens do not fit the cache, or are none of the vocabulary, is not read: its part of
    the cache stays as it is, and what it gives is NaN.

    Args:
      tokens: ids; row b's first `lengths[b]` are real, the rest is padding that leaves no trace.
      features: image features from `encode_image`, of all images of the batch.
      image_index: the row of `features` that stands in for each token's embedding, -1 for text.
      taps: layers whose outputs are wanted.
      experts: how routed experts are computed.
    """
    run = functools.partial(_forward, config, taps, experts)
    args = (params, tokens, lengths, cache, features, image_index)
    mesh = current_mesh()
    if mesh is None:
        return run(Collectives(), *args)
    rows, cached = _rows(mesh), cache_specs(cache, mesh)
    halo = config.text.conv_kernel_size - 1
    max_block = cache.layers[0].conv.attn.shape[1] - halo
    split = splits_tokens(mesh.shape, tokens.shape, halo, max_block)
    return jax.shard_map(
        functools.partial(run, Collectives.of(mesh, split)),
        in_specs=(param_specs(params, mesh), rows, rows, cached, P(), rows),
        out_specs=Forward(rows, cached, rows),  # pyright: ignore[reportArgumentType]
        check_vma=False,  # kernels do not say over which axes their results differ
    )(*args)


def _rows(mesh: AbstractMesh) -> P:
    """How arrays lie on a mesh whose first axis is the batch."""
    return P(mesh_axes(mesh.shape, "dp"))


def _forward(
    config, taps, experts, collectives, params, tokens, lengths, cache, features, image_index
) -> Forward:
    model = nnx.merge(graphdef(config), params)
    start, width = cache.length, tokens.shape[1]
    readable = _readable(config.text, collectives, tokens, lengths, cache)
    lengths = jnp.where(readable, lengths, 0)
    with jax.named_scope("embed"):
        weight = model.embed.weight[...]
        found = collectives.lookup(weight, collectives.pad_tokens(tokens))
        x = model.embed_norm(found, jnp.float32)
        if features is not None and image_index is not None:
            image_index = collectives.own_tokens(collectives.pad_tokens(image_index))
            image = features.astype(jnp.float32)[jnp.maximum(image_index, 0)]
            x = jnp.where((image_index >= 0)[..., None], image, x)
    residual, outputs, layers = Residual.start(x), {-1: x}, []
    inputs = tuple(norm(x, weight.dtype) for norm in model.layers[0].attn_norms)
    final = Reader(model.output_query[...][None], (model.norm,), (weight.dtype,))
    readers = [*(layer.attn_reader for layer in model.layers[1:]), final]
    for i, (layer, following) in enumerate(zip(model.layers, readers, strict=True)):
        with jax.named_scope(f"layer_{i}"):
            args = (cache.layers[i], start, lengths, experts, collectives, following)
            residual, inputs, state = layer(residual, inputs, *args)
        outputs[i] = residual.partial
        layers.append(state)
    (hidden,) = inputs
    cache = Cache(tuple(layers), start + lengths)

    def every(x):
        whole = collectives.gather_tokens(x)[:, :width]
        return jnp.where(readable[:, None, None], whole, jnp.nan)

    return Forward(every(hidden), cache, tuple(every(outputs[i]) for i in taps))


def _readable(text: TextConfig, collectives: Collectives, tokens, lengths, cache: Cache):
    """Tells of which rows the tokens fit the cache and are ids of the vocabulary."""
    known = (tokens >= 0) & (tokens < text.unpadded_vocab_size)
    readable = jnp.all(known | (jnp.arange(tokens.shape[1]) >= lengths[:, None]), axis=1)
    for slots in {layer.k.shape[1] for layer in cache.layers if not layer.sliding}:
        readable &= cache.length + lengths <= collectives.own_slots(slots)[1]
    return readable


def unembed(
    params: nnx.State, config: Config, hidden: Float[Array, "... D"]
) -> Float[Array, "... V"]:
    """Returns softcapped float32 logits of the real (unpadded) vocabulary."""
    weight: jax.Array = params["unembed"]["weight"][...]  # pyright: ignore[reportAssignmentType]
    mesh = current_mesh()
    if mesh is None:
        return _unembed(config.text, Collectives(), weight, hidden)
    rows = _rows(mesh)
    return jax.shard_map(
        functools.partial(_unembed, config.text, Collectives.of(mesh)),
        in_specs=(P(mesh_axes(mesh.shape, "tp")), rows),
        out_specs=rows,
        check_vma=False,
    )(weight, hidden)


def _unembed(text: TextConfig, collectives: Collectives, weight, hidden):
    with jax.named_scope("unembed"):
        logits = softcap(einsum("...d,vd->...v", hidden, weight), text.final_logit_softcapping)
        return collectives.gather_vocabulary(logits)[..., : text.unpadded_vocab_size]


def encode_image(
    params: nnx.State, config: Config, tiles: Float[Array, "P t t 3"], grid: Int[Array, "2"]
) -> Float[Array, "P D"]:
    """Returns one feature per tile of an image of grid = (rows, columns) tiles.

    Tiles are in raster order, values as `images.tiles` makes them; tiles beyond rows · columns are
    padding and their features mean nothing.
    """
    with jax.named_scope("vision"):
        return nnx.merge(graphdef(config), params).vision(tiles, grid)
