"""Drafters from disk: what fits is loaded as it is, what does not is refused by name."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers_dspark import DRAFTER, TARGET, VOCAB, with_heads

from checkpoints.safetensors_writer import write_published
from inkling_jax.drafter import init_drafter
from inkling_jax.drafter_config import DrafterConfig
from inkling_jax.errors import InputError
from inkling_jax.load_drafter import config_json, find_drafter, load_drafter, published
from inkling_jax.proposing import Speculator


def written(directory, config=DRAFTER, drop=(), tensors=None, **fields):
    """Writes a random drafter, some fields of its config and some tensors changed."""
    params = init_drafter(config, jax.random.key(3))
    if config.draft_vocab_size:
        rows = jnp.asarray(np.arange(config.draft_vocab_size) * 3 + 1, jnp.int32)
        params["tokens"] = params["tokens"].replace(rows)
    found = published(params) | (tensors or {})
    raw = config_json(config) | fields
    raw = {k: v for k, v in raw.items() if v != "absent"}
    write_published(directory, [(k, v) for k, v in found.items() if k not in drop], raw)
    return params


def load(directory):
    return load_drafter(directory, TARGET.text, jnp.float32)


@pytest.mark.parametrize(
    "config",
    [
        DRAFTER,
        with_heads(own_embedding=True, own_head=True, markov_head_type="rnn"),
        with_heads(own_head=True, draft_vocab_size=9, final_logit_softcapping=30.0),
        with_heads(markov_rank=0, confidence_head_with_markov=False, rope_theta=500.0),
        with_heads(enable_confidence_head=False, markov_head_type="gated"),
        with_heads(confidence_temperatures=(1.5,) * 8),
    ],
    ids=["shared", "own", "reduced", "no-markov", "no-confidence", "calibrated"],
)
def test_what_is_written_is_what_is_read(tmp_path, config):
    params = written(tmp_path, config)
    got, loaded = load(tmp_path)
    assert got == config
    for (path, a), (other, b) in zip(
        nnx.to_flat_state(params), nnx.to_flat_state(loaded), strict=True
    ):
        assert path == other
        np.testing.assert_array_equal(a[...], b[...])


def test_older_configs_spell_theta_at_the_top():
    raw = config_json(DRAFTER)
    del raw["rope_parameters"]
    assert DrafterConfig.from_hf(raw | {"rope_theta": 77.0}).rope_theta == 77.0


def test_a_drafter_beside_its_model_is_found(tmp_path):
    assert find_drafter(tmp_path) is None
    written(tmp_path / "drafter")
    assert find_drafter(tmp_path) == tmp_path / "drafter"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": VOCAB + 1}, "drafter.vocab_size is 44, the target has 43 tokens"),
        ({"hidden_size": 16}, "drafter.hidden_size is 16, the target's is 32"),
        ({"num_target_layers": 3}, "drafter.num_target_layers is 3, the target has 2 layers"),
        ({"target_layer_ids": [0, 1]}, r"target_layer_ids is \[0, 1\], layers may lie in -1…0"),
        ({"target_layer_ids": [-2, 0]}, "target_layer_ids"),
        ({"target_layer_ids": [0, -1]}, "in rising order"),
        ({"target_layer_ids": []}, "in rising order"),
        ({"markov_head_type": "lstm"}, "markov_head_type is 'lstm', known are vanilla, gated, rnn"),
        ({"mask_token_id": VOCAB}, r"mask_token_id is 43, it must lie in 0…42"),
        ({"markov_rank": 0}, "confidence_head_with_markov needs a Markov head"),
        ({"block_size": "absent"}, "drafter.block_size is missing"),
        ({"block_size": 0}, "drafter.block_size is 0, it must be positive"),
        ({"head_dim": 7}, "drafter.head_dim is 7, it must be even"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads, 3"),
        ({"layer_types": ["sliding_attention"]}, "only 'full_attention' is supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "only 'default' is supported"),
        ({"attention_bias": True}, "attention_bias is True, only False is supported"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"draft_vocab_size": 5}, "lm_head.weight cannot be the target's"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        ({"confidence_temperatures": [1.0]}, "must hold block_size positive numbers"),
        ({"shiny_new_field": 1}, "shiny_new_field = 1 is not known"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_by_name(tmp_path, fields, message):  # SP-08
    written(tmp_path, **fields)
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_unknown_and_misshapen_tensors_stand_in_one_report(tmp_path):
    extra = {
        "fc.weight": np.zeros((32, 32), np.float32),
        "layers.7.mlp.up_proj.weight": np.zeros(1, np.float32),
    }
    written(tmp_path, drop=("norm.weight",), tensors=extra)
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    for part in ("missing: norm.weight", "misshapen: fc.weight", "unknown: layers.7"):
        assert part in str(caught.value)


@pytest.mark.parametrize("offsets", [[0, 0, 41], [0, -1, 0], [-1, 0, 0]])
def test_offsets_that_leave_the_vocabulary_or_meet_are_refused(tmp_path, offsets):
    config = with_heads(own_head=True, draft_vocab_size=3)
    written(tmp_path, config, tensors={"d2t": np.array(offsets, np.int64)})
    with pytest.raises(InputError, match="d2t must name 3 different tokens"):
        load(tmp_path)


def test_offsets_and_the_size_of_the_vocabulary_go_together(tmp_path):
    config = with_heads(own_head=True, draft_vocab_size=3)
    written(tmp_path / "a", config, drop=("d2t",))
    with pytest.raises(InputError, match="tensor d2t is absent"):
        load(tmp_path / "a")
    written(tmp_path / "b", tensors={"d2t": np.zeros(3, np.int64)})
    with pytest.raises(InputError, match="has d2t, but no draft_vocab_size"):
        load(tmp_path / "b")


def test_a_directory_without_a_config_is_named(tmp_path):
    with pytest.raises(InputError, match=str(tmp_path / "config.json")):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([]))
    with pytest.raises(InputError, match="it must hold a JSON object"):
        load(tmp_path)


@pytest.mark.parametrize("drafts", [0, 9])
def test_more_drafts_than_the_block_holds_are_refused(drafts):
    with pytest.raises(
        InputError, match=f"draft-tokens is {drafts}, it must be a whole number in 1…8"
    ):
        Speculator(init_drafter(DRAFTER, jax.random.key(0)), DRAFTER, drafts)


def test_auto_needs_a_confidence_head():
    config = with_heads(enable_confidence_head=False)
    with pytest.raises(InputError, match="needs a drafter with a confidence head"):
        Speculator(init_drafter(config, jax.random.key(0)), config, 8, jnp.ones(9))
