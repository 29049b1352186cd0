"""Reads a DSpark drafter from a directory in DeepSpec's layout (spec: dspark.md)."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from checkpoints.convert import DRAFTERS
from checkpoints.key_map import Table, make_plan
from checkpoints.safetensors_reader import TensorInfo, read_index, read_tensor
from checkpoints.transforms import heads_first, heads_last, same
from inkling_jax.config import TextConfig
from inkling_jax.config_fields import require
from inkling_jax.drafter import abstract_drafter
from inkling_jax.drafter_config import DrafterConfig
from inkling_jax.errors import InputError

_LAYER = "layers.{i}"

# Parameter -> published name and shape transform, as `checkpoints.key_map.PUBLISHED`.
DEEPSPEC: Table = {
    "embed": ("embed_tokens.weight", same),
    "head": ("lm_head.weight", same),
    "fc": ("fc.weight", same),
    "hidden_norm/weight": ("hidden_norm.weight", same),
    "norm/weight": ("norm.weight", same),
    "layers/{i}/attn_norm/weight": (f"{_LAYER}.input_layernorm.weight", same),
    "layers/{i}/mlp_norm/weight": (f"{_LAYER}.post_attention_layernorm.weight", same),
    "layers/{i}/attn/wq": (f"{_LAYER}.self_attn.q_proj.weight", heads_first),
    "layers/{i}/attn/wk": (f"{_LAYER}.self_attn.k_proj.weight", heads_first),
    "layers/{i}/attn/wv": (f"{_LAYER}.self_attn.v_proj.weight", heads_first),
    "layers/{i}/attn/wo": (f"{_LAYER}.self_attn.o_proj.weight", heads_last),
    "layers/{i}/attn/q_norm/weight": (f"{_LAYER}.self_attn.q_norm.weight", same),
    "layers/{i}/attn/k_norm/weight": (f"{_LAYER}.self_attn.k_norm.weight", same),
    "layers/{i}/gate": (f"{_LAYER}.mlp.gate_proj.weight", same),
    "layers/{i}/up": (f"{_LAYER}.mlp.up_proj.weight", same),
    "layers/{i}/down": (f"{_LAYER}.mlp.down_proj.weight", same),
    "markov/w1": ("markov_head.markov_w1.weight", same),
    "markov/w2": ("markov_head.markov_w2.weight", same),
    "markov/gate/weight": ("markov_head.gate_proj.weight", same),
    "markov/gate/bias": ("markov_head.gate_proj.bias", same),
    "markov/joint/weight": ("markov_head.joint_proj.weight", same),
    "markov/joint/bias": ("markov_head.joint_proj.bias", same),
    "confidence/weight": ("confidence_head.proj.weight", same),
    "confidence/bias": ("confidence_head.proj.bias", same),
}
_IGNORED = {
    r".*rotary_emb\.inv_freq": "rotary frequencies are computed from rope_theta",
    "t2d": "the inverse of d2t",
}
_OFFSETS, _TOKENS = "d2t", ("tokens",)


def load_drafter(
    directory: Path, target: TextConfig, dtype: DTypeLike
) -> tuple[DrafterConfig, nnx.State]:
    """Loads a drafter for a target.

    Args:
      directory: holds the drafter's `config.json` and safetensors.
      target: the architecture it must fit.
      dtype: of the parameters, the target's.

    Raises:
      InputError: the drafter is for another target, or its tensors are not those of its config.
    """
    config = DrafterConfig.from_file(directory / "config.json")
    try:
        config.check_target(target)
    except InputError as e:
        raise InputError(f"{directory}: {e}") from e
    index = read_index(directory)
    config = dataclasses.replace(
        config, own_embedding="embed_tokens.weight" in index, own_head="lm_head.weight" in index
    )
    abstract: Any = nnx.to_flat_state(abstract_drafter(config, dtype))
    expected = {path: v.get_value() for path, v in abstract if path != _TOKENS}
    # An embedding table may be absent on purpose, so d2t alone is outside the plan.
    floats = {name: info for name, info in index.items() if name != _OFFSETS}
    plan = make_plan(floats, expected, np.dtype(dtype), str(directory), DEEPSPEC, _IGNORED)
    values = {leaf.path: leaf[()] for leaf in plan.leaves}
    if config.draft_vocab_size:
        values[_TOKENS] = _read_tokens(index, config, directory)
    else:
        require(_OFFSETS not in index, f"{directory} has d2t, but no draft_vocab_size")
    filled = [(path, v.replace(jnp.asarray(values[path]))) for path, v in abstract]
    return config, nnx.from_flat_state(filled)


def find_drafter(directory: Path) -> Path | None:
    """Returns the subfolder of a checkpoint that holds its drafter, if there is one."""
    places = (directory / name for name in DRAFTERS)
    return next((place for place in places if place.exists()), None)


def published(params: nnx.State) -> dict[str, np.ndarray]:
    """Returns a drafter's tensors under their published names and in their published shapes."""
    tensors, flat = {}, cast(Any, nnx.to_flat_state(params))
    for path, variable in flat:
        value = np.asarray(jax.device_get(variable[...]))
        if path == _TOKENS:
            tensors[_OFFSETS] = value.astype(np.int64) - np.arange(len(value))
            continue
        layer = next((part for part in path if isinstance(part, int)), 0)
        name, transform = DEEPSPEC["/".join("{i}" if isinstance(p, int) else p for p in path)]
        tensors[name.format(i=layer)] = value.reshape(transform(value.shape))
    return tensors


def config_json(config: DrafterConfig) -> dict[str, Any]:
    """Returns what a drafter's `config.json` holds."""
    raw = {k: v for k, v in dataclasses.asdict(config).items() if v not in (None, ())}
    for name in ("own_embedding", "own_head"):  # the tensors say it
        del raw[name]
    theta = {"rope_type": "default", "rope_theta": raw.pop("rope_theta")}
    named = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}
    return named | raw | {"rope_parameters": theta, "tie_word_embeddings": False}


def _read_tokens(
    index: Mapping[str, TensorInfo], config: DrafterConfig, directory: Path
) -> np.ndarray:
    """Returns the target's token of each row of a reduced head, from the offsets `d2t`."""
    info, rows = index.get(_OFFSETS), config.draft_vocab
    if info is None or info.shape != (rows,) or info.dtype not in ("I32", "I64"):
        found = "absent" if info is None else f"{info.dtype} {list(info.shape)}"
        raise InputError(f"{directory}: tensor d2t is {found}, it must be an integer [{rows}]")
    tokens = np.arange(rows) + read_tensor(info).astype(np.int64)
    if tokens.min() < 0 or tokens.max() >= config.vocab_size or len(np.unique(tokens)) < rows:
        raise InputError(
            f"{directory}: d2t must name {rows} different tokens in 0…{config.vocab_size - 1}"
        )
    return tokens.astype(np.int32)
