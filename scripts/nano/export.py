"""Writes the model in the published layout, tokenizer and template beside it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from checkpoints.key_map import PUBLISHED
from checkpoints.safetensors_writer import write_published
from inkling_jax import model, quant
from inkling_jax.config import Config
from nano import recipe, step, wire
from nano.optimizer import Params

SHARD_BYTES = 5_000_000


def export(
    folder: Path, config: Config, params: Params, tokenizer: Path, packed: bool = True
) -> None:
    """Writes a checkpoint to `folder`: experts `packed` in their formats, or all in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    write_published(folder, _tensors(config, params, packed), recipe.published(config), SHARD_BYTES)
    shutil.copy(tokenizer, folder / "tokenizer.json")
    _write_text_files(folder, config)


def _tensors(
    config: Config, params: Params, packed: bool = True
) -> Iterator[tuple[str, np.ndarray]]:
    state = step.to_flat(model.abstract_params(config, jnp.bfloat16))
    for path, spec in state.items():
        parts = path.split("/")
        layer = next((int(p) for p in parts if p.isdigit()), 0)
        pattern = "/".join("{i}" if p.isdigit() else p for p in parts)
        source, published_shape = PUBLISHED[pattern]
        name = source.format(i=layer, below=layer - 1)
        value = params[path]
        if packed and pattern.endswith(("moe/w13", "moe/w2")):
            yield from _packed(name, step.pack(path, value))
        else:
            yield name, np.asarray(value).astype(spec.dtype).reshape(published_shape(spec.shape))


def _packed(name: str, experts: quant.QuantTensor) -> Iterator[tuple[str, np.ndarray]]:
    yield name, np.asarray(experts.values)
    yield f"{name}_scale", np.asarray(experts.scales)
    if experts.outer is not None:
        denominator = np.float32(quant.NVFP4_DENOMINATOR)
        yield f"{name}_amax", np.asarray(experts.outer) * denominator
        yield f"{name}_outer_scale_denominator", denominator


def _write_text_files(folder: Path, config: Config) -> None:
    (folder / "chat_template.jinja").write_text(wire.TEMPLATE)
    eos = list(config.text.eos_token_id)
    contents = {
        "generation_config.json": {"eos_token_id": eos, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": wire.END_SAMPLING,
            "pad_token": wire.PAD,
            "image_token": wire.IMAGE,
            "model_max_length": config.text.max_position_embeddings,
        },
        "processor_config.json": {
            "image_processor": {
                "patch_size": config.vision.patch_size,
                "merge_size": config.vision.spatial_merge_size,
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            },
            "image_token": wire.IMAGE,
        },
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
