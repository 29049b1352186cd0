"""What runs as a kernel, that a GPU's decode step is made of kernels, and what it computes."""

import dataclasses
import functools
import logging
import types
from collections import Counter

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh
from test_kernel_rel_attention_prefill import interpreted_prefill

from inkling_jax import attention, kernel_choice, model, moe, ops, quant, sampling, short_conv
from inkling_jax.cache import init_cache
from inkling_jax.config import FULL, SLIDING
from inkling_jax.errors import InputError
from inkling_jax.generation import decode, prefill
from inkling_jax.loading import pack_for_kernels
from inkling_jax.model import abstract_params
from pallas_kernels.conv_mix import kernel as mixing
from pallas_kernels.moe_experts import kernel_sm90
from pallas_kernels.rel_attention_decode import kernel

HEADS = {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 64}
CONFIG = dataclasses.replace(
    helpers.TINY,
    text=dataclasses.replace(
        helpers.TEXT,
        hidden_size=128,
        moe_intermediate_size=64,
        d_rel=16,
        num_hidden_layers=2,
        layer_types=(SLIDING, FULL),
        **HEADS,
        **{f"swa_{name}": value for name, value in HEADS.items()},
    ),
    vision=dataclasses.replace(helpers.VISION, text_hidden_size=128),
)
MAX_BLOCK = 4
DECODING = (ops.EXPERTS, ops.ATTENTION, ops.ROUTER, ops.MIX)
KERNELS = {"pallas_call": 9, "mpmd_map": 2}  # of a layer, by the primitive of their backend


def bfloat16_params(config=CONFIG):
    """Parameters with NVFP4 experts in layer 0, MXFP8 in layer 1."""
    specs = abstract_params(config, jnp.bfloat16)
    params = jax.tree.map(lambda a, s: a.astype(s.dtype), helpers.tiny_params(config), specs)
    for layer, fmt in enumerate((quant.quantize_nvfp4, quant.quantize_mxfp8)):
        experts = params["layers"][layer]["moe"]
        for name in ("w13", "w2"):
            experts[name] = experts[name].replace(fmt(experts[name].get_value()))
    return params


@pytest.fixture
def on_gpu(monkeypatch):
    """Chooses as on a GPU, forgetting what was chosen and traced before."""
    jax.clear_caches()
    monkeypatch.setattr(kernel_choice, "device_refusal", lambda: None)
    monkeypatch.setattr(kernel_choice, "_chosen", {})
    kernel_choice._announce.cache_clear()


def read_twice(params, tokens):
    """Logits of a ragged block of tokens a row, then of one more token."""
    cache = init_cache(CONFIG.text, 2, 64, MAX_BLOCK, jnp.bfloat16)
    run = jax.jit(decode, static_argnums=1)
    lengths = jnp.array([4, 2], jnp.int32)
    block, cache = run(params, CONFIG, tokens[:, :4], cache, lengths)
    one, _ = run(params, CONFIG, tokens[:, 4:], cache)
    real = np.arange(4) < np.array(lengths)[:, None]
    return np.concatenate([np.asarray(block)[real], np.asarray(one)[:, 0]])


@pytest.fixture
def float32_products(monkeypatch):
    """Widens the operands of products, which XLA's CPU takes in bfloat16 only here and there."""

    def wide(product):
        return lambda *args, **options: product(
            *(a.astype(jnp.float32) if isinstance(a, jax.Array) else a for a in args), **options
        )

    for module in (attention, model, moe, short_conv):
        monkeypatch.setattr(module, "einsum", wide(module.einsum), raising=False)
    monkeypatch.setattr(kernel.plt, "dot", wide(kernel.plt.dot))


