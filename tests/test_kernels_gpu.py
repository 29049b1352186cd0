"""Every kernel on the GPU at production widths, against its reference; and the model."""

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_kernel_conv_mix as mixing
import test_kernel_draft_attention as drafting
import test_kernel_moe_experts as moe
import test_kernel_projections as thin_products
import test_kernel_qkv_prep as preparing
import test_kernel_rel_attention_decode as attention
import test_kernel_rel_attention_prefill as prefilling
import test_kernel_router as routing
import test_kernel_sampling as ending
import test_ops as step
from safetensors.numpy import load_file
from test_gpu import FIXTURES, NANO

import inkling_jax as ij
from inkling_jax import kernel_choice
from inkling_jax.loading import pack_for_kernels
from pallas_kernels import conv_mix, moe_experts, projections
from pallas_kernels.conv_mix import reference as conv_mix_reference
from pallas_kernels.conv_mix import shapes as mixing_sizes
from pallas_kernels.draft_attention import shapes as drafting_sizes
from pallas_kernels.moe_experts import reference as moe_reference
from pallas_kernels.moe_experts import shapes as sizes
from pallas_kernels.moe_experts import tiles
from pallas_kernels.projections import reference as projections_reference
from pallas_kernels.projections import shapes as thin
from pallas_kernels.qkv_prep import qkv_prep, qkv_prep_long
from pallas_kernels.qkv_prep import reference as preparing_reference
from pallas_kernels.qkv_prep import shapes as preparing_sizes
from pallas_kernels.rel_attention_decode import reference as attention_reference
from pallas_kernels.rel_attention_decode import rel_attention_decode
from pallas_kernels.rel_attention_decode import shapes as attention_sizes
from pallas_kernels.rel_attention_prefill import reference as prefill_reference
from pallas_kernels.rel_attention_prefill import rel_attention_prefill
from pallas_kernels.rel_attention_prefill import shapes as prefill_sizes
from pallas_kernels.router import route
from pallas_kernels.router import shapes as router_sizes
from pallas_kernels.sampling.shapes import VOCABULARY
from scripts import bench_sharded
from scripts.sharded_parts import allreduce

pytestmark = [
    pytest.mark.gpu,
    # Pallas announces on every lowering that its Triton backend will be removed one day.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Leaves NaN where the next outputs will be allocated; the reference runs in full float32."""
    blocks = [jnp.full(1 << 26, jnp.nan) for _ in range(8)]
    jax.block_until_ready(blocks)
    del blocks
    with jax.default_matmul_precision("highest"):
        yield


def fresh_seed():
    return np.random.SeedSequence().entropy % 2**31


def assert_close(out, expected, relative):
    """The error's norm; NaN never passes."""
    out, expected = (np.asarray(a, np.float64) for a in (out, expected))
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    assert error < relative, f"relative error {error:.2e}"


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "bfloat16"])
@pytest.mark.parametrize(
    ("inner", "tokens"),
    [
        *((sizes.WIDTH, n) for n in (1, 8, 17, 300)),
        *((sizes.WIDTH_TP4, n) for n in (5, 65)),
        *((sizes.WIDTH_TP8, n) for n in (64, 501)),
    ],
)
def test_moe_experts(format, inner, tokens):
    experts, hidden, k = 12, sizes.HIDDEN, sizes.PICKS
    keys = jax.random.split(jax.random.key(fresh_seed()), 4)
    w13, pack13 = moe.random_experts(keys[0], format, (experts, 2 * inner, hidden))
    w2, pack2 = moe.random_experts(keys[1], format, (experts, hidden, inner))
    x = jax.random.normal(keys[2], (tokens, hidden)).astype(jnp.bfloat16)
    x = (x.astype(jnp.float32) / 16).astype(jnp.bfloat16)
    weights = jax.random.uniform(keys[3], (tokens, k))
    order = np.argsort(np.random.default_rng(tokens).random((tokens, experts)))
    picked = jnp.array(order[:, :k], jnp.int32)
    valid = (jnp.arange(tokens) % 5 != 3)[:, None]
    picked = jnp.where(valid, picked, experts)
    expected = moe_reference.moe_experts(x, picked, weights, w13, w2, **moe.CAPS)
    run = jax.jit(functools.partial(moe_experts.moe_experts, **moe.CAPS))
    out = run(jnp.where(valid, x, jnp.nan), picked, weights, pack13(True), pack2(False))
    assert_close(out, expected, 5e-3)


