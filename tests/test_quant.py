import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from inkling_jax import quant


def test_e8m0_codes():  # QZ-01
    codes = jnp.array([0, 1, 127, 134, 254, 255], jnp.uint8)
    want = np.array([2.0**-127, 2.0**-126, 1, 128, 2.0**127, np.nan], np.float32)
    for decode in (quant.e8m0, jax.jit(quant.e8m0)):
        bits = np.asarray(decode(codes)).view(np.uint32)  # a float compare would flush 2^-127
        np.testing.assert_array_equal(bits[:5], want[:5].view(np.uint32))
        assert np.isnan(np.asarray(decode(codes))[5])


def test_e4m3_scales_and_values_decode_as_the_standard_says():  # QZ-02
    codes = np.arange(256, dtype=np.uint8)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    table = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal) * np.where(codes > 127, -1, 1)
    table[[0x7F, 0xFF]] = np.nan
    values = jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)).reshape(1, 8, 32)
    packed = quant.QuantTensor(values, jnp.full((1, 8, 1), 127, jnp.uint8), None)
    got = np.asarray(quant.dequantize(packed, jnp.float32)).reshape(-1)
    np.testing.assert_array_equal(got, table.astype(np.float32))
    assert np.signbit(got[0x80]) and (got[0x7E], got[0x01], got[0x08]) == (448, 2**-9, 2**-6)


def test_nvfp4_nibbles_blocks_and_outer_scale():
    codes = np.arange(16, dtype=np.uint8).repeat(2).reshape(1, 1, 32)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    scales = jnp.array([[[0.5, 2.0]]], jnp.float8_e4m3fn)
    q = quant.QuantTensor(jnp.asarray(packed), scales, jnp.array([3.0]))
    assert q.shape == (1, 1, 32)
    want = np.array(quant.E2M1_VALUES).repeat(2) * np.array([0.5, 2.0]).repeat(16) * 3
    np.testing.assert_array_equal(quant.dequantize(q, jnp.float32)[0, 0], want)


def test_scale_blocks_stay_with_their_weights():  # QZ-04
    n, r, c = 3, 40, 96
    expert, group = np.arange(n)[:, None, None], np.arange(c // 32)
    scales = np.broadcast_to(127 + expert + group, (n, r, c // 32)).astype(np.uint8)
    values = jnp.ones((n, r, c), jnp.float8_e4m3fn)
    q = quant.QuantTensor(values, jnp.asarray(scales), None)
    want = np.broadcast_to(2.0 ** (expert + np.arange(c) // 32), (n, r, c))
    np.testing.assert_array_equal(quant.dequantize(q, jnp.float32), want)
    np.testing.assert_array_equal(quant.dequantize(q[jnp.array([2, 0])], jnp.float32), want[[2, 0]])


@pytest.mark.parametrize(
    ("quantize", "error"), [(quant.quantize_mxfp8, 0.125), (quant.quantize_nvfp4, 0.2)]
)
def test_quantize_rounds_to_the_nearest(quantize, error):
    w = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 64)), jnp.float32)
    q = quantize(w)
    again = quant.dequantize(q, jnp.float32)
    block = np.abs(np.asarray(w)).reshape(2, 8, -1, 16).max(-1).repeat(16, -1).reshape(w.shape)
    assert (np.abs(again - w) <= error * block).all()
    abstract = quant.abstract(w.shape, q.format)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), q) == jax.tree.map(
        lambda a: (a.shape, a.dtype), abstract
    )
    np.testing.assert_allclose(quant.dequantize(quantize(again), jnp.float32), again, rtol=1e-5)


@pytest.mark.parametrize("quantize", [quant.quantize_mxfp8, quant.quantize_nvfp4])
def test_bfloat16_loses_nothing_of_a_packed_weight(quantize):
    q = quantize(jax.random.normal(jax.random.key(0), (2, 8, 64)))
    matrices, factors = quant.split_outer(q, jnp.bfloat16)
    again = matrices.astype(jnp.float32) * factors[:, None, None]
    np.testing.assert_allclose(again, quant.dequantize(q, jnp.float32), rtol=1e-6)
