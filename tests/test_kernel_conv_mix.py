"""conv_mix against its plain reference, in Pallas' interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.conv_mix import TileConfig, conv_mix, empty_gram
from pallas_kernels.conv_mix.reference import conv_mix as reference

WIDTH, TAPS, SLOTS, EPS = 96, 4, 20, 1e-6


def make_inputs(seed, batch, tokens, parts, queries, count):
    """Inputs after `count` finished blocks; the Gram matrix is exact."""
    keys = iter(jax.random.split(jax.random.key(seed), 7))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32)

    sources = normal(9, batch, tokens, WIDTH)
    blocks = sources[:count]
    gram = empty_gram(batch, tokens)
    gram = gram.at[..., :count, :count].set(jnp.einsum("nbtd,mbtd->btnm", blocks, blocks))
    return {
        "u": normal(batch, tokens, parts, WIDTH),
        "partial": normal(batch, tokens, WIDTH),
        "sources": sources,
        "gram": gram,
        "queries": normal(queries, WIDTH),
        "norms": normal(queries, WIDTH),
        "weight": normal(WIDTH, TAPS),
        "state": normal(batch, SLOTS, WIDTH),
    }


CASES = [
    pytest.param(1, 1, 1, 0, True, id="one row, no finished block"),
    pytest.param(5, 8, 3, 8, True, id="five rows, eight summands, three queries, nine sources"),
    pytest.param(17, 1, 1, 4, False, id="17 rows, partial kept in float32"),
]


@pytest.mark.parametrize(("tokens", "parts", "queries", "count", "keep"), CASES)
def test_matches_reference(tokens, parts, queries, count, keep):
    inputs = make_inputs(tokens, 2, tokens, parts, queries, count)
    if tokens == 17:
        inputs["partial"] = None  # a block starts here
    start = jnp.array([2, 41], jnp.int32)  # less history than taps, and a wrapped ring
    lengths = jnp.array([tokens, tokens // 2], jnp.int32)
    valid = np.arange(tokens) < np.array(lengths)[:, None]
    expected = reference(*inputs.values(), start, lengths, count=count, keep=keep, eps=EPS)
    dead = jnp.where(valid[..., None, None], inputs["u"], jnp.nan)
    out = conv_mix(
        **{**inputs, "u": dead},
        start=start,
        lengths=lengths,
        count=count,
        keep=keep,
        eps=EPS,
        config=TileConfig(32),
        interpret=True,
    )
    z, partial, sources, gram, state = expected
    np.testing.assert_allclose(out.z[:, valid], z[:, valid], atol=2e-5)
    np.testing.assert_allclose(out.gram[valid], gram[valid], rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(out.state, state, atol=1e-6)
    if keep:
        np.testing.assert_allclose(out.sources[:, valid], sources[:, valid], atol=2e-5)
        assert out.partial is None
    else:
        np.testing.assert_allclose(out.partial[valid], partial[valid], atol=2e-5)


def test_taps_run_forward_and_the_input_is_added_once():
    """Pitfall CM-04: taps oldest to newest (1, 10, 100, 1000), inputs 1...5."""
    inputs = make_inputs(0, 1, 5, 1, 1, 0)
    inputs["u"] = jnp.broadcast_to(jnp.arange(1.0, 6)[None, :, None, None], inputs["u"].shape)
    inputs["weight"] = jnp.broadcast_to(jnp.array([1.0, 10, 100, 1000]), (WIDTH, TAPS))
    inputs["partial"] = jnp.zeros_like(inputs["partial"])
    where = {"start": jnp.zeros(1, jnp.int32), "lengths": jnp.full(1, 5, jnp.int32)}
    out = conv_mix(
        **inputs, **where, count=0, keep=False, eps=EPS, config=TileConfig(32), interpret=True
    )
    sums = np.array([1001, 2102, 3213, 4325, 5437]) / np.sqrt(5)
    np.testing.assert_allclose(out.partial[0, :, 0], sums, rtol=1e-6)


def test_refusals_name_the_value():
    inputs = make_inputs(0, 1, 1, 1, 1, 0)
    where = {"start": jnp.zeros(1, jnp.int32), "lengths": jnp.ones(1, jnp.int32)}
    with pytest.raises(ValueError, match="17 sources"):
        conv_mix(**inputs, **where, count=16, keep=True, eps=EPS)
    inputs["state"] = inputs["state"][:, :3]
    with pytest.raises(ValueError, match="ring has 3 slots, it needs 4"):
        conv_mix(**inputs, **where, count=0, keep=True, eps=EPS)
