"""`config.json`: every spelling and default, and values that are refused by name."""

import dataclasses

import pytest

from inkling_jax.config import FULL, SLIDING, Config, TextConfig, VisionConfig, inkling2_small
from inkling_jax.errors import InputError


def read(text=(), vision=(), **top):
    sections = {"text_config": dict(text), "vision_config": dict(vision)}
    return Config.from_hf({"model_type": "inkling2", **sections, **top})


def test_an_empty_config_is_inkling_2_small():
    config = read()
    assert config == inkling2_small() and read(dataclasses.asdict(TextConfig())) == config
    assert config.text.layer_types[:7] == (*[SLIDING] * 5, FULL, SLIDING)
    assert config.vision.intermediate_size == 4 * config.vision.hidden_size
    assert read({"eos_token_id": 7}).text.eos_token_id == (7,)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("sliding_window", "sliding_window_size"),
        ("num_local_experts", "n_routed_experts"),
        ("sconv_kernel_size", "conv_kernel_size"),
        ("model_max_length", "max_position_embeddings"),
        ("intermediate_size", "moe_intermediate_size"),
        ("routed_scaling_factor", "route_scale"),
    ],
)
def test_aliases_of_the_decoder(alias, name):
    assert getattr(read({alias: 96}).text, name) == 96
    assert read({alias: 96, name: 96}) == read({name: 96})
    with pytest.raises(InputError, match=f"{alias} is 96 and {name} is 97"):
        read({alias: 96, name: 97})


def test_spellings_of_the_image_tower():
    named = {"native_patch_size": 10, "adapter_merge_size": 3, "intermediate_size": 96}
    vision = read(vision=named | {"rope_parameters": {"rope_type": "axial", "rope_theta": 50}})
    want = VisionConfig(patch_size=10, spatial_merge_size=3, intermediate_size=96, rope_theta=50.0)
    assert vision.vision == want and want.tile_size == 30


@pytest.mark.parametrize(
    ("text", "vision", "top", "named"),
    [
        ({}, {}, {"model_type": "llama"}, "model_type is 'llama'"),
        ({"depth": 3}, {}, {}, "text_config.depth"),
        ({}, {"depth": 3}, {}, "vision_config.depth"),
        ({"hidden_size": "64"}, {}, {}, "text_config.hidden_size"),
        ({"hidden_size": 64.5}, {}, {}, "text_config.hidden_size"),
        ({"hidden_size": 0}, {}, {}, "hidden_size is 0, it must be positive"),
        ({"hidden_act": "relu"}, {}, {}, "text_config.hidden_act is 'relu'"),
        ({"tie_word_embeddings": True}, {}, {}, "tie_word_embeddings"),
        ({"layer_types": [FULL]}, {}, {}, "layer_types lists 1 layers"),
        ({"num_hidden_layers": 1, "layer_types": ["other"]}, {}, {}, "'other'"),
        ({"num_attention_heads": 13}, {}, {}, "num_attention_heads, 13"),
        ({"num_experts_per_tok": 999}, {}, {}, "num_experts_per_tok, 999"),
        ({"unpadded_vocab_size": 10**6}, {}, {}, "unpadded_vocab_size, 1000000"),
        ({}, {"rope_parameters": {"rope_type": "yarn"}}, {}, "rope_type is 'yarn'"),
        ({}, {"text_hidden_size": 64}, {}, "text_hidden_size is 64"),
        ({}, {"rope_parameters": 5}, {}, "rope_parameters must be a JSON object"),
        ({"hidden_size": float("nan")}, {}, {}, "text_config.hidden_size is nan"),
        ({"route_scale": float("inf")}, {}, {}, "text_config.route_scale is inf"),
        ({}, {}, {"image_token_id": 10**6}, "image_token_id is 1000000"),
        ({}, {}, {"image_token_id": "x"}, "image_token_id is 'x'"),
        ({}, {}, {"text_config": 5}, "text_config must be a JSON object"),
    ],
)
def test_values_that_are_refused_by_name(text, vision, top, named):
    with pytest.raises(InputError, match=named):
        read(text, vision, **top)


@pytest.mark.parametrize("name", ["text_config", "vision_config"])
def test_a_missing_section_is_named(name):
    raw = {"model_type": "inkling2", "text_config": {}, "vision_config": {}}
    with pytest.raises(InputError, match=f"config: {name} is missing"):
        Config.from_hf({key: value for key, value in raw.items() if key != name})
