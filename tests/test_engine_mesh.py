"""Checkpoints of the reference loaded onto meshes: bytes per device, answers, refusals."""

from pathlib import Path

import jax
import jax.monitoring
import numpy as np
import pytest
from helpers import tiny_params
from helpers_dspark import TARGET, speculator
from safetensors.numpy import load_file

import inkling_jax as ij
from inkling_jax import cli
from inkling_jax.engine import Engine
from inkling_jax.model import param_shardings
from sharding.mesh import MeshConfig, make_mesh

FIXTURES = Path(__file__).parent / "fixtures"
NANO = Path(__file__).parent.parent / "checkpoints/inkling-jax-nano"


@pytest.fixture(scope="module")
def small():
    return ij.load(FIXTURES / "small/checkpoint", mesh="dp=2,cp=2,tp=2,sp=on", context=64)


def nbytes(params, device):
    shards = [s for a in jax.tree.leaves(params) for s in a.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device == device)


def test_each_device_holds_its_half(small):
    """What is split is held by halves, in each copy of the model; the rest by every device."""
    leaves = jax.tree.leaves(small.params)
    split = [a for a in leaves if not a.is_fully_replicated]
    moe = small.params["layers"][0]["moe"]
    assert any(a is moe["w13"].get_value() for a in split)
    held = sum(a.nbytes for a in leaves) - sum(a.nbytes for a in split) // 2
    assert {nbytes(small.params, device) for device in jax.devices()} == {held}


def test_the_reference_is_continued_greedily_by_compiled_programs(small):
    """One prompt in a batch of two parts; what served it serves the next one."""
    expected = load_file(FIXTURES / "small/expected.safetensors")
    prompt, tokens = (expected[f"greedy.{name}"].tolist() for name in ("prompt", "tokens"))
    greedy = ij.SamplingParams(temperature=0.0, max_tokens=len(tokens), ignore_eos=True)
    assert small.generate([prompt], greedy)[0].token_ids == tokens
    compiled = []

    def listen(event, _seconds, **_):
        compiled.extend([event] * event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    outputs = small.generate([prompt, prompt[:-1]], greedy)
    jax.monitoring.unregister_event_duration_listener(listen)
    assert outputs[0].token_ids == tokens and not compiled


@pytest.mark.long
def test_a_drafter_goes_on_in_the_rings_of_the_last_batch():
    """Each device's part of them, where it lay; replies are what they are in new ones."""
    mesh = make_mesh(MeshConfig(dp=2, tp=2))
    params = jax.device_put(tiny_params(TARGET), param_shardings(tiny_params(TARGET), mesh))
    engine = Engine(params, TARGET, context=64, speculator=speculator(3), mesh=mesh)
    greedy = ij.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    longer, prompt = [3, 14, 15, 9, 26, 5, 35], [9, 26]

    def places():
        [rings] = engine._spare.values()
        shards = [shard for array in jax.tree.leaves(rings) for shard in array.addressable_shards]
        return [shard.data.unsafe_buffer_pointer() for shard in shards]

    [cold] = engine.generate([prompt], greedy)
    engine.generate([longer], greedy)
    before = places()
    [warm] = engine.generate([prompt], greedy)
    assert warm.token_ids == cold.token_ids and places() == before


@pytest.mark.long
def test_packed_experts_over_ep_score_like_the_reference():
    model = ij.load(FIXTURES / "packed/checkpoint", mesh="ep=4")
    expected = load_file(FIXTURES / "packed/expected.safetensors")
    score = model.score(expected["text17.tokens"].tolist(), logits=True)
    np.testing.assert_allclose(score.logits, expected["text17.logits"], atol=3e-4)


@pytest.mark.long
def test_nano_answers_alike_on_a_mesh():
    """One greedy and one seeded reply, split in every way."""
    questions = ["Reverse the words: one two three", "What is 17 + 25?"]
    settings = [ij.SamplingParams(temperature=t, seed=5, max_tokens=16) for t in (0.0, 1.0)]
    one, other = (
        ij.load(NANO, mesh=mesh, context=256).generate(questions, settings)
        for mesh in (None, "cpu8")
    )
    assert [output.token_ids for output in other] == [output.token_ids for output in one]


@pytest.mark.parametrize(
    ("case", "mesh", "says"),
    [
        ("small", "tp=4", "heads of size 6 cannot be split by tp=4; tp can be 1, 2$"),
        ("packed", "tp=2", r"w2: expert_width of size 1 .* tp=2; tp can be 1$"),
        ("packed", "tp=9", "needs 9 devices, 8 are there"),
        ("packed", "np=2", "'np=2' is not understood"),
    ],
)
def test_meshes_that_cannot_be_are_refused(case, mesh, says):
    with pytest.raises(ij.InputError, match=says):
        ij.load(FIXTURES / case / "checkpoint", mesh=mesh)


def test_the_command_line_refuses_in_one_sentence(tmp_path, capsys):
    source = str(FIXTURES / "packed/checkpoint")
    assert cli.main(["convert", source, str(tmp_path / "out"), "--mesh", "tp=2"]) == 2
    assert "tp can be 1" in capsys.readouterr().err and not any(tmp_path.iterdir())
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[3, 4]")
    assert cli.main(["score", "--model", source, "--tokens", str(tokens), "--mesh", "ep=3"]) == 2
    assert "ep can be 1, 2, 4" in capsys.readouterr().err
