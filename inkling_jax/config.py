"""Architecture of a model, read from a published `config.json` (spec: inkling2.md, "Sizes").

Fields carry the names of `config.json`. Only architecture lives here: meshes, kernels and sampling
are passed to the functions that use them.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from inkling_jax.config_fields import (
    build,
    check_positive,
    is_whole,
    read_json,
    require,
    section,
    typed,
)
from inkling_jax.errors import InputError

SLIDING, FULL = "hybrid_sliding", "hybrid"


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Sizes of one layer's attention; `window` is None where a query sees every earlier key."""

    heads: int
    kv_heads: int
    head_dim: int
    extent: int
    window: int | None

    @property
    def sliding(self) -> bool:
        """Whether a query sees a window only."""
        return self.window is not None


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The decoder; the defaults are those of Inkling 2 Small."""

    vocab_size: int = 201024
    unpadded_vocab_size: int = 200058
    hidden_size: int = 4608
    num_hidden_layers: int = 48
    layer_types: tuple[str, ...] = ()
    num_attention_heads: int = 48
    num_key_value_heads: int = 8
    head_dim: int = 128
    swa_num_attention_heads: int = 48
    swa_num_key_value_heads: int = 8
    swa_head_dim: int = 128
    sliding_window_size: int = 1024
    rel_extent: int = 1024
    d_rel: int = 16
    log_scaling_n_floor: int = 128000
    log_scaling_alpha: float = 0.1
    qk_l2_clip_threshold: float = 22.627416997969522
    rel_l2_clip_threshold: float = 8.0
    n_routed_experts: int = 384
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 2304
    route_scale: float = 8.0
    mlp_gate_softcap: float = 4.0
    mlp_up_softcap: float = 25.0
    final_logit_softcapping: float = 30.0
    conv_kernel_size: int = 4
    n_layers_per_attn_res_block: int = 6
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1048576
    eos_token_id: tuple[int, ...] = (200006,)

    def __post_init__(self):
        if not self.layer_types:
            kinds = (FULL if (i + 1) % 6 == 0 else SLIDING for i in range(self.num_hidden_layers))
            object.__setattr__(self, "layer_types", tuple(kinds))
        _check_text(self)

    def attention(self, layer: int) -> AttentionShape:
        """Returns the sizes of layer `layer`'s attention."""
        if self.layer_types[layer] == FULL:
            return AttentionShape(
                self.num_attention_heads,
                self.num_key_value_heads,
                self.head_dim,
                self.rel_extent,
                None,
            )
        return AttentionShape(
            self.swa_num_attention_heads,
            self.swa_num_key_value_heads,
            self.swa_head_dim,
            self.sliding_window_size,
            self.sliding_window_size,
        )

    def check_context(self, tokens: int) -> None:
        """Refuses a number of tokens of prompt and reply that this model does not read."""
        limit = self.max_position_embeddings
        if not is_whole(tokens) or not 1 <= tokens <= limit:
            raise InputError(
                f"context is {tokens!r}, it must be a whole number: this model reads 1 to {limit} "
                "tokens"
            )

    def starts_block(self, layer: int) -> bool:
        """Tells whether the attention residual starts a new block at layer `layer`."""
        return layer % self.n_layers_per_attn_res_block == 0


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The image tower; the defaults are those of Inkling 2 Small."""

    hidden_size: int = 1024
    num_hidden_layers: int = 23
    num_attention_heads: int = 16
    patch_size: int = 20
    spatial_merge_size: int = 2
    posemb_grid_size: int = 32
    mlp_ratio: float = 4.0
    intermediate_size: int = 0
    layer_norm_eps: float = 1e-5
    projection_hidden_dim: int = 4096
    projector_bias: bool = False
    rope_theta: float = 10000.0
    text_hidden_size: int = 4608

    def __post_init__(self):
        if not self.intermediate_size:
            object.__setattr__(self, "intermediate_size", int(self.hidden_size * self.mlp_ratio))
        _check_vision(self)

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def tile_size(self) -> int:
        """Side in pixels of the square that becomes one token."""
        return self.patch_size * self.spatial_merge_size


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole model: decoder, image tower and the token that stands for an image tile."""

    text: TextConfig = dataclasses.field(default_factory=TextConfig)
    vision: VisionConfig = dataclasses.field(default_factory=VisionConfig)
    image_token_id: int = 200054

    def __post_init__(self):
        if self.vision.text_hidden_size != self.text.hidden_size:
            raise InputError(
                f"config: vision_config.text_hidden_size is {self.vision.text_hidden_size}, it "
                f"must equal text_config.hidden_size, {self.text.hidden_size}"
            )
        if not 0 <= self.image_token_id < self.text.vocab_size:
            raise InputError(
                f"config: image_token_id is {self.image_token_id}, it must lie in "
                f"0…{self.text.vocab_size - 1}"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Reads a published `config.json`, already parsed.

        Raises:
          InputError: a value is unknown, unsupported or contradicts another; it is named.
        """
        if raw.get("model_type") != "inkling2":
            raise InputError(f"config: model_type is {raw.get('model_type')!r}, not 'inkling2'")
        for name in ("text_config", "vision_config"):
            if name not in raw:
                raise InputError(f"config: {name} is missing, it must be a JSON object")
        text, vision = (section(raw, name) for name in ("text_config", "vision_config"))
        if isinstance(eos := text.get("eos_token_id"), int):
            text["eos_token_id"] = (eos,)
        rope = section(vision, "rope_parameters")
        vision.pop("rope_parameters", None)
        if rope.get("rope_type", "axial") != "axial":
            raise InputError(
                f"config: vision_config.rope_parameters.rope_type is {rope['rope_type']!r}, "
                "only 'axial' is supported"
            )
        if "rope_theta" in rope:
            vision["rope_theta"] = rope["rope_theta"]
        top = {}
        if (placeholder := raw.get("image_token_id")) is not None:
            top["image_token_id"] = typed(placeholder, int, "config: image_token_id")
        return cls(
            build(TextConfig, text, "text_config", _TEXT_ONLY, _TEXT_ALIASES),
            build(VisionConfig, vision, "vision_config", _VISION_ONLY, _VISION_ALIASES),
            **top,
        )

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Reads `config.json` at `path`; raises InputError where it cannot be read."""
        raw = read_json(path)
        try:
            return cls.from_hf(raw)
        except InputError as e:
            raise InputError(f"{path}: {e}") from e


_TEXT_ALIASES = {
    "sliding_window": "sliding_window_size",
    "num_local_experts": "n_routed_experts",
    "sconv_kernel_size": "conv_kernel_size",
    "model_max_length": "max_position_embeddings",
    "intermediate_size": "moe_intermediate_size",
    "routed_scaling_factor": "route_scale",
}
_VISION_ALIASES = {
    "native_patch_size": "patch_size",
    "adapter_merge_size": "spatial_merge_size",
}
_TEXT_ONLY = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "attention_dropout": 0,
    "tie_word_embeddings": False,
}
_VISION_ONLY = {"hidden_act": "gelu", "attention_dropout": 0, "num_channels": 3}


