"""Architecture of a DSpark drafter, read from its `config.json` (spec: dspark.md).

Fields carry the names of DeepSpec's `config.json`.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from inkling_jax.config import TextConfig
from inkling_jax.config_fields import build, check_positive, read_json, require, section
from inkling_jax.errors import InputError

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A drafter.

    Attributes:
      block_size: tokens proposed per step.
      target_layer_ids: layers of the target whose outputs it reads, -1 for the embedding's.
      markov_rank: width of the Markov head, 0 for none.
      draft_vocab_size: rows of its head where these are fewer than the target's tokens.
      confidence_temperatures: divide the confidence head's output, one per draft; empty for none.
        Our addition to DeepSpec's fields, found by `scripts/train_drafter.py`.
      own_embedding, own_head: it has its own; otherwise it shares the target's.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    markov_rank: int
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    final_logit_softcapping: float | None = None
    draft_vocab_size: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    confidence_temperatures: tuple[float, ...] = ()
    own_embedding: bool = True
    own_head: bool = True

    def __post_init__(self):
        _check(self)

    @property
    def draft_vocab(self) -> int:
        """Rows of the head's logits."""
        return self.draft_vocab_size or self.vocab_size

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Reads a drafter's `config.json`, already parsed.

        Raises:
          InputError: a value is missing, unknown, unsupported or contradicts another.
        """
        values = {k: v for k, v in raw.items() if k not in _TRAINING}
        rope = section(raw, "rope_parameters")
        values.pop("rope_parameters", None)
        kind = rope.pop("rope_type", "default")
        require(
            kind == "default",
            f"drafter.rope_parameters.rope_type is {kind!r}, only 'default' is supported",
        )
        values |= rope
        kinds = values.pop("layer_types", None) or ()
        for kind in kinds:
            require(
                kind == "full_attention",
                f"drafter.layer_types has {kind!r}, only 'full_attention' is supported",
            )
        hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
        if values.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int):
            values["head_dim"] = hidden // max(heads, 1)
        return build(cls, values, "drafter", _ONLY, {})

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Reads the `config.json` at `path`; raises InputError where it cannot be read."""
        raw = read_json(path)
        try:
            return cls.from_hf(raw)
        except InputError as e:
            raise InputError(f"{path}: {e}; is this a DSpark drafter?") from e

    def check_target(self, target: TextConfig) -> None:
        """Raises InputError unless the drafter was made for such a target."""
        vocab = (target.unpadded_vocab_size, target.vocab_size)
        require(
            self.vocab_size in vocab,
            f"drafter.vocab_size is {self.vocab_size}, the target has {vocab[0]} tokens",
        )
        require(
            self.hidden_size == target.hidden_size,
            f"drafter.hidden_size is {self.hidden_size}, the target's is {target.hidden_size}",
        )
        require(
            self.num_target_layers == target.num_hidden_layers,
            f"drafter.num_target_layers is {self.num_target_layers}, the target has "
            f"{target.num_hidden_layers} layers",
        )


# What Qwen3's and DeepSpec's configs hold for training, and keys that restate a default.
_TRAINING = ("max_position_embeddings", "max_window_layers", "num_anchors")
_ONLY = {
    "attention_bias": False,
    "attention_dropout": 0,
    "hidden_act": "silu",
    "rope_scaling": {},
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}


def _check(c: DrafterConfig) -> None:
    check_positive(c, "drafter", ("markov_rank", "mask_token_id"))
    require(c.markov_rank >= 0, f"drafter.markov_rank is {c.markov_rank}, it cannot be negative")
    require(
        c.markov_head_type in MARKOV_HEADS,
        f"drafter.markov_head_type is {c.markov_head_type!r}, known are {', '.join(MARKOV_HEADS)}",
    )
    require(
        c.num_attention_heads % c.num_key_value_heads == 0,
        f"drafter.num_attention_heads, {c.num_attention_heads}, must be a multiple of "
        f"num_key_value_heads, {c.num_key_value_heads}",
    )
    require(
        c.head_dim % 2 == 0,
        f"drafter.head_dim is {c.head_dim}, it must be even (rotary pairs)",
    )
    require(
        0 <= c.mask_token_id < c.vocab_size,
        f"drafter.mask_token_id is {c.mask_token_id}, it must lie in 0…{c.vocab_size - 1}",
    )
    ids = c.target_layer_ids
    require(
        bool(ids) and all(a < b for a, b in itertools.pairwise(ids)),
        f"drafter.target_layer_ids is {list(ids)}, it must list layers in rising order",
    )
    require(
        ids[0] >= -1 and ids[-1] < c.num_target_layers - 1,
        f"drafter.target_layer_ids is {list(ids)}, layers may lie in -1…{c.num_target_layers - 2} "
        "(never the target's last)",
    )
    require(
        not (c.enable_confidence_head and c.confidence_head_with_markov and not c.markov_rank),
        "drafter.confidence_head_with_markov needs a Markov head, and markov_rank is 0",
    )
    require(
        (c.draft_vocab_size or 1) > 0 and c.draft_vocab <= c.vocab_size,
        f"drafter.draft_vocab_size is {c.draft_vocab_size}, it must lie in 1…{c.vocab_size}",
    )
    require(
        c.own_head or c.draft_vocab_size is None,
        "drafter.draft_vocab_size is set, so lm_head.weight cannot be the target's",
    )
    temperatures = c.confidence_temperatures
    require(
        len(temperatures) in (0, c.block_size) and all(t > 0 for t in temperatures),
        f"drafter.confidence_temperatures is {list(temperatures)}, it must hold block_size "
        "positive numbers",
    )
    cap = c.final_logit_softcapping
    require(
        cap is None or cap > 0,
        f"drafter.final_logit_softcapping is {cap}, it must be positive",
    )
