"""A model on meshes of simulated devices against the same model on one."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny, tiny_params
from helpers_dspark import GREEDY, drafted, speculator
from helpers_dspark import run as run_drafted

from inkling_jax.cache import init_cache
from inkling_jax.config import FULL, SLIDING
from inkling_jax.generation import Requests, begin, decode_block, prefill
from inkling_jax.model import param_shardings
from inkling_jax.quant import quantize_mxfp8, quantize_nvfp4
from inkling_jax.sampling import Sampling, keys_from_seeds
from inkling_jax.sampling_params import SamplingParams
from sharding.mesh import MeshConfig, make_mesh

# 12 query heads of 2 groups in the full layer, of 1 in the other; experts split at whole groups.
SIZES = {
    "num_hidden_layers": 2,
    "layer_types": (SLIDING, FULL),
    "num_attention_heads": 12,
    "swa_num_attention_heads": 12,
    "moe_intermediate_size": 128,
}
SMALL = tiny(**SIZES)
MORE_MESHES = (
    "tp=2", "ep=4", "dp=2", "cp=8", "dp=2,cp=2,ep=2", "dp=2,cp=2,tp=2", "cp=2,ep=4", "ep=4,tp=2",
    "tp=4,sp=on", "tp=2,cp=4,sp=on", "tp=2,dp=2,ep=2,sp=on",
)  # fmt: skip
PARTS = ("attention", "moe")
TOKENS = np.zeros((2, 13), np.int32)
TOKENS[0], TOKENS[1, :4] = np.random.default_rng(0).integers(0, 43, 13), (9, 7, 9, 3)
LENGTHS = np.array([13, 4], np.int32)
IMAGE_INDEX = np.full((2, 13), -1, np.int32)
IMAGE_INDEX[0, 2:6] = range(4)


@functools.cache
def packed_params():
    """Random parameters with NVFP4 experts in the first layer and MXFP8 experts in the second."""
    params = jax.tree.map(lambda x: x, tiny_params(SMALL))
    for layer, pack in enumerate(map(jax.jit, (quantize_nvfp4, quantize_mxfp8))):
        moe = params["layers"][layer]["moe"]
        for name in ("w13", "w2"):
            moe[name] = moe[name].replace(pack(moe[name].get_value()))
    return params


def sums_and_gathers(program):
    """Counts the collectives of a program by kind and by where in the model they are."""
    kinds = "all-[a-z]*|reduce-scatter|collective-[a-z]*"
    found = re.findall(rf"({kinds})(?:-start)?\(.*op_name=\"([^\"]*)\"", program)
    return Counter((kind, name.removeprefix("jit(run)/")) for kind, name in found)


@functools.partial(jax.jit, static_argnames="config")
def run(params, config, tokens, lengths, requests):
    """Returns the logits after the prompts, and the tokens that follow: a prefill and a loop."""
    cache = init_cache(config.text, tokens.shape[0], 20, 1, jnp.float32)
    features = jnp.cos(jnp.arange(4.0 * config.text.hidden_size)).reshape(4, -1)
    image_index = jnp.asarray(IMAGE_INDEX)
    logits, cache = prefill(params, config, tokens, lengths, cache, features, image_index)
    state, first = begin(logits, cache, requests)
    return logits, first.ids, decode_block(params, config, state, 5)[1].ids


def answer(params):
    """Runs one greedy and one seeded row; returns (the compiled program, logits, tokens)."""
    requests = Requests(
        Sampling.stack([SamplingParams(temperature=t) for t in (0.0, 1.0)]),
        keys_from_seeds([1, 7]),
        jnp.full((2, 1), -1, jnp.int32),
        jnp.full(2, 6, jnp.int32),
    )
    compiled = run.lower(params, SMALL, TOKENS, LENGTHS, requests).compile()
    logits, *ids = jax.device_get(compiled(params, TOKENS, LENGTHS, requests))
    return compiled.as_text(), logits, np.concatenate(ids, axis=1)


@pytest.fixture(scope="module")
def one_device():
    return answer(packed_params())


def whole(where, layer, mesh):
    """The collectives of a layer whose tokens are with every device."""
    adds = {"attention": "tp0" in mesh.shape, "moe": "tp0" in mesh.shape or mesh.shape["ep"] > 1}
    places = (f"{where}/layer_{layer}/{part}" for part in PARTS if adds[part])
    return Counter(("all-reduce", f"{place}/psum") for place in places)


def split(where, layer, mesh):
    """The collectives of a layer whose tokens are split: no sum of them all with every device."""
    found = Counter()
    for part, inputs in (
        ("attention", 3 if SIZES["layer_types"][layer] == FULL else 1),
        ("moe", 3),  # with the experts' numbers and weights
    ):
        place = f"{where}/layer_{layer}/{part}"
        found["all-gather", f"{place}/all_gather"] = inputs
        found["reduce-scatter", f"{place}/reduce_scatter"] = 1
        found["collective-permute", f"{place}/ppermute"] = 1  # the halo
    return found


def softmax(where, layer):
    """What joins the softmax of a full layer over devices: its highest score, then its sums."""
    place = f"{where}/layer_{layer}/attention/softmax"
    return [("all-reduce", f"{place}/pmax"), ("all-reduce", f"{place}/psum")]


# What every device learns of the tokens themselves: the last of each convolution's, in one sum.
LAST_TOKENS = ":".join(f"layer_{i}/{part}/last_tokens/psum" for i in (0, 1) for part in PARTS)


@pytest.mark.parametrize(
    "text",
    [
        "tp=4",
        "tp=2,dp=2,ep=2",
        "cp=2,ep=2,tp=2,sp=on",
        *(pytest.param(text, marks=pytest.mark.long) for text in MORE_MESHES),
    ],
)
def test_a_mesh_gives_the_logits_and_tokens_of_one_device(text, one_device):
    """Also says which collectives prefill and step have.

    A step: two a layer, the embedding's, the head's; where slots are split, two for the softmax of
    a full layer; where the batch is split, the loop asks once a step whether all rows have ended.
    13 tokens do not divide, one row has a picture across slices and one ends in the first slice.
    """
    mesh = make_mesh(MeshConfig.parse(text))
    with jax.set_mesh(mesh):
        params = jax.device_put(packed_params(), param_shardings(packed_params(), mesh))
        program, logits, ids = answer(params)
    np.testing.assert_allclose(logits, one_device[1], atol=3e-4)
    np.testing.assert_array_equal(ids, one_device[2])
    prefill, step, tp = "shard_map", "while/body/shard_map", "tp0" in mesh.shape
    expected = Counter()
    for where in (prefill, step):
        splits = where == prefill and text.endswith("sp=on")
        for layer in range(2):
            expected.update((split if splits else whole)(where, layer, mesh))
        kind, name = ("reduce-scatter", "reduce_scatter") if splits else ("all-reduce", "psum")
        expected[kind, f"{where}/embed/{name}"] += tp
        expected["all-reduce", f"{where}/({LAST_TOKENS})"] += splits
        expected["all-gather", f"{where}/all_gather"] += splits
        expected["all-gather", f"{where}/unembed/all_gather"] += tp
        expected.update(softmax(where, 1) if mesh.shape["cp"] > 1 else ())
    expected["all-reduce", "while/cond/reduce_and"] += mesh.shape["dp"] > 1
    assert sums_and_gathers(program) == expected


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,cp=2,tp=2,sp=on",
        *(pytest.param(text, marks=pytest.mark.long) for text in ("ep=4,tp=2", "tp=4,sp=on")),
    ],
)
def test_a_drafter_gives_the_same_tokens_on_a_mesh(text):
    """The drafter is whole on every device, its target split; rounds accept what they do on one.

    Prompts are longer than a block of drafts, so that their tokens are split and blocks are not.
    """
    prompts = np.array([[3, 14, 15, 9, 26, 5], [9, 26, 5, 35, 8, 9]])
    options = {"sampling": [GREEDY, SamplingParams(temperature=1.0)], "max_new": 8}
    options["drafter"] = (speculator(3),)
    expected = run_drafted(drafted, prompts, **options.copy())
    with jax.set_mesh(make_mesh(MeshConfig.parse(text))):
        found = run_drafted(drafted, prompts, **options)
    for one, other in zip(expected, found, strict=True):
        if hasattr(one, "ids"):
            np.testing.assert_array_equal(other.ids, one.ids)
        elif hasattr(one, "accepted"):
            np.testing.assert_array_equal(other.accepted, one.accepted)
            assert one.accepted.max() > 0
