"""qkv_prep against its plain reference, in Pallas' interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.qkv_prep import qkv_prep, qkv_prep_long
from pallas_kernels.qkv_prep.reference import qkv_prep as reference
from pallas_kernels.qkv_prep.reference import qkv_prep_long as reference_long

HEADS, KV_HEADS, DIM, RANKS, TAPS = 4, 2, 8, 4, 4
OPTIONS = {"qk_threshold": 2.0, "rel_threshold": 1.0, "eps": 1e-6}


def make_inputs(seed, batch, tokens, slots, conv_slots, dynamic, dtype=jnp.float32):
    """Random inputs; half of the vectors are longer than what they are clipped to."""
    keys = iter(jax.random.split(jax.random.key(seed), 16))

    def normal(*shape, dtype=jnp.float32):
        return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)

    def taps():
        if not dynamic:
            return normal(KV_HEADS, DIM, TAPS)
        return normal(TAPS, KV_HEADS, DIM), normal(batch, tokens, KV_HEADS, TAPS)

    heads, kv_heads = (HEADS, DIM), (KV_HEADS, DIM)
    return {
        "q": normal(batch, tokens, *heads),
        "r": normal(batch, tokens, HEADS, RANKS) / 2,
        "k": normal(batch, tokens, *kv_heads),
        "v": normal(batch, tokens, *kv_heads),
        "q_scale": normal(*heads, dtype=dtype),
        "r_scale": normal(HEADS, RANKS, dtype=dtype),
        "k_taps": taps(),
        "v_taps": taps(),
        "k_cache": normal(batch, slots, *kv_heads, dtype=dtype),
        "v_cache": normal(batch, slots, *kv_heads, dtype=dtype),
        "k_state": normal(batch, conv_slots, *kv_heads),
        "v_state": normal(batch, conv_slots, *kv_heads),
    }


def make_long_inputs(seed, batch, tokens, dynamic, dtype=jnp.float32):
    """Inputs of `qkv_prep_long`: what was before instead of rings."""
    inputs = make_inputs(seed, batch, tokens, 1, TAPS - 1, dynamic, dtype)
    inputs |= {f"{name}_before": inputs.pop(f"{name}_state") for name in "kv"}
    del inputs["k_cache"], inputs["v_cache"]
    return inputs


def poison(inputs, lengths, fill=np.nan):
    """Puts `fill` where an invalid token's products and dynamic taps are."""

    def put(x):
        valid = jnp.arange(x.shape[1]) < jnp.array(lengths)[:, None]
        return jnp.where(valid[..., None, None], x, fill)

    new = {name: put(inputs[name]) for name in ("q", "r", "k", "v")}
    if isinstance(inputs["k_taps"], tuple):
        new |= {name: (inputs[name][0], put(inputs[name][1])) for name in ("k_taps", "v_taps")}
    return inputs | new


CASES = [
    pytest.param(1, [0, 9, 1000], [1, 1, 1], 16, False, id="one token, first, later, far"),
    pytest.param(5, [2, 14, 33], [5, 3, 0], 16, False, id="ragged, less history than taps, wrap"),
    pytest.param(8, [0, 30, 61], [8, 1, 7], 72, True, id="eight tokens, dynamic taps, linear"),
    pytest.param(1, [0, 1, 63], [1, 0, 1], 64, True, id="one token, dynamic taps, last slot"),
]


@pytest.mark.parametrize(("tokens", "start", "lengths", "slots", "dynamic"), CASES)
def test_matches_reference(tokens, start, lengths, slots, dynamic):
    inputs = make_inputs(tokens, 3, tokens, slots, TAPS - 1 + tokens, dynamic)
    where = {"start": jnp.array(start, jnp.int32), "lengths": jnp.array(lengths, jnp.int32)}
    options = OPTIONS | ({"log_scaling": (4, 0.3)} if dynamic else {})
    expected = reference(**inputs, **where, **options)
    out = qkv_prep(**poison(inputs, lengths), **where, **options, interpret=True)
    for x, wanted, name in zip(out, expected, out._fields, strict=True):
        np.testing.assert_allclose(x, wanted, atol=1e-6, rtol=1e-5, err_msg=name)


LONG = [
    pytest.param(65, [65, 33, 0], False, id="65 tokens, ragged"),
    pytest.param(31, [31, 2, 17], True, id="a block less one, dynamic taps"),
    pytest.param(33, [33, 32, 1], True, id="a block and one, dynamic taps"),
]


@pytest.mark.parametrize(("tokens", "lengths", "dynamic"), LONG)
def test_many_tokens_match_the_reference(tokens, lengths, dynamic):
    inputs = make_long_inputs(tokens, 3, tokens, dynamic)
    where = {"start": jnp.array([0, 5, 900], jnp.int32), "lengths": jnp.array(lengths, jnp.int32)}
    options = OPTIONS | {"dtype": jnp.float32, "log_scaling": (4, 0.3) if dynamic else None}
    expected = reference_long(**inputs, **where, **options)
    out = qkv_prep_long(**poison(inputs, lengths), **where, **options, interpret=True)
    for x, wanted, name in zip(out, expected, out._fields, strict=True):
        np.testing.assert_allclose(x, wanted, atol=1e-6, rtol=1e-5, err_msg=name)


def test_refusals_name_the_value():
    inputs = make_inputs(0, 1, 5, 16, 7, False)
    where = {"start": jnp.zeros(1, jnp.int32), "lengths": jnp.ones(1, jnp.int32)}
    with pytest.raises(ValueError, match="convolution has 7 slots, it needs 8"):
        qkv_prep(**inputs, **where, **OPTIONS)
    narrow = inputs | {name: inputs[name][:, :4] for name in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match="cache has 4 slots, it needs 5"):
        qkv_prep(**narrow, **where, **OPTIONS)