def _check_text(c: TextConfig) -> None:
    check_positive(c, "text_config", ("log_scaling_alpha",))
    require(
        len(c.layer_types) == c.num_hidden_layers,
        f"layer_types lists {len(c.layer_types)} layers, not num_hidden_layers, "
        f"{c.num_hidden_layers}",
    )
    for kind in c.layer_types:
        require(
            kind in (FULL, SLIDING),
            f"layer_types has {kind!r}, it may hold {FULL!r} and {SLIDING!r}",
        )
    for prefix in ("", "swa_"):
        heads = getattr(c, f"{prefix}num_attention_heads")
        kv_heads = getattr(c, f"{prefix}num_key_value_heads")
        require(
            heads % kv_heads == 0,
            f"{prefix}num_attention_heads, {heads}, must be a multiple of "
            f"{prefix}num_key_value_heads, {kv_heads}",
        )
    require(
        c.num_experts_per_tok <= c.n_routed_experts,
        f"num_experts_per_tok, {c.num_experts_per_tok}, exceeds n_routed_experts, "
        f"{c.n_routed_experts}",
    )
    require(
        c.unpadded_vocab_size <= c.vocab_size,
        f"unpadded_vocab_size, {c.unpadded_vocab_size}, exceeds vocab_size, {c.vocab_size}",
    )


def _check_vision(c: VisionConfig) -> None:
    check_positive(c, "vision_config")
    require(
        c.hidden_size % c.num_attention_heads == 0 and c.head_dim % 4 == 0,
        f"vision_config.hidden_size, {c.hidden_size}, must split into num_attention_heads, "
        f"{c.num_attention_heads}, of a width divisible by 4 (axial rotary pairs)",
    )


def inkling2_small() -> Config:
    """Returns the configuration of Inkling 2 Small (594 B parameters, 17 B active)."""
    return Config()