@pytest.mark.parametrize("more", [-1, 0, 1, 224])
def test_moe_experts_of_uneven_loads(more):
    """One expert gets a tile and so many more of 400 tokens, most get none."""
    experts, hidden, inner = 6, 512, 160
    most = tiles.choose_tokens(800, experts) + more
    keys = jax.random.split(jax.random.key(fresh_seed()), 4)
    w13, pack13 = moe.random_experts(keys[0], "nvfp4", (experts, 2 * inner, hidden))
    w2, pack2 = moe.random_experts(keys[1], "nvfp4", (experts, hidden, inner))
    x = jax.random.normal(keys[2], (400, hidden)).astype(jnp.bfloat16)
    weights = jax.random.uniform(keys[3], (400, 2))
    token = jnp.arange(400)
    picked = jnp.stack(
        [jnp.where(token < most, 4, experts), jnp.where(token % 9 == 1, 2, experts)], axis=1
    ).astype(jnp.int32)
    expected = moe_reference.moe_experts(x, picked, weights, w13, w2, **moe.CAPS)
    x = jnp.where((picked < experts).any(axis=1)[:, None], x, jnp.nan)
    run = jax.jit(functools.partial(moe_experts.moe_experts, **moe.CAPS))
    assert_close(run(x, picked, weights, pack13(True), pack2(False)), expected, 5e-3)


