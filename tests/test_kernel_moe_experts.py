"""moe_experts: packing, plan, and the kernels with their PTX emulated, against the reference."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest

from inkling_jax import quant
from inkling_jax.ops import pack_experts
from pallas_kernels import moe_experts as ops
from pallas_kernels.moe_experts import kernel_sm90, tiles
from pallas_kernels.moe_experts import reference as ref

CAPS = {"gate_softcap": 4.0, "up_softcap": 25.0}
# Jitted, with the weights as arguments: of full width they are too large for a program's constants.
pack_nvfp4, pack_mxfp8, pack_bfloat16 = (
    jax.jit(pack, static_argnames="interleaved")
    for pack in (ops.pack_nvfp4, ops.pack_mxfp8, ops.pack_bfloat16)
)


def random_experts(key, format, shape):
    """Random packed experts (w13 interleaved if so named) and their float32 values."""
    n, rows, columns = shape
    keys = jax.random.split(key, 3)
    if format == "bfloat16":
        w = (0.1 * jax.random.normal(keys[0], shape)).astype(jnp.bfloat16)
        return w.astype(jnp.float32), lambda i: pack_bfloat16(w, interleaved=i)
    if format == "mxfp8":
        values = jax.random.normal(keys[0], shape).astype(jnp.float8_e4m3fn)
        blocks = (n, rows, columns // 32)
        scales = jax.random.randint(keys[1], blocks, 118, 126).astype(jnp.uint8)
        w = ref.dequantize_mxfp8(values, scales)
        return w, lambda i: pack_mxfp8(values, scales, interleaved=i)
    values = jax.random.bits(keys[0], (n, rows, columns // 2), jnp.uint8)
    scales = jax.random.uniform(keys[1], (n, rows, columns // 16), maxval=0.25)
    scales = scales.at[:, ::5].set(0).at[:, 1::7].multiply(2.0**-7).astype(jnp.float8_e4m3fn)
    outer = (
        jax.random.randint(keys[2], (n,), 4, 9).astype(jnp.float32) / 8
    )  # few bits: products stay exact
    w = ref.dequantize_nvfp4(values, scales, outer)
    return w, lambda i: pack_nvfp4(values, scales, outer, interleaved=i)


def run_both(format, tokens, valid, picked, experts, hidden, inner, monkeypatch):
    keys = jax.random.split(jax.random.key(tokens), 4)
    w13, pack13 = random_experts(keys[0], format, (experts, 2 * inner, hidden))
    w2, pack2 = random_experts(keys[1], format, (experts, hidden, inner))
    x = jax.random.normal(keys[2], (tokens, hidden)).astype(jnp.bfloat16)
    weights = jax.random.uniform(keys[3], picked.shape)
    valid = jnp.array(valid)[:, None]
    picked = jnp.where(valid, picked, experts)
    expected = ref.moe_experts(x, picked, weights, w13, w2, **CAPS)
    poisoned = jnp.where(valid, x, jnp.nan)
    ptx_emulator.interpreted(monkeypatch, kernel_sm90)
    out = ops.moe_experts(poisoned, picked, weights, pack13(True), pack2(False), **CAPS)
    # bfloat16 activations between the projections may round to the other neighbour.
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(out, expected, atol=4e-3 * scale)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "bfloat16"])
def test_five_tokens_one_of_them_padding(format, monkeypatch):
    for bound in ("FEW", "MANY"):  # cut as if there were many programs
        monkeypatch.setattr(tiles, bound, 0)
    picked = jnp.array([[0, 3], [3, 2], [5, 3], [1, 4], [3, 5]], jnp.int32)
    run_both(format, 5, [True, True, False, True, True], picked, 6, 256, 64, monkeypatch)


def test_a_rank_has_more_warps_along_the_columns_where_programs_are_few():
    few, many = (tiles.choose_warps(1152, 4608, items) for items in (8, 64))
    assert (few, many) == (8, 4)
    few, many = (tiles.choose_warps(4608, 576, items) for items in (8, 64))  # nine steps
    assert (few, many) == (4, 1)


@pytest.mark.long
def test_seventeen_tokens_on_one_expert_need_three_passes(monkeypatch):
    picked = jnp.full((17, 1), 1, jnp.int32)
    run_both("nvfp4", 17, [True] * 17, picked, 3, 576, 48, monkeypatch)


ROUND = {
    "nvfp4": quant.quantize_nvfp4,
    "mxfp8": quant.quantize_mxfp8,
    "bfloat16": lambda w: w.astype(jnp.bfloat16),
}


@pytest.mark.parametrize("format", ROUND)
def test_gate_and_up_are_capped(format, monkeypatch):  # CM-09
    """Token 1 meets 25 pairs, one per inner channel, far below, near and far above the caps."""
    pairs = np.array(list(itertools.product((-48, -4, 0, 4, 48), (-48, -24, 0, 24, 48))))
    w13 = ROUND[format](jnp.zeros((6, 128, 256)).at[3, :50, 0].set(pairs.ravel() * 1.0))
    w2 = ROUND[format](jnp.zeros((6, 256, 64)).at[3, jnp.arange(64), jnp.arange(64)].set(1))
    x = jnp.zeros((5, 256), jnp.bfloat16).at[1, 0].set(1)
    picked = jnp.full((5, 2), 6, jnp.int32).at[1, 0].set(3)
    ptx_emulator.interpreted(monkeypatch, kernel_sm90)
    packed = pack_experts(w13, interleaved=True), pack_experts(w2, interleaved=False)
    out = ops.moe_experts(x, picked, jnp.ones((5, 2)), *packed, **CAPS)
    rounded = np.asarray(quant.dequantize(w13, jnp.float32), np.float64)[3, :50, 0]
    gate, up = rounded.reshape(25, 2).T
    want = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
    np.testing.assert_allclose(out[1, :25], want, rtol=2**-8, atol=1e-6)


def dequantized_by_emulator(packed, fragment_rows, columns):
    """Reads packed weights back through the very PTX: products with unit vectors."""
    lane = jnp.arange(128)
    out = []
    for load_columns in range(0, columns, 8):
        x = jnp.zeros((8, columns), jnp.bfloat16).at[jnp.arange(8), load_columns + jnp.arange(8)]
        x = x.set(1)
        g, t = lane // 16, lane // 4 % 4
        acts = [x[g, t * 16 + 4 * j + lane % 4] for j in range(4)]
        scale = []
        if packed.scales is not None:
            shared = packed.scales[0, 0, 0]
            scale = [shared if shared.shape[0] == 128 else shared[lane // 8 * 4 + lane % 4]]
        rows = []
        for fragment in range(2):
            asm, constraints = kernel_sm90.fragment_product(packed.format, fragment)
            [sums] = ptx_emulator.elementwise_inline_asm(
                asm,
                args=[*packed.words[0, 0, 0, fragment], *scale, *acts, jnp.zeros(128)],
                constraints=constraints,
                pack=4,
                result_shape_dtypes=[jax.ShapeDtypeStruct((128,), jnp.float32)],
            )
            # element 16g + 4t + 2h + b: row g + 8h, column 2t + b
            rows.append(sums.reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8))
        out.append(jnp.concatenate(rows))
    return jnp.concatenate(out, axis=1) * packed.outer[0]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "bfloat16"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_packing_is_exact(format, interleaved):
    w, pack = random_experts(jax.random.key(7), format, (1, 32, 64))
    read = dequantized_by_emulator(pack(interleaved), 32, 64)
    order = np.arange(32).reshape(16, 2).T.reshape(32) if interleaved else np.arange(32)
    np.testing.assert_array_equal(read, w[0, order])


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "bfloat16"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_unpacking_gives_back_every_value(format, interleaved):
    w, pack = random_experts(jax.random.key(8), format, (2, 64, 96))
    packed = pack(interleaved)
    assert packed.shape == w.shape and packed.format == format
    np.testing.assert_array_equal(ops.unpack(packed), w)
    np.testing.assert_array_equal(ops.unpack(packed[jnp.array([1])]), w[1:])


@pytest.mark.parametrize(("rows", "align"), [(8, 1), (16, 8)])
def test_plan_lists_valid_picks_once(rows, align):
    rng = np.random.default_rng(0)
    picked = np.stack([rng.permutation(12)[:3] for _ in range(17)]).astype(np.int32)
    picked[:11, 0] = np.where((picked[:11] == 7).any(1), picked[:11, 0], 7)
    valid = np.arange(17) % 4 != 1
    picked[~valid] = 12
    plan = jax.tree.map(np.asarray, ops.make_plan(jnp.array(picked), 12, rows, align))
    busy = plan.count > 0
    assert not busy[busy.argmin() :].any() or busy.all(), "idle items come last"
    assert plan.count.max() <= rows and not (plan.start % align).any()
    seen = []
    for e, start, count in zip(plan.expert, plan.start, plan.count, strict=True):
        slots = plan.order[start : start + count]
        assert (picked.reshape(-1)[slots] == e).all()
        seen += list(slots)
    wanted = np.flatnonzero(np.repeat(valid, 3))
    np.testing.assert_array_equal(np.sort(seen), wanted)


def test_plan_of_no_valid_row_is_idle():
    plan = ops.make_plan(jnp.full((3, 2), 4, jnp.int32), 4)
    assert not np.asarray(plan.count).any()


def test_refusals_name_the_value():
    assert "hidden size 72" in ops.unsupported(72, 16, jnp.bfloat16)
    assert "expert width 24" in ops.unsupported(64, 24, jnp.bfloat16)
    assert "float32" in ops.unsupported(64, 16, jnp.float32)
    assert ops.unsupported(4608, 576, jnp.bfloat16) is None