@pytest.mark.long
@pytest.mark.usefixtures("float32_products")
def test_kernels_compute_what_the_plain_step_computes(on_gpu, monkeypatch):
    tokens = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], jnp.int32)
    with monkeypatch.context() as patch:
        patch.setattr(kernel_choice, "device_refusal", lambda: "it is told not to")
        plain = read_twice(bfloat16_params(), tokens)
        assert kernel_choice.chosen() == dict.fromkeys(DECODING, "it is told not to")
    ptx_emulator.interpreted(monkeypatch, kernel_sm90)
    helpers.interpret_mosaic(monkeypatch, mixing)
    out = read_twice(pack_for_kernels(bfloat16_params(), CONFIG), tokens)
    assert kernel_choice.chosen() == dict.fromkeys(DECODING, kernel_choice.KERNEL)
    error = np.linalg.norm(out - plain) / np.linalg.norm(plain)
    assert 0 < error < 0.02


def primitives(jaxpr, found):
    """Counts the primitives of a program, kernels as one."""
    for equation in jaxpr.eqns:
        found[equation.primitive.name] += 1
        if equation.primitive.name not in KERNELS:
            for inner in jaxprs_in_params(equation.params):
                primitives(inner, found)
    return found


@pytest.mark.parametrize("tokens", [1, MAX_BLOCK])
def test_a_decode_step_has_eleven_kernels_a_layer_and_no_branch(tokens, on_gpu):
    params = pack_for_kernels(bfloat16_params(), CONFIG)
    cache = init_cache(CONFIG.text, 2, 64, MAX_BLOCK, jnp.bfloat16)
    ids = jnp.zeros((2, tokens), jnp.int32)
    program = jax.make_jaxpr(decode, static_argnums=1)(params, CONFIG, ids, cache)
    found = primitives(program.jaxpr, Counter())
    for primitive, count in KERNELS.items():
        assert found[primitive] == count * CONFIG.text.num_hidden_layers
    assert not {"cond", "while", "scan"} & set(found)


@pytest.mark.long
def test_the_kernel_draws_the_tokens_of_the_plain_sampler(on_gpu, monkeypatch):
    interpreted = functools.partial(ops.prefix_end, interpret=True)
    monkeypatch.setattr(ops, "prefix_end", interpreted)
    logits = 3 * jax.random.normal(jax.random.key(0), (6, 9000))
    filters = sampling.Filters(
        top_k=jnp.array([0, 50, 0, 7, 0, 9000], jnp.int32),
        top_p=jnp.array([1.0, 0.95, 0.9, 1.0, 0.99, 1.0]),
        min_p=jnp.array([0.0, 0.0, 0.0, 0.05, 0.0, 0.0]),
    )
    settings = sampling.Sampling(jnp.array([0.0, 0.7, 1.0, 1.0, 2.0, 1.0]), filters)
    keys, positions = sampling.keys_from_seeds(range(6)), jnp.arange(6)

    def draw():
        kept = sampling.filtered_logits(logits, settings)
        return kept, sampling.sample(logits, settings, keys, positions)[0]

    by_kernel = draw()
    assert kernel_choice.chosen() == {ops.SAMPLING: kernel_choice.KERNEL}
    monkeypatch.setattr(kernel_choice, "device_refusal", lambda: "it is told not to")
    for found, plain in zip(by_kernel, draw(), strict=True):
        np.testing.assert_array_equal(found, plain)


def test_prefill_reads_the_packed_experts(on_gpu, monkeypatch):
    """A device without wgmma: the plain path unpacks, and agrees with itself."""
    z = jax.random.normal(jax.random.key(0), (65, 128)).astype(jnp.bfloat16)
    picks = jnp.tile(jnp.array([[0, 3]], jnp.int32), (65, 1))
    weights = jnp.ones((65, 2))
    moes = [p["layers"][0]["moe"] for p in (bfloat16_params(), bfloat16_params())]
    for name in ("w13", "w2"):
        packed = ops.pack_experts(moes[1][name].get_value(), interleaved=name == "w13")
        moes[1][name] = moes[1][name].replace(packed)
    (w13, w2), packed = ([m[name].get_value() for name in ("w13", "w2")] for m in moes)
    assert ops.takes_experts(z, *packed)
    newer = types.SimpleNamespace(platform="gpu", compute_capability="10.0")
    monkeypatch.setattr(kernel_choice, "_default_device", lambda: newer)
    assert ops.takes_experts(z[:64], *packed)
    np.testing.assert_array_equal(
        moe.experts(z, picks, weights, w13, w2, 4.0, 25.0),
        moe.experts(z, picks, weights, *packed, 4.0, 25.0),
    )
    refusal = "the compute capability is 10.0, many tokens need 9.0"
    assert kernel_choice.chosen()[ops.EXPERTS] == refusal


