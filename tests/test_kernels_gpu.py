"""Every decode kernel on the GPU at production widths, against its reference; and the model."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_kernel_conv_mix as mixing
import test_kernel_moe_experts as moe
import test_kernel_rel_attention_decode as attention
import test_ops as step
from test_gpu import NANO

import inkling_jax as ij
from inkling_jax import ops as inkling_ops
from inkling_jax.loading import pack_for_kernels
from pallas_kernels import conv_mix, moe_experts, projections
from pallas_kernels.conv_mix import reference as conv_mix_reference
from pallas_kernels.conv_mix import shapes as mixing_sizes
from pallas_kernels.moe_experts import reference as moe_reference
from pallas_kernels.moe_experts import shapes as sizes
from pallas_kernels.projections import reference as projections_reference
from pallas_kernels.projections import shapes as thin
from pallas_kernels.rel_attention_decode import reference as attention_reference
from pallas_kernels.rel_attention_decode import rel_attention_decode
from pallas_kernels.rel_attention_decode import shapes as attention_sizes
from scripts import bench_sharded

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
    ("inner", "counts"),
    [(sizes.WIDTH, (1, 8, 17)), (sizes.WIDTH_TP4, (5,)), (sizes.WIDTH_TP8, (64,))],
)
def test_moe_experts(format, inner, counts):
    experts, hidden, k = 12, sizes.HIDDEN, sizes.PICKS
    keys = jax.random.split(jax.random.key(fresh_seed()), 4)
    w13, pack13 = moe.random_experts(keys[0], format, (experts, 2 * inner, hidden))
    w2, pack2 = moe.random_experts(keys[1], format, (experts, hidden, inner))
    packed = jax.jit(lambda: (pack13(True), pack2(False)))()
    for tokens in counts:
        x = jax.random.normal(keys[2], (tokens, hidden)).astype(jnp.bfloat16)
        x = (x.astype(jnp.float32) / 16).astype(jnp.bfloat16)
        weights = jax.random.uniform(keys[3], (tokens, k))
        order = np.argsort(np.random.default_rng(tokens).random((tokens, experts)))
        picked = jnp.array(order[:, :k], jnp.int32)
        valid = (jnp.arange(tokens) % 5 != 3)[:, None]
        picked = jnp.where(valid, picked, experts)
        expected = moe_reference.moe_experts(x, picked, weights, w13, w2, **moe.CAPS)
        run = jax.jit(functools.partial(moe_experts.moe_experts, **moe.CAPS))
        out = run(jnp.where(valid, x, jnp.nan), picked, weights, *packed)
        assert_close(out, expected, 5e-3)


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


@pytest.mark.parametrize(
    ("tokens", "queries", "dtype"),
    [(1, 1, jnp.bfloat16), (5, 3, jnp.bfloat16), (17, 1, jnp.float32), (32, 3, jnp.float32)],
)
def test_conv_mix(tokens, queries, dtype, monkeypatch):
    monkeypatch.setattr(mixing, "WIDTH", mixing_sizes.HIDDEN)
    inputs = mixing.make_inputs(fresh_seed(), 2, tokens, queries, mixing_sizes.BLOCKS, jnp.bfloat16)
    start = jnp.array([2, 41], jnp.int32)
    lengths = jnp.array([tokens, tokens // 2], jnp.int32)
    inputs["state"] = jnp.resize(inputs["state"], (2, tokens + 3, mixing_sizes.HIDDEN))
    if tokens == 17:
        inputs["partial"] = None  # a block starts
    options = {"start": start, "lengths": lengths, "dtype": dtype, **mixing.EPS}
    valid = np.arange(tokens) < np.array(lengths)[:, None]
    expected = conv_mix_reference.conv_mix(**inputs, **options)
    inputs["u"] = jnp.where(valid[..., None], inputs["u"], jnp.nan)
    out = jax.jit(lambda inputs: conv_mix.conv_mix(**inputs, **options))(inputs)
    for found, wanted in zip(out.z, expected[0], strict=True):
        assert_close(found[valid], wanted[valid], 5e-3 if dtype == jnp.bfloat16 else 1e-5)
    for found, wanted in zip(out[1:3], expected[1:3], strict=True):
        assert_close(found[valid], wanted[valid], 1e-5)
    assert_close(out.state, expected[3], 1e-6)


def test_allreduce_conv_mix_between_gpus(tmp_path, monkeypatch):
    """In a process of its own, which is killed when it hangs."""
    if (count := len(jax.devices("gpu"))) < 2:
        pytest.skip(f"needs two GPUs, {count} there")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # this process has most of it
    out = tmp_path / "rows.json"
    options = ["--only", "check", "--repetitions", "1000", "--out", str(out), "--commit", "none"]
    assert bench_sharded.main(options) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == len(bench_sharded.ROWS) and all(row["correct"] for row in rows)


@pytest.mark.parametrize("tokens", [1, 8, 17, 64])
def test_projections(tokens):
    keys = jax.random.split(jax.random.key(fresh_seed()), 2)
    x = jax.random.normal(keys[0], (3, tokens, thin.HIDDEN)).astype(jnp.bfloat16)
    weight = jax.random.normal(keys[1], (thin.INPUT_ROWS - 18, thin.HIDDEN)).astype(jnp.bfloat16)
    bounds = thin.INPUT_BOUNDS
    out = jax.jit(lambda x, w: projections.project(x, w, bounds).sum(axis=1))(x, weight)
    assert_close(out, projections_reference.project(x, weight, bounds), 1e-5)


def test_a_decode_step_through_kernels(monkeypatch):
    tokens = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], jnp.int32)
    with monkeypatch.context() as patch:
        patch.setattr(inkling_ops, "device_refusal", lambda: "it is told not to")
        plain = step.read_twice(step.bfloat16_params(), tokens)
    packed = pack_for_kernels(step.bfloat16_params(), step.CONFIG)
    jax.clear_caches()  # what attends was chosen while tracing
    assert_close(step.read_twice(packed, tokens), plain, 2e-2)
    assert set(inkling_ops.chosen().values()) == {inkling_ops.KERNEL}


def test_nano_decodes_by_kernels_alone(caplog):
    """Both formats: the replies are those of a float32 model, which takes the plain path."""
    model = ij.load(NANO)
    questions = ["Who are you?", "Reverse the words: one two three", "What is 17 + 25?", "Hello!"]
    greedy = ij.SamplingParams(temperature=0.0, max_tokens=48, logprobs=1)
    outputs = model.generate(questions, greedy)
    assert not [r.getMessage() for r in caplog.records if r.name == inkling_ops.__name__]
    expected = ij.load(NANO, dtype="float32").generate(questions, greedy)
    for output, wanted in zip(outputs, expected, strict=True):
        assert set(output.stats["kernels"].values()) == {inkling_ops.KERNEL}
        assert output.token_ids == wanted.token_ids
        found, exact = ([token.logprob for token in o.logprobs] for o in (output, wanted))
        np.testing.assert_allclose(found, exact, atol=0.1)
