"""What inkling-jax-nano is: its architecture and the formats of its experts."""

import dataclasses
from typing import Any

from inkling_jax.config import Config, TextConfig, VisionConfig
from inkling_jax.quant import Format

NVFP4_LAYERS = 9  # the first ones; the rest is MXFP8, as in Inkling 2 Small
TRAINED_LENGTH = 2048
MODEL_TOKENS = 4000  # vocabulary in use; the rest of the rows is padding


@dataclasses.dataclass(frozen=True)
class Phase:
    """What a part of the training sees, and what counts in its loss.

    Attributes:
      text, retrieval, chats: rows of each kind in a batch.
      weights: of the losses of text, retrieval, pictures and chat.
      read_documents: the documentation in retrieval rows counts as text, too.
      question_shares: of the kinds of `pictures.QUESTIONS`.
    """

    text: int
    retrieval: int
    chats: int
    weights: tuple[float, float, float, float]
    read_documents: bool
    question_shares: tuple[float, ...]


# The corpus is small: after a few passes its text is only learned by heart, so the second phase
# turns to the tasks, above all to the questions that compare the cells of a picture.
PHASES = {
    "learn": Phase(
        7, 5, 4, (1.0, 0.5, 0.5, 0.25), True, (0.125, 0.125, 0.125, 0.125, 0.125, 0.375)
    ),
    "refine": Phase(2, 3, 11, (0.3, 0.5, 1.0, 0.5), False, (0.22, 0.08, 0.08, 0.22, 0.3, 0.1)),
}


def nano(image_token: int, eos_token: int) -> Config:
    """Returns the configuration: 12 layers (2 full), hidden 128, 4 of 24 experts."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 64}
    text = TextConfig(
        vocab_size=4096,
        unpadded_vocab_size=MODEL_TOKENS,
        hidden_size=128,
        num_hidden_layers=12,
        **heads,
        **{f"swa_{name}": value for name, value in heads.items()},
        sliding_window_size=128,
        rel_extent=256,
        d_rel=16,
        log_scaling_n_floor=1024,
        qk_l2_clip_threshold=16.0,
        n_routed_experts=24,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        route_scale=2.0,
        n_layers_per_attn_res_block=3,
        max_position_embeddings=8192,
        eos_token_id=(eos_token,),
    )
    vision = VisionConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        posemb_grid_size=16,
        projection_hidden_dim=256,
        text_hidden_size=128,
    )
    return Config(text, vision, image_token)


def expert_format(layer: int) -> Format:
    """Returns how layer `layer`'s experts ship."""
    return "nvfp4" if layer < NVFP4_LAYERS else "mxfp8"


def published(config: Config) -> dict[str, Any]:
    """Returns what `config.json` holds for `config`."""
    text, vision = dataclasses.asdict(config.text), dataclasses.asdict(config.vision)
    [text["eos_token_id"]] = config.text.eos_token_id  # transformers takes one here, not a list
    theta = vision.pop("rope_theta")
    return {
        "architectures": ["Inkling2ForConditionalGeneration"],
        "model_type": "inkling2",
        "image_token_id": config.image_token_id,
        "text_config": {"model_type": "inkling2_text", **text},
        "vision_config": {
            "model_type": "inkling2_vision",
            **vision,
            "rope_parameters": {"rope_type": "axial", "rope_theta": theta},
        },
    }
