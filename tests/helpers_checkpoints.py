"""Small checkpoints in the published layout, made from the model's own declarations."""

import dataclasses
import functools
import math
import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from checkpoints.key_map import PUBLISHED
from checkpoints.safetensors_writer import write_published
from inkling_jax.config import Config, TextConfig, VisionConfig
from inkling_jax.model import abstract_params

E4M3 = ml_dtypes.float8_e4m3fn

# Three layers, one of each attention and expert format that matters; all sizes differ.
TEXT = TextConfig(
    vocab_size=72,
    unpadded_vocab_size=70,
    hidden_size=64,
    num_hidden_layers=3,
    layer_types=("hybrid_sliding", "hybrid", "hybrid_sliding"),
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    swa_num_attention_heads=8,
    swa_num_key_value_heads=4,
    swa_head_dim=8,
    sliding_window_size=10,
    rel_extent=12,
    d_rel=5,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    conv_kernel_size=3,
    n_layers_per_attn_res_block=2,
    eos_token_id=(7,),
)
VISION = VisionConfig(
    hidden_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    patch_size=5,
    posemb_grid_size=3,
    mlp_ratio=2.0,
    projection_hidden_dim=40,
    projector_bias=True,
    text_hidden_size=64,
)
TINY = Config(TEXT, VISION, image_token_id=60)
FORMATS = ("nvfp4", "bf16", "mxfp8")


def config_json(config: Config) -> dict[str, Any]:
    """Returns `config.json` of a configuration."""
    return {
        "architectures": ["Inkling2ForConditionalGeneration"],
        "model_type": "inkling2",
        "image_token_id": config.image_token_id,
        "text_config": dataclasses.asdict(config.text),
        "vision_config": dataclasses.asdict(config.vision),
    }


def expected(config: Config) -> dict[tuple, Any]:
    """Returns shape and dtype of every parameter; float32 marks what stays float32."""
    flat = nnx.to_flat_state(abstract_params(config, jnp.dtype(jnp.bfloat16)))
    return {path: variable.get_value() for path, variable in flat}


def published(
    config: Config, formats: tuple[str, ...] = FORMATS, seed: int = 0
) -> Iterator[tuple[str, np.ndarray]]:
    """Draws a checkpoint: published names and tensors, experts of layer i in `formats[i]`."""
    rng = np.random.default_rng(seed)
    for path, want in expected(config).items():
        layer = next((key for key in path if isinstance(key, int)), 0)
        source, transform = PUBLISHED["/".join("{i}" if type(k) is int else k for k in path)]
        name = source.format(i=layer, below=layer - 1)
        if ".experts." in name and formats[layer] != "bf16":
            yield from packed(rng, name, want.shape, formats[layer])
        elif "norm" in name or "scale" in name or "ln_" in name:
            yield name, np.ones(want.shape, want.dtype)
        else:
            values = rng.random(transform(want.shape), np.float32) - np.float32(0.5)
            yield name, (values / np.float32(want.shape[-1] ** 0.5)).astype(want.dtype)


def packed(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], fmt: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Draws the published tensors of one stack of experts, as codes of numbers below 1."""
    columns = shape[-1]
    codes = np.frombuffer(rng.bytes(math.prod(shape)), np.uint8).reshape(shape)
    if fmt == "nvfp4":
        yield name, codes[..., : columns // 2]
        scales = (codes[..., : columns // 16] & 0x0F) + np.uint8(0x70)  # 64 … 448
        yield f"{name}_scale", np.minimum(scales, 0x7E).view(E4M3)
        yield f"{name}_amax", rng.random(shape[0], np.float32)
        yield f"{name}_outer_scale_denominator", np.array(6 * 448, np.float32)
    else:
        yield name, (codes & 0xF7).view(E4M3)  # no NaN among them
        yield f"{name}_scale", (codes[..., : columns // 32] & 1) + np.uint8(118)


@functools.cache
def tensors(
    config: Config, formats: tuple[str, ...] = FORMATS
) -> types.MappingProxyType[str, np.ndarray]:
    """Returns what `published` draws, as a dictionary that is not to be changed."""
    return types.MappingProxyType(dict(published(config, formats)))


def write_shards(directory: Path) -> Path:
    """Writes the tiny model in several shards beside a small tokenizer.json."""
    write_published(directory, published(TINY), config_json(TINY), shard_bytes=64 << 10)
    shutil.copy(Path(__file__).parent / "fixtures/chat/tokenizer.json", directory)
    return directory
