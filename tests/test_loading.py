"""Loading onto devices: published or converted, in parts, checked before."""

import dataclasses
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers_checkpoints import TINY, tensors, write_shards

import inkling_jax as ij
from inkling_jax import loading, memory
from inkling_jax.errors import InputError
from inkling_jax.inspection import inspect
from inkling_jax.loading import checkpoint_params, convert, load_params
from inkling_jax.quant import QuantTensor, dequantize


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    target = tmp_path_factory.mktemp("out") / "model"
    convert(source, target, progress=False)
    return target


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{}", r"source: tokenizer\.json cannot be used"),
        ("generation_config.json", '{"do_sample": true, "top_k": "x"}', "top_k is 'x'"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id is 'x'"),
    ],
)
def test_what_could_not_be_loaded_is_not_converted(source, tmp_path, name, text, message):
    shutil.copytree(source, tmp_path / "source")
    (tmp_path / "source" / name).write_text(text)
    with pytest.raises(InputError, match=message):
        convert(tmp_path / "source", tmp_path / "target", progress=False)
    assert not (tmp_path / "target").exists()


def by_path(params):
    return {path: variable.get_value() for path, variable in nnx.to_flat_state(params)}


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def split_experts(axis):
    """Shardings over 2 devices: packed experts along `axis`, the rest on both."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])

    def one(spec):
        parts = [None] * len(spec.shape)
        if spec.dtype in (jnp.uint8, jnp.float8_e4m3fn):
            parts[axis] = "x"
        return jax.NamedSharding(mesh, jax.P(*parts))

    return lambda abstract: jax.tree.map(one, abstract)


@pytest.mark.parametrize("directory", ["source", "converted"])
def test_parameters_are_the_published_values(directory, request):
    params = load_params(request.getfixturevalue(directory), TINY, jnp.float32)
    found, named = by_path(params), tensors(TINY)
    wq = named["model.llm.layers.1.attn.wq_du.weight"].astype(np.float32)
    np.testing.assert_array_equal(found["layers", 1, "attn", "wq"], wq.reshape(6, 16, 64))
    w2 = [found["layers", i, "moe", "w2"] for i in range(3)]
    assert w2[0].format == "nvfp4" and w2[1].shape == (4, 64, 32) and w2[2].format == "mxfp8"
    values = named["model.llm.layers.2.mlp.experts.w13_weight"].astype(np.float32)
    scales = named["model.llm.layers.2.mlp.experts.w13_weight_scale"].astype(np.float32)
    decoded = values.reshape(4, 64, 2, 32) * 2.0 ** (scales[..., None] - 127)
    w13 = dequantize(found["layers", 2, "moe", "w13"], jnp.float32)
    np.testing.assert_array_equal(w13, decoded.reshape(4, 64, 64))
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32])
def test_published_and_converted_load_alike(source, converted, dtype):
    one, other = load_params(source, TINY, dtype), load_params(converted, TINY, dtype)
    same(one, other)
    found = by_path(one)
    assert found["layers", 0, "attn", "wq"].dtype == (dtype or jnp.bfloat16)
    assert found["layers", 0, "moe", "gate"].dtype == jnp.float32
    abstract = checkpoint_params(converted, TINY, dtype)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), abstract) == jax.tree.map(
        lambda a: (a.shape, a.dtype), one
    )


@pytest.mark.parametrize("directory", ["source", "converted"])
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_on_two_devices_are_the_same_parameters(source, directory, axis, request):  # QZ-04
    whole = load_params(source, TINY)
    parts = load_params(request.getfixturevalue(directory), TINY, shardings=split_experts(axis))
    same(whole, parts)
    w13 = by_path(parts)["layers", 0, "moe", "w13"]
    assert isinstance(w13, QuantTensor) and len(w13.scales.sharding.device_set) == 2
    shape = list(w13.scales.shape)
    shape[axis] //= 2
    assert w13.scales.addressable_shards[1].data.shape == tuple(shape)


def test_a_split_inside_a_block_is_refused(source):  # QZ-04: w2 has one block of 32 columns
    with pytest.raises(ValueError, match="partitioned 2 times, but the dimension size is 1"):
        load_params(source, TINY, shardings=split_experts(2))


def test_each_device_reads_its_part_only(source, monkeypatch):
    asked = []
    read = loading.Leaf.__getitem__

    def recording(leaf, index):
        asked.append((leaf.path, index))
        return read(leaf, index)

    monkeypatch.setattr(loading.Leaf, "__getitem__", recording)
    load_params(source, TINY, shardings=split_experts(0))
    values = ("layers", 0, "moe", "w13", "values")
    assert [index[0] for path, index in asked if path == values] == [slice(0, 2), slice(2, 4)]
    assert len([path for path, _ in asked if path == ("embed", "weight")]) == 1  # replicas share


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(source, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 100_000)
    monkeypatch.setattr(loading, "_place", lambda *_: pytest.fail("allocated"))
    with pytest.raises(InputError, match=r"needs 0\.\d\d GB on .*, 0\.00 GB are free"):
        load_params(source, TINY)


def test_free_memory_of_the_host_is_known():
    assert 1 << 20 < memory.free_memory(jax.devices("cpu")[0]) < 1 << 50


def test_a_checkpoint_of_another_configuration(source, converted):
    other = dataclasses.replace(TINY, text=dataclasses.replace(TINY.text, vocab_size=80))
    for directory in (source, converted):
        with pytest.raises(InputError, match="2 faults") as error:
            load_params(directory, other)
        assert "embed.weight" in str(error.value) and "80" in str(error.value)


def test_inspect_notices_what_loading_would(converted, tmp_path):
    model = tmp_path / "m"
    shutil.copytree(converted, model)
    shutil.rmtree(model / "params/norm.weight")
    (model / "params/embed.weight/c.0.0").write_bytes(b"")
    with pytest.raises(InputError, match="2 faults") as error:
        inspect(model)
    assert "missing: norm.weight" in str(error.value)
    assert "damaged: embed.weight/c.0.0" in str(error.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mesh": 5}, "mesh is 5"),
        ({"mesh": ["tp=2"]}, "mesh is ['tp=2']"),
        ({"drafter": 5}, "drafter is 5"),
        ({"revision": 5}, "revision is 5"),
        ({"draft_tokens": "x"}, "there is no drafter"),
        ({"context": "9"}, "context is '9'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_options_of_another_type_are_refused(source, options, reason, tmp_path):
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(InputError, match=re.escape(reason)):
        ij.load(tmp_path, **options)


def test_a_faulty_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(InputError, match=r"config\.json: .*model_type is 'qwen3'"):
        ij.load(tmp_path)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("[]", "holds a JSON list"),
        ('{"do_sample": true, "temperature": "hot"}', "sampling: temperature is 'hot'"),
        ('{"eos_token_id": [5, -1]}', "eos_token_id is [5, -1]"),
        ('{"eos_token_id": "end"}', "eos_token_id is 'end'"),
    ],
)
def test_a_faulty_generation_config_is_named(source, written, reason, tmp_path):
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    (tmp_path / "generation_config.json").write_text(written)
    with pytest.raises(InputError, match=re.escape(f"generation_config.json: {reason}")):
        ij.load(tmp_path)
