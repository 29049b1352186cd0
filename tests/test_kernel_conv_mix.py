"""conv_mix against its plain reference, in Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import conv_mix as contract
from pallas_kernels.conv_mix.reference import conv_mix as reference
from pallas_kernels.conv_mix.reference import conv_mix_long as reference_long
from pallas_kernels.conv_mix.reference import inverse_rms

WIDTH, TAPS, SLOTS = 256, 4, 20
F32, BF16 = jnp.float32, jnp.bfloat16
EPS = {"eps": 1e-6, "norm_eps": 1e-5}

conv_mix = functools.partial(contract.conv_mix, **EPS, interpret=plgpu.InterpretGPUParams())


def make_inputs(seed, batch, tokens, queries, count, dtype=jnp.float32, width=WIDTH, summands=()):
    """Inputs after `count` finished blocks; norms in `dtype`; u in so many `summands`, if any."""
    keys = iter(jax.random.split(jax.random.key(seed), 99))

    def normal(*shape, dtype=jnp.float32):
        return jax.random.normal(next(keys), shape, dtype)

    blocks = [2**i * normal(batch, tokens, width) for i in range(count)]
    return {
        "u": normal(batch, tokens, *summands, width),
        "partial": normal(batch, tokens, width),
        "blocks": blocks,
        "scales": [inverse_rms(block, EPS["eps"]) for block in blocks],
        "queries": normal(queries, width),
        "norms": [normal(width, dtype=dtype) for _ in range(queries)],
        "weight": normal(width, TAPS),
        "state": normal(batch, SLOTS, width),
    }


CASES = [
    pytest.param(1, 1, 1, [F32], (8,), id="one row in eight summands, one finished block"),
    pytest.param(5, 3, 8, [BF16], (), id="five rows, three queries, nine sources"),
    pytest.param(17, 1, 4, [F32], (), id="17 rows, a block starts"),
    pytest.param(6, 2, 1, [F32, BF16], (3,), id="six rows in three summands, two dtypes"),
]


def assert_close(found, wanted, valid, dtypes):
    """Compares the z of valid rows, each query's in every dtype."""
    assert [z.dtype for z in found] == [*dtypes] * (len(wanted) // len(dtypes))
    for x, y in zip(found, wanted, strict=True):
        rounding = 2e-5 if x.dtype == F32 else 2e-2
        x, y = (np.asarray(z, np.float32)[valid] for z in (x, y))
        np.testing.assert_allclose(x, y, atol=rounding, rtol=rounding)


@pytest.mark.parametrize(("tokens", "queries", "count", "dtypes", "summands"), CASES)
def test_matches_reference(tokens, queries, count, dtypes, summands):
    inputs = make_inputs(tokens, 2, tokens, queries, count, dtypes[-1], summands=summands)
    if tokens == 17:
        inputs["partial"] = None
    where = {
        "start": jnp.array([2, 41], jnp.int32),  # less history than taps, and a wrapped ring
        "lengths": jnp.array([tokens, tokens // 2], jnp.int32),
    }
    valid = np.arange(tokens) < np.array(where["lengths"])[:, None]
    z, partial, scale, state = reference(**inputs, **where, dtypes=dtypes, **EPS)
    inputs["u"] = inputs["u"].at[~valid].set(jnp.nan)
    out = conv_mix(**inputs, **where, dtypes=dtypes)
    assert_close(out.z, z, valid, dtypes)
    np.testing.assert_allclose(out.partial, partial, atol=2e-5)
    np.testing.assert_allclose(out.scale[valid], scale[valid], rtol=2e-5)
    np.testing.assert_allclose(out.state, state, atol=1e-6)


def test_taps_run_forward_and_the_input_is_added_once():
    """Pitfall CM-04: taps oldest to newest (1, 10, 100, 1000), inputs 1...5."""
    inputs = make_inputs(0, 1, 5, 1, 1)
    inputs["u"] = jnp.broadcast_to(jnp.arange(1.0, 6)[None, :, None], inputs["u"].shape)
    inputs["weight"] = jnp.broadcast_to(jnp.array([1.0, 10, 100, 1000]), (WIDTH, TAPS))
    inputs["partial"] = jnp.zeros_like(inputs["partial"])
    where = {"start": jnp.zeros(1, jnp.int32), "lengths": jnp.full(1, 5, jnp.int32)}
    out = conv_mix(**inputs, **where, dtypes=[F32])
    sums = np.array([1001, 2102, 3213, 4325, 5437]) / np.sqrt(5)
    np.testing.assert_allclose(out.partial[0, :, 0], sums, rtol=1e-6)


LONG = [
    pytest.param(65, 1, 8, [F32, BF16], id="65 rows, nine sources, two dtypes"),
    pytest.param(7, 3, 1, [BF16], id="seven rows, three queries"),
    pytest.param(2, 1, 0, [F32], id="fewer rows than taps, a block starts, none is finished"),
]


@pytest.mark.parametrize(("tokens", "queries", "count", "dtypes"), LONG)
def test_many_rows_match_the_reference(tokens, queries, count, dtypes, width=384):
    """Rows of 384 are two parts; what comes after the valid tokens of a row is NaN."""
    inputs = make_inputs(tokens, 2, tokens, queries, count, dtypes[-1], width)
    inputs["before"] = inputs.pop("state")[:, : TAPS - 1]
    if not count:
        inputs["partial"] = None
    valid = np.arange(tokens) < np.array([tokens, tokens // 2])[:, None]
    z, partial, scale = reference_long(**inputs, dtypes=dtypes, **EPS)
    inputs["u"] = inputs["u"].at[~valid].set(jnp.nan)
    out = contract.conv_mix_long(**inputs, dtypes=dtypes, **EPS, interpret=True)
    assert_close(out.z, z, valid, dtypes)
    np.testing.assert_allclose(out.partial[valid], partial[valid], atol=2e-5)
    np.testing.assert_allclose(out.scale[valid], scale[valid], rtol=2e-5)


def test_rows_in_two_calls_are_those_of_one():
    """The second call's `before` are the first one's last inputs."""
    inputs = make_inputs(0, 1, 9, 1, 1)
    inputs["before"] = jnp.zeros_like(inputs.pop("state")[:, : TAPS - 1])
    run = functools.partial(contract.conv_mix_long, dtypes=[F32], **EPS, interpret=True)
    rows = {"u", "partial", "blocks", "scales"}
    whole, halves = run(**inputs), []
    for part in (slice(0, 5), slice(5, 9)):
        cut = {name: jax.tree.map(lambda x: x[:, part], inputs[name]) for name in rows}  # noqa: B023
        halves.append(run(**inputs | cut))
        inputs["before"] = cut["u"][:, -TAPS + 1 :]
    joined = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *halves)
    jax.tree.map(np.testing.assert_array_equal, joined, whole)


def test_refusals_name_the_value():
    inputs = make_inputs(0, 1, 1, 1, 1)
    where = {"start": jnp.zeros(1, jnp.int32), "lengths": jnp.ones(1, jnp.int32)}
    inputs["state"] = inputs["state"][:, :3]
    with pytest.raises(ValueError, match="ring has 3 slots, it needs 4"):
        conv_mix(**inputs, **where, dtypes=[F32])
    unsupported = contract.unsupported
    assert unsupported(64, 4608, 8) is None
    assert unsupported(65, 4608, 8) == "65 tokens, the kernel takes at most 64"
    assert unsupported(1, 96, 8) == "hidden size 96 is not a multiple of 128"
    assert "no block is finished" in unsupported(1, 128, 0)
    assert "16 blocks leave 102 elements to a thread" in unsupported(1, 4608, 16)
    assert contract.unsupported_long(8192, 4608) is None
    assert contract.unsupported_long(9, 96) == "hidden size 96 is not a multiple of 128"
    assert "1048576 tokens of 4608" in str(contract.unsupported_long(1 << 20, 4608))