def test_products_of_many_rows_are_left_to_xla():
    keys = jax.random.split(jax.random.key(0))
    x, weight = jax.random.normal(keys[0], (13, 5, 32)), jax.random.normal(keys[1], (3, 4, 32))
    [out] = ops.project([(x, weight)])
    np.testing.assert_allclose(out, jnp.einsum("btd,hkd->bthk", x, weight), atol=1e-5)


def takes_attention(tokens, dtype=jnp.bfloat16, devices=1):
    """What is chosen for a block of tokens in a sliding layer."""
    text = CONFIG.text
    cache = jax.eval_shape(lambda: init_cache(text, 1, 64, MAX_BLOCK, dtype)).layers[0]
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache)
    z = jnp.zeros((1, tokens, text.hidden_size), dtype)
    shape = text.attention(0)
    sizes = shape.heads, text.d_rel, text.conv_kernel_size, shape.window
    return ops.takes_attention(z, cache, *sizes, devices * cache.k.shape[1])


def test_a_choice_is_logged_once(on_gpu, caplog):
    caplog.set_level(logging.INFO, "inkling_jax.kernel_choice")
    refusal = "the ring of the convolution has 7 slots, it needs 8"
    for _ in range(2):
        assert takes_attention(2)
        assert not takes_attention(MAX_BLOCK + 1)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "rel_attention_decode: kernel"),
        ("WARNING", f"rel_attention_decode: plain JAX, {refusal}"),
    ]
    assert kernel_choice.chosen() == {ops.ATTENTION: refusal}


def test_refusals_name_what_does_not_fit(on_gpu):
    z = jnp.zeros((1, 128), jnp.float32)
    params = bfloat16_params()["layers"][0]["moe"]
    w13, w2 = (params[name].get_value() for name in ("w13", "w2"))
    assert not ops.takes_experts(z, w13, w2)
    assert kernel_choice.chosen()[ops.EXPERTS] == "activations are float32, not bfloat16"
    assert not ops.takes_experts(z.astype(jnp.bfloat16), w13, w2)
    assert kernel_choice.chosen()[ops.EXPERTS] == "the experts were not packed by `load`"
    assert not takes_attention(1, jnp.float32)
    assert "float32" in kernel_choice.chosen()[ops.ATTENTION]
    assert not takes_attention(1, devices=2)
    refusal = "each device has 12 of the 24 slots of full layers (cp)"
    assert kernel_choice.chosen()[ops.ATTENTION] == refusal
    narrow = jnp.zeros((1, 1, 96))
    assert not ops.takes_mix(narrow, (narrow,), jnp.zeros((96, 4)), jnp.zeros((1, 4, 96)))
    assert kernel_choice.chosen()[ops.MIX] == "hidden size 96 is not a multiple of 128"


@pytest.mark.long
@pytest.mark.usefixtures("float32_products")
def test_prefill_by_the_kernel_computes_what_the_plain_one_does(on_gpu, monkeypatch):
    """Two ragged chunks, the second of which starts off the tile."""
    text = dataclasses.replace(CONFIG.text, sliding_window_size=128, rel_extent=24)
    config = dataclasses.replace(CONFIG, text=text)
    params = bfloat16_params(config)
    tokens = jax.random.randint(jax.random.key(0), (2, 40), 0, text.unpadded_vocab_size)

    def read():
        cache = init_cache(text, 2, 64, MAX_BLOCK, jnp.bfloat16)
        run = jax.jit(prefill, static_argnums=1)
        first, cache = run(params, config, tokens[:, :20], jnp.array([20, 11]), cache)
        second, _ = run(params, config, tokens[:, 20:], jnp.array([13, 20]), cache)
        return np.concatenate([first, second])

    with monkeypatch.context() as patch:
        patch.setattr(kernel_choice, "device_refusal", lambda: "it is told not to")
        plain = read()
    for other in ("takes_preparation", "takes_long_mix"):
        monkeypatch.setattr(ops, other, lambda *args: False)
    interpreted_prefill(monkeypatch)
    out = read()
    assert kernel_choice.chosen()[ops.PREFILL] == kernel_choice.KERNEL
    error = np.linalg.norm(out - plain) / np.linalg.norm(plain)
    assert 0 < error < 0.02


