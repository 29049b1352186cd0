"""draft_attention against its plain reference, in Pallas' interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import draft_attention as op
from pallas_kernels.draft_attention import draft_attention
from pallas_kernels.draft_attention.reference import draft_attention as reference

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 32, 3


def make_inputs(seed, start, tokens, slots, dtype=jnp.float32):
    """Random operands; slots that hold no token are NaN."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    rows = len(start)
    context = normal(rows, slots, LAYERS, 2, KV_HEADS, DIM)
    exists = jnp.arange(slots) < jnp.array(start)[:, None]
    context = jnp.where(exists[(..., *(None,) * 4)], context, jnp.nan)
    angle = normal(rows, tokens, DIM // 2)
    return {
        "q": normal(rows, tokens, HEADS, DIM),
        "k": normal(rows, tokens, KV_HEADS, DIM),
        "v": normal(rows, tokens, KV_HEADS, DIM),
        "q_norm": 1 + normal(DIM) / 4,
        "k_norm": 1 + normal(DIM) / 4,
        "cos": jnp.cos(angle),
        "sin": jnp.sin(angle),
        "context": context.astype(dtype),
        "start": jnp.array(start, jnp.int32),
    }


def assert_equal(inputs, interpret=True, atol=1e-5):
    found, want = (
        np.asarray(
            jax.jit(lambda inputs, f=f, o=o: f(**inputs, layer=1, eps=1e-6, **o))(inputs),
            np.float32,
        )
        for f, o in ((draft_attention, {"interpret": interpret}), (reference, {}))
    )
    np.testing.assert_allclose(found, want, atol=atol)


@pytest.mark.parametrize("tokens", [1, 7])
def test_matches_reference(tokens, monkeypatch):
    """No context, one key, the edges of a block of keys, more splits than blocks."""
    monkeypatch.setattr(op, "SPLIT_SLOTS", 80)
    assert_equal(make_inputs(tokens, [0, 1, 64, 65, 190], tokens, 200))


def test_refusals_name_the_value():
    inputs = make_inputs(0, [3], 40, 8)
    assert "48" in str(op.unsupported(7, 4, 2, 48))
    with pytest.raises(ValueError, match="40 tokens x 4 heads need 256 rows"):
        draft_attention(
            **inputs | {"q": jnp.zeros((1, 40, 8, DIM))}, layer=0, eps=1e-6, interpret=True
        )
