"""Parts of Inkling 2 Small that fit one GPU, with random weights made there."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from inkling_jax import ops, quant
from inkling_jax.cache import Cache, init_cache
from inkling_jax.config import FULL, SLIDING, Config, TextConfig, VisionConfig, inkling2_small
from inkling_jax.model import abstract_params

RANKS = 4
ROOM = 1024  # slots beyond the context, for the tokens of the longest measurement
MAX_BLOCK = 8

# Of each layout of experts: the bits of a word of weights that may be set (no NaN), the range of
# the bytes that are scales, and the outer scale.
PACKED = {"nvfp4": (0xFFFFFFFF, (16, 64), 2.0**22), "mxfp8": (0xDDFFDDFF, (220, 240), 2.0**-4)}
PUBLISHED = {"nvfp4": (0xFF, (0x30, 0x40), 2.0**-6), "mxfp8": (0xBF, (112, 120), None)}


class Part(NamedTuple):
    """What one GPU holds, each layer's expert format, and the dtype of everything else."""

    name: str
    config: Config
    formats: tuple[quant.Format, ...]
    dtype: DTypeLike


def full_size() -> list[Part]:
    """Returns 12 layers of full width, and one rank of four with all 48 layers."""
    text = inkling2_small().text
    layers = dataclasses.replace(text, num_hidden_layers=12, layer_types=text.layer_types[:12])
    formats = ("nvfp4",) * 40 + ("mxfp8",) * 8
    return [
        Part("slice", text_only(layers), ("nvfp4",) * 12, jnp.bfloat16),
        Part("rank", text_only(one_of(RANKS, text)), formats, jnp.bfloat16),
    ]


def one_of(ranks: int, text: TextConfig) -> TextConfig:
    """Returns what one of so many tensor-parallel devices computes, as a model of its own."""
    return dataclasses.replace(
        text,
        moe_intermediate_size=text.moe_intermediate_size // ranks,
        vocab_size=text.vocab_size // ranks,
        unpadded_vocab_size=text.vocab_size // ranks,
        **{
            name: getattr(text, name) // ranks
            for kind in ("", "swa_")
            for name in (f"{kind}num_attention_heads", f"{kind}num_key_value_heads")
        },
    )


def smoke_size() -> list[Part]:
    """Returns a rank so small that a CPU runs it, in float32, which its products take."""
    sizes: dict[str, Any] = dict(
        hidden_size=64, num_hidden_layers=2, layer_types=(SLIDING, FULL), moe_intermediate_size=32,
        n_routed_experts=16, vocab_size=512, unpadded_vocab_size=500, sliding_window_size=16,
        rel_extent=16,
    )  # fmt: skip
    rank = full_size()[1]
    config = text_only(dataclasses.replace(rank.config.text, **sizes))
    return [Part(rank.name, config, rank.formats[-2:], jnp.float32)]


def text_only(text: TextConfig) -> Config:
    """Returns a configuration with hardly any image tower: no text touches it."""
    vision = VisionConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=4)
    vision = dataclasses.replace(vision, text_hidden_size=text.hidden_size)
    return Config(text, vision, image_token_id=0)


def random_params(part: Part, packed: bool) -> nnx.State:
    """Draws parameters on the device; experts in the kernels' order, or as published."""

    def draw(index, path, variable):
        key = jax.random.fold_in(jax.random.key(0, impl="rbg"), index)
        spec = variable.get_value()
        if path[-1] in ("w13", "w2"):
            fmt, interleaved = part.formats[path[1]], path[-1] == "w13"
            return _draw_experts(key, spec.shape, fmt, packed, interleaved)
        return _draw(key, spec.shape, spec.dtype, variable.init)

    flat = nnx.to_flat_state(abstract_params(part.config, part.dtype))
    return nnx.from_flat_state(
        [(path, v.replace(draw(index, path, v))) for index, (path, v) in enumerate(flat)]
    )


@functools.cache
def params_shapes(part: Part, packed: bool) -> nnx.State:
    """Returns the shapes of `random_params`."""
    return jax.eval_shape(lambda: random_params(part, packed))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key, shape, dtype, init):
    """Uniform with the variance 1 / fan-in of `layers.fill_params`, or as `init` says."""
    if init != "normal":
        return getattr(jnp, init)(shape, dtype)
    bound = (3 / shape[-1]) ** 0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _draw_experts(key, shape, fmt, packed, interleaved):
    """Draws the bits themselves, so that nothing is quantized or reordered."""
    specs = quant.abstract(shape, fmt)
    mask, scales, outer = PUBLISHED[fmt]
    if packed:
        pack = functools.partial(ops.pack_experts, interleaved=interleaved)
        specs = jax.eval_shape(pack, specs)
        mask, scales, outer = PACKED[fmt]

    def draw(path, spec):
        if path[-1].name == "outer":
            return jnp.full(spec.shape, outer, spec.dtype)
        bits = jnp.dtype(f"uint{8 * spec.dtype.itemsize}")
        if path[-1].name == "scales":
            drawn = jax.random.randint(key, spec.shape, *scales, bits)
        else:
            drawn = jax.random.bits(key, spec.shape, bits) & jnp.array(mask, bits)
        return jax.lax.bitcast_convert_type(drawn, spec.dtype)

    return jax.tree.map_with_path(draw, specs)


def random_cache(part: Part, capacity: int, context: int) -> Cache:
    """Returns a cache of `capacity` tokens, with room for more, that has read `context`."""
    make = functools.partial(init_cache, part.config.text, 1, capacity + ROOM, MAX_BLOCK)
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: make(part.dtype)).layers)
    keys = jax.random.split(jax.random.key(1, impl="rbg"), len(leaves))
    drawn = [_draw(key, x.shape, x.dtype, "normal") for key, x in zip(keys, leaves, strict=True)]
    return Cache(jax.tree.unflatten(tree, drawn), jnp.full(1, context, jnp.int32))


def bytes_of_a_step(part: Part, params: nnx.State, distinct: float, context: int) -> float:
    """Counts what a step must read, each byte once.

    Of the experts, `distinct` a layer; of the embedding, rows that do not count; of the keys and
    values, those within reach.
    """
    text, total = part.config.text, 0.0
    for path, variable in nnx.to_flat_state(params):
        if path[0] not in ("embed", "vision"):
            share = distinct / text.n_routed_experts if path[-1] in ("w13", "w2") else 1
            total += share * sum(leaf.nbytes for leaf in jax.tree.leaves(variable.get_value()))
    for layer in range(text.num_hidden_layers):
        shape = text.attention(layer)
        keys = min(shape.window or context, context)
        total += 2 * keys * shape.kv_heads * shape.head_dim * jnp.dtype(part.dtype).itemsize
    return total