def test_prefill_attends_by_a_kernel_or_says_why(on_gpu):
    q, cache = jnp.zeros((1, 9, 6, 64), jnp.bfloat16), jnp.zeros((1, 136, 1, 64), jnp.bfloat16)
    proj = jnp.zeros((16, 24), jnp.bfloat16)
    assert not ops.takes_prefill(q[:, : ops.MAX_QUERIES], cache, proj, None, 136)
    assert ops.PREFILL not in kernel_choice.chosen()
    assert ops.takes_prefill(q, cache, proj, None, 136)
    refused = [
        ((q.astype(jnp.float32), cache, proj, None, 136), "float32"),
        ((q, cache[:, 1:], proj, None, 135), "135 slots"),
        ((q, cache, proj, None, 272), "136 of the 272 slots"),
        ((q, cache, proj, 24, 136), "the window of 24"),
    ]
    for given, reason in refused:
        assert not ops.takes_prefill(*given)
        assert reason in kernel_choice.chosen()[ops.PREFILL]


@pytest.mark.parametrize(
    ("tokens", "slots", "takes"), [(4, 7, True), (5, 7, False), (65, 99, False)]
)
def test_only_what_may_be_taken_back_is_mixed_as_few_tokens(tokens, slots, takes, on_gpu):
    u, state = jnp.zeros((1, tokens, 128)), jnp.zeros((1, slots, 128))
    assert ops.takes_mix(u, (u,), jnp.zeros((128, 4)), state) == takes
    assert (ops.MIX in kernel_choice.chosen()) == takes


def test_a_cpu_packs_nothing():
    params = bfloat16_params()
    assert kernel_choice.device_refusal() == "the platform is cpu"
    assert pack_for_kernels(params, CONFIG) is params
    assert isinstance(nnx.to_pure_dict(params)["layers"][0]["moe"]["w13"], quant.QuantTensor)


def test_older_devices_have_no_kernels_on_a_mesh_either(monkeypatch):
    older = types.SimpleNamespace(platform="gpu", compute_capability="8.0")
    monkeypatch.setattr(kernel_choice, "_default_device", lambda: older)
    mesh = AbstractMesh((2,), ("tp0",), abstract_device=AbstractDevice("NVIDIA A100", None, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        assert kernel_choice.device_refusal() == "the compute capability is 8.0, kernels need 9.0"


def test_kernels_can_be_turned_off(monkeypatch):
    hopper = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(kernel_choice, "_default_device", lambda: hopper)
    monkeypatch.delenv(kernel_choice.SWITCH, raising=False)
    assert kernel_choice.device_refusal() is None
    monkeypatch.setenv(kernel_choice.SWITCH, "0")
    assert kernel_choice.device_refusal() == "INKLING_JAX_KERNELS=0 turns kernels off"
    monkeypatch.setenv(kernel_choice.SWITCH, "off")
    for device in (hopper, types.SimpleNamespace(platform="cpu")):
        monkeypatch.setattr(kernel_choice, "_default_device", lambda device=device: device)
        with pytest.raises(InputError, match="INKLING_JAX_KERNELS is 'off', it must be 0 or 1"):
            kernel_choice.device_refusal()


def test_a_model_spread_over_devices_keeps_the_plain_path(on_gpu):
    with jax.set_mesh(jax.make_mesh((2,), ("tensor",))):
        assert not takes_attention(1)
    assert kernel_choice.chosen()[ops.ATTENTION] == "the model is spread over 2 devices"