@pytest.mark.parametrize("tokens", [1, 5, 8])
@pytest.mark.parametrize("window", [None, attention_sizes.WINDOW])
def test_rel_attention_decode(tokens, window, monkeypatch):
    for name in ("HEADS", "KV_HEADS", "DIM", "RANKS"):
        monkeypatch.setattr(attention, name, getattr(attention_sizes, name))
    slots = window + 8 if window else 5000
    inputs = attention.make_inputs(tokens, 2, tokens, slots, attention_sizes.EXTENT)
    reference = attention_reference.rel_attention_decode
    run = jax.jit(lambda i, s, n: rel_attention_decode(**i, start=s, lengths=n, window=window))
    plain = jax.jit(lambda i, s, n: reference(**i, start=s, lengths=n, window=window))
    for first in (0, 14, 62, 63, 64, 1015, 1022, 1023, 1024, 1025, 4900):
        start, lengths = [first, first // 2], [tokens, max(tokens - 2, 0)]
        where = (jnp.array(start, jnp.int32), jnp.array(lengths, jnp.int32))
        outs = []
        for fill in (np.nan, 1e30):
            poisoned = attention.poison(inputs, start, lengths, window, fill)
            poisoned = {n: a.astype(jnp.bfloat16) for n, a in poisoned.items()}
            outs.append(run(poisoned, *where))
        np.testing.assert_array_equal(*(np.asarray(o, np.float32) for o in outs))
        clean = {n: jnp.nan_to_num(a.astype(jnp.float32)) for n, a in poisoned.items()}
        clean = {n: jnp.where(jnp.abs(a) > 1e20, 0, a) for n, a in clean.items()}
        assert_close(outs[0], plain(clean, *where), 1e-2)


@pytest.mark.parametrize("tokens", [9, 129, 1000])
@pytest.mark.parametrize(
    ("window", "dim"),
    [(None, prefill_sizes.DIM), (prefill_sizes.WINDOW, prefill_sizes.DIM), (128, 64)],
)
def test_rel_attention_prefill(tokens, window, dim, monkeypatch):
    monkeypatch.setattr(prefilling, "HEADS", prefill_sizes.HEADS)
    monkeypatch.setattr(prefilling, "KV_HEADS", prefill_sizes.KV_HEADS)
    monkeypatch.setattr(prefilling, "DIM", dim)
    slots = window + tokens if window else 3000
    inputs = prefilling.make_inputs(fresh_seed(), 2, tokens, slots, prefill_sizes.EXTENT)
    run, plain = (
        jax.jit(lambda i, s, n, f=f: f(**i, start=s, lengths=n, window=window))
        for f in (rel_attention_prefill, prefill_reference.rel_attention_prefill)
    )
    for first in (0, 5, 127, 128, 1023, 1024, 2000):
        start, lengths = [first, first // 2], [tokens, tokens // 2]
        where = (jnp.array(start, jnp.int32), jnp.array(lengths, jnp.int32))
        outs = [
            run(prefilling.poison(inputs, start, lengths, window, fill), *where)
            for fill in (np.nan, 1e30)
        ]
        np.testing.assert_array_equal(*(np.asarray(o, np.float32) for o in outs))
        assert_close(outs[0], plain(inputs, *where), 5e-3)


@pytest.mark.parametrize("slots", [700, 9000], ids=["one split", "nine splits"])
def test_draft_attention(slots, monkeypatch):
    for name in ("HEADS", "KV_HEADS", "DIM", "LAYERS"):
        monkeypatch.setattr(drafting, name, getattr(drafting_sizes, name))
    start = [0, 1, 63, 64, 65, slots - 100]
    inputs = drafting.make_inputs(slots, start, drafting_sizes.BLOCK, slots, jnp.bfloat16)
    drafting.assert_equal(inputs, interpret=False, atol=2e-2)


@pytest.mark.parametrize(
    ("tokens", "queries", "dtype"),
    [(1, 1, jnp.bfloat16), (5, 3, jnp.bfloat16), (17, 1, jnp.float32), (32, 3, jnp.float32)],
)
def test_conv_mix(tokens, queries, dtype):
    width, blocks = mixing_sizes.HIDDEN, mixing_sizes.BLOCKS
    inputs = mixing.make_inputs(fresh_seed(), 2, tokens, queries, blocks, jnp.bfloat16, width)
    start = jnp.array([2, 41], jnp.int32)
    lengths = jnp.array([tokens, tokens // 2], jnp.int32)
    inputs["state"] = jnp.resize(inputs["state"], (2, tokens + 3, width))
    if tokens == 17:
        inputs["partial"] = None  # a block starts
    options = {"start": start, "lengths": lengths, "dtypes": (dtype,), **mixing.EPS}
    valid = np.arange(tokens) < np.array(lengths)[:, None]
    expected = conv_mix_reference.conv_mix(**inputs, **options)
    inputs["u"] = jnp.where(valid[..., None], inputs["u"], jnp.nan)
    out = jax.jit(lambda inputs: conv_mix.conv_mix(**inputs, **options))(inputs)
    for found, wanted in zip(out.z, expected[0], strict=True):
        assert_close(found[valid], wanted[valid], 5e-3 if dtype == jnp.bfloat16 else 1e-5)
    for found, wanted in zip(out[1:3], expected[1:3], strict=True):
        assert_close(found[valid], wanted[valid], 1e-5)
    assert_close(out.state, expected[3], 1e-6)


@pytest.mark.parametrize(("tokens", "queries"), [(8192, 1), (1025, 3), (9, 1)])
def test_conv_mix_long(tokens, queries):
    width, blocks = mixing_sizes.HIDDEN, mixing_sizes.BLOCKS
    inputs = mixing.make_inputs(fresh_seed(), 1, tokens, queries, blocks, jnp.bfloat16, width)
    inputs["before"] = inputs.pop("state")[:, : mixing.TAPS - 1]
    options = {"dtypes": (jnp.bfloat16,), **mixing.EPS}
    valid = np.arange(tokens) < tokens - 2
    expected = jax.jit(lambda given: conv_mix_reference.conv_mix_long(**given, **options))(inputs)
    inputs["u"] = jnp.where(valid[:, None], inputs["u"], jnp.nan)
    out = jax.jit(lambda given: conv_mix.conv_mix_long(**given, **options))(inputs)
    for found, wanted in zip(out.z, expected[0], strict=True):
        assert_close(found[:, valid], wanted[:, valid], 5e-3)
    for found, wanted in zip(out[1:], expected[1:], strict=True):
        assert_close(found[:, valid], wanted[:, valid], 1e-5)


@pytest.mark.parametrize(("tokens", "dynamic"), [(8192, False), (1025, True)])
def test_qkv_prep_long(tokens, dynamic, monkeypatch):
    for name in ("HEADS", "KV_HEADS", "DIM", "RANKS"):
        monkeypatch.setattr(preparing, name, getattr(preparing_sizes, name))
    inputs = preparing.make_long_inputs(fresh_seed(), 2, tokens, dynamic, jnp.bfloat16)
    lengths = [tokens, tokens // 3]
    where = {"start": jnp.array([1, 90000], jnp.int32), "lengths": jnp.array(lengths, jnp.int32)}
    log_scaling = preparing_sizes.LOG_SCALING if dynamic else None
    options = preparing_sizes.OPTIONS | {"dtype": jnp.bfloat16, "log_scaling": log_scaling}
    run = jax.jit(lambda given: qkv_prep_long(**given, **where, **options))
    out = run(preparing.poison(inputs, lengths))
    expected = preparing_reference.qkv_prep_long(**inputs, **where, **options)
    for found, wanted in zip(out, expected, strict=True):
        assert_close(found, wanted, 5e-3)


def test_allreduce_conv_mix_between_gpus(tmp_path):
    """In a process of its own, which is killed when it hangs."""
    if (count := len(jax.devices("gpu"))) < 2:
        pytest.skip(f"needs two GPUs, {count} there")
    out = tmp_path / "rows.json"
    options = ["--only", "check", "--repetitions", "1000", "--out", str(out), "--commit", "none"]
    assert bench_sharded.main(options) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == len(allreduce.ROWS) and all(row["correct"] for row in rows)


def test_nano_decodes_by_kernels_on_two_gpus():
    """In a process of its own, which is killed when it hangs: the reply of one GPU in float32."""
    if (count := len(jax.devices("gpu"))) < 2:
        pytest.skip(f"needs two GPUs, {count} there")
    question = "What is 17 + 25?"
    command = [sys.executable, "-m", "inkling_jax.cli", "generate", "--model", str(NANO), "--json"]
    command += ["--mesh", "tp=2", "--prompt", question, "--temp", "0", "--max-tokens", "48"]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    out = subprocess.run(command, stdout=subprocess.PIPE, timeout=200, check=True, env=environment)
    found = json.loads(out.stdout)
    greedy = ij.SamplingParams(temperature=0.0, max_tokens=48)
    [expected] = ij.load(NANO, dtype="float32").generate([question], greedy)
    assert found["token_ids"] == expected.token_ids
    kernels = found["stats"]["kernels"]
    assert set(kernels.values()) == {kernel_choice.KERNEL}


@pytest.mark.parametrize("tokens", [1, 8, 17, 64])
@pytest.mark.parametrize("rows", [thin.FULL, thin.RANK])
def test_projections(tokens, rows):
    key = jax.random.key(fresh_seed())
    shapes = [(n, thin.HIDDEN) for n in rows] + [thin.WO]
    products = thin_products.make_products(key, tokens, shapes, jnp.bfloat16)
    outs = jax.jit(projections.project)(products)
    for out, expected in zip(outs, projections_reference.project(products), strict=True):
        assert_close(out, expected, 1e-5)


@pytest.mark.parametrize("tokens", [1, 5, 8])
@pytest.mark.parametrize("dynamic", [False, True])
def test_qkv_prep(tokens, dynamic, monkeypatch):
    for name in ("HEADS", "KV_HEADS", "DIM", "RANKS"):
        monkeypatch.setattr(preparing, name, getattr(preparing_sizes, name))
    slots, conv_slots = (5000 if dynamic else 1032), preparing_sizes.TAPS - 1 + tokens
    inputs = preparing.make_inputs(tokens, 3, tokens, slots, conv_slots, dynamic, jnp.bfloat16)
    scaling = {"log_scaling": (1000, 0.1)} if dynamic else {}
    options = preparing_sizes.OPTIONS | scaling
    # Sums of other order: neither a clip's edge nor a rounding to bfloat16 may fall elsewhere.
    tolerance = {"q": 5e-3, "r": 5e-3, "k_cache": 5e-3, "v_cache": 5e-3}
    for start in ([0, 1, 2], [1030, 1023, 4990]):
        lengths = [tokens, max(tokens - 2, 0), 1]
        where = {"start": jnp.array(start, jnp.int32), "lengths": jnp.array(lengths, jnp.int32)}
        expected = preparing_reference.qkv_prep(**inputs, **where, **options)
        run = jax.jit(functools.partial(qkv_prep, **where, **options))
        out = run(**preparing.poison(inputs, lengths))
        for name, x, wanted in zip(out._fields, out, expected, strict=True):
            assert_close(x, wanted, tolerance.get(name, 1e-6))


@pytest.mark.parametrize("tokens", [1, 5, 8, 17, 64])
def test_router(tokens):
    seed, k = fresh_seed(), router_sizes.PICKS
    inputs = routing.make_inputs(seed, tokens, router_sizes.EXPERTS, router_sizes.HIDDEN)
    z, gate, bias, real = inputs
    gate = gate.at[100:300].set(gate[100])  # equal scores
    z, bias = jnp.where(real[:, None], z, jnp.nan), bias.at[100:300].set(bias[100])
    out = jax.jit(functools.partial(route, k=k, scale=routing.SCALE))(z, gate, bias, real)
    routing.assert_routed(out, z, gate, bias, real, k, 1e-6)
    within = [row[(row >= 100) & (row < 300)] for row in np.asarray(out[0])]
    for row in within:
        np.testing.assert_array_equal(row, 100 + np.arange(len(row)))


@pytest.mark.parametrize("kind", ["distinct", "ties", "flat"])
def test_sampling(kind):
    top_k, top_p = np.array(ending.SETTINGS).T
    if kind != "distinct":  # sums of 200,000 equal numbers are rounded too much to name a token
        top_p = np.where((top_k > 50) & (top_p < 1), 0.0, top_p)
    rng = np.random.default_rng()
    logits = rng.normal(size=(len(top_k), VOCABULARY)).astype(np.float32) * 8
    if kind == "ties":
        logits = np.round(logits) + np.float32(0)
    if kind == "flat":
        logits[:] = -2.5
    ending.assert_ends(logits, top_k, top_p, interpret=False)


def test_a_decode_step_through_kernels(monkeypatch):
    tokens = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], jnp.int32)
    with monkeypatch.context() as patch:
        patch.setattr(kernel_choice, "device_refusal", lambda: "it is told not to")
        plain = step.read_twice(step.bfloat16_params(), tokens)
    packed = pack_for_kernels(step.bfloat16_params(), step.CONFIG)
    jax.clear_caches()  # what attends was chosen while tracing
    assert_close(step.read_twice(packed, tokens), plain, 2e-2)
    assert set(kernel_choice.chosen().values()) == {kernel_choice.KERNEL}


def test_a_reference_case_through_kernels():
    """Prompts of the reference a few tokens at a time, as decoding reads them, in bfloat16."""
    expected = load_file(FIXTURES / "wide" / "expected.safetensors")
    model = ij.load(FIXTURES / "wide" / "checkpoint", dtype="bfloat16")
    decode = jax.jit(ij.decode, static_argnums=1)
    for key, width in (("text17", 1), ("text37", 8)):
        tokens = jnp.asarray(expected[f"{key}.tokens"])[None]
        cache = ij.init_cache(model.config.text, 1, tokens.shape[1] + width, width, jnp.bfloat16)
        logits = []
        for at in range(0, tokens.shape[1], width):
            part = tokens[:, at : at + width]
            count = jnp.array([part.shape[1]])
            part = jnp.pad(part, ((0, 0), (0, width - part.shape[1])))
            out, cache = decode(model.params, model.config, part, cache, count)
            logits.append(out[0, : count[0]])
        assert_close(jnp.concatenate(logits), expected[f"{key}.logits"], 3e-2)
    assert set(kernel_choice.chosen().values()) == {kernel_choice.KERNEL}


def test_nano_decodes_by_kernels_alone(caplog):
    """Both formats: the replies are those of a float32 model, which takes the plain path."""
    model = ij.load(NANO)
    questions = ["Who are you?", "Reverse the words: one two three", "What is 17 + 25?", "Hello!"]
    greedy = ij.SamplingParams(temperature=0.0, max_tokens=48, logprobs=1)
    outputs = model.generate(questions, greedy)
    assert not [r.getMessage() for r in caplog.records if r.name == kernel_choice.__name__]
    expected = ij.load(NANO, dtype="float32").generate(questions, greedy)
    for output, wanted in zip(outputs, expected, strict=True):
        assert set(output.stats["kernels"].values()) == {kernel_choice.KERNEL}
        assert output.token_ids == wanted.token_ids
        found, exact = ([token.logprob for token in o.logprobs] for o in (output, wanted))
        np.testing.assert_allclose(found, exact, atol=0.1)
