"""moe_experts of many tokens: decoding emulated, the kernels interpreted around it."""

import jax
import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_kernel_moe_experts import CAPS, random_experts

from pallas_kernels import moe_experts as ops
from pallas_kernels.moe_experts import kernel_many_sm90, ptx, tiles
from pallas_kernels.moe_experts import reference as ref
from pallas_kernels.moe_experts.pack import LOADS, PackedExperts, column_order
from pallas_kernels.moe_experts.wgmma_lanes import HALF

TILE = 72  # tokens of a work item in these tests, for products of two widths


@pytest.mark.parametrize("format", LOADS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_half_fragments_are_the_weights_in_the_order_of_k(format, interleaved):
    w, pack = random_experts(jax.random.key(7), format, (1, 32, 64))
    packed = pack(interleaved)
    words = packed.words[0, 0, 0].view(jnp.uint32)  # [fragment, load, 128]
    scales = []
    if packed.scales is not None:
        lane = np.arange(32) * packed.scales.shape[3] // 128
        scales = [np.asarray(packed.scales).view(np.uint32).reshape(-1)[lane]]
    rows = []
    for fragment in range(2):
        of_lane = np.asarray(words[fragment]).reshape(LOADS[format], 32, 4)
        of_lane = of_lane.transpose(0, 2, 1).reshape(2, -1, 32)
        operands = []
        for half in range(2):
            asm, _ = ptx.half_fragment(format, fragment)
            a = ptx_emulator.execute(asm, 8, [*of_lane[half], *scales])
            operands += [ptx_emulator.operand_a(a[:4])[0], ptx_emulator.operand_a(a[4:])[0]]
        rows.append(np.concatenate(operands, axis=1))
    read = np.concatenate(rows).astype(np.float32) * packed.outer[0]
    order = np.arange(32).reshape(16, 2).T.reshape(32) if interleaved else np.arange(32)
    np.testing.assert_array_equal(read, column_order(w)[0, order])


def interpreted(monkeypatch):
    """Runs the kernels in the interpreter, with what lanes do in plain JAX."""

    def load_weights(format, fragment, half, words, *scales):
        words = words[...].reshape(1, 4, 1, 2, LOADS[format], 128)
        scales = scales[0][...].reshape(1, 4, 1, -1) if scales else None
        tiles = ops.unpack(PackedExperts(words, scales, jnp.ones(1), 64, False))
        rows = column_order(tiles).reshape(4, 2, 16, 2, HALF)[:, fragment, :, half]
        return rows.reshape(64, HALF).astype(jnp.bfloat16)

    def store_activations(act, out, start, count, block):
        rows = column_order(act.T).astype(out.dtype)

        @pl.loop(0, count)
        def _(i):
            out[start + i, pl.ds(64 * block, 64)] = lax.dynamic_slice_in_dim(rows, i, 1)[0]

    def store_rows(sums, out, order, start, count, block):
        rows = jnp.stack([s.reshape(4, 16, -1) for s in sums], axis=1).reshape(128, -1).T

        @pl.loop(0, jnp.where(128 * block < out.shape[1], count, 0))
        def _(i):
            row = lax.dynamic_slice_in_dim(rows, i, 1)[0]
            out[order[start + i], pl.ds(128 * block, 128)] = row

    kernel, multiply, stage = plgpu.kernel, plgpu.wgmma, []

    def staging(body, *, scratch_types, **options):
        def with_stage(*refs, a_stage, **scratch):
            stage.append(a_stage)
            body(*refs, **scratch)

        a_stage = plgpu.SMEM((2, 64, HALF), jnp.bfloat16)
        scratch_types = {**scratch_types, "a_stage": a_stage}
        options["interpret"] = plgpu.InterpretGPUParams()
        return kernel(with_stage, scratch_types=scratch_types, **options)

    def wgmma(acc, a, b):
        """Takes A through shared memory, from where alone the interpreter takes it."""
        own = stage[-1].at[lax.axis_index("group")]
        own[...] = a
        multiply(acc, own, b)

    monkeypatch.setattr(plgpu, "kernel", staging)
    monkeypatch.setattr(plgpu, "wgmma", wgmma)
    for function in (load_weights, store_activations, store_rows):
        monkeypatch.setattr(kernel_many_sm90, function.__name__, function)
    monkeypatch.setattr(kernel_many_sm90, "PROGRAMS", 2)
    monkeypatch.setattr(tiles, "choose_tokens", lambda slots, experts: TILE)
    jax.clear_caches()


def random_picks(key, tokens, experts):
    return jax.lax.top_k(jax.random.normal(key, (tokens, experts)), 2)[1].astype(jnp.int32)


PICKS = {
    "any": lambda key: random_picks(key, 97, 5),
    "one expert": lambda key: jnp.full((97, 2), 5, jnp.int32).at[:, 1].set(3),
    "none at all": lambda key: jnp.full((97, 2), 5, jnp.int32),
    "a tile": lambda key: jnp.full((97, 2), 5, jnp.int32).at[:TILE, 0].set(4),
    "a tile and one": lambda key: jnp.full((97, 2), 5, jnp.int32).at[: TILE + 1, 0].set(0),
}


@pytest.mark.parametrize("picks", PICKS)
def test_kernels_match_the_reference(picks, monkeypatch):
    keys = jax.random.split(jax.random.key(1), 5)
    w13, pack13 = random_experts(keys[0], "mxfp8", (5, 192, 128))
    w2, pack2 = random_experts(keys[1], "mxfp8", (5, 128, 96))
    x = jax.random.normal(keys[2], (97, 128)).astype(jnp.bfloat16)
    picked = PICKS[picks](keys[3])
    picked = jnp.where((jnp.arange(97) % 5 == 2)[:, None], 5, picked) if picks == "any" else picked
    weights = jax.random.uniform(keys[4], picked.shape)
    expected = ref.moe_experts(x, picked, weights, w13, w2, **CAPS)
    x = jnp.where((picked < 5).any(axis=1)[:, None], x, jnp.nan)
    interpreted(monkeypatch)
    out = ops.moe_experts(x, picked, weights, pack13(True), pack2(False), **CAPS)
    np.testing.assert_allclose(out, expected, atol=4e-3 * float(jnp.abs(expected).max()))


def test_tiles_hold_what_most_experts_get():
    for tokens, rows in ((65, 16), (256, 16), (2048, 64), (8192, 192), (1 << 20, 192)):
        assert tiles.choose_tokens(8 * tokens, 384) == rows
    assert tiles.choose_tokens(65, 1) == 64, "no copy is larger than what there is"


def test_many_tokens_are_refused_by_their_shapes():
    picked, weights = jnp.zeros((65, 1), jnp.int32), jnp.ones((65, 1))
    w13, w2 = (
        ops.pack_bfloat16(jnp.zeros(shape, jnp.bfloat16), interleaved=shape[1] == 32)
        for shape in ((2, 32, 64), (2, 64, 16))
    )
    with pytest.raises(ValueError, match="hidden size 72 is not a multiple of 64"):
        ops.moe_experts(jnp.zeros((65, 72), jnp.bfloat16), picked, weights, w13, w2, **CAPS)
