"""rel_attention_decode against its plain reference, in Pallas' interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rel_attention_decode import TileConfig, rel_attention_decode
from pallas_kernels.rel_attention_decode.reference import rel_attention_decode as reference

HEADS, KV_HEADS, DIM, RANKS = 12, 2, 64, 16  # six query heads to a KV head


def make_inputs(seed, batch, tokens, slots, extent):
    keys = iter(jax.random.split(jax.random.key(seed), 7))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32)

    cache = (batch, slots, KV_HEADS, DIM)
    return {
        "q": normal(batch, tokens, HEADS, DIM),
        "r": normal(batch, tokens, HEADS, RANKS),
        "k": normal(*cache),
        "v": normal(*cache),
        "proj": normal(RANKS, extent),
        "sink": normal(batch, tokens, HEADS),
        "gate": normal(batch, tokens, HEADS, DIM),
    }


def poison(inputs, start, lengths, window, fill):
    """Fills every slot that no valid token can see."""
    slots = inputs["k"].shape[1]
    hidden = np.ones(inputs["k"].shape[:2], bool)
    for row, (p, n) in enumerate(zip(start, lengths, strict=True)):
        lowest = 0 if window is None else max(0, p - window + 1)
        hidden[row, np.arange(lowest, p + n) % slots] = n == 0
    dead = np.arange(inputs["q"].shape[1]) >= np.array(lengths)[:, None]
    filled = {n: np.where(hidden[..., None, None], fill, inputs[n]) for n in ("k", "v")}
    for name in ("q", "r", "gate"):
        filled[name] = np.where(dead[..., None, None], fill, inputs[name])
    return {**inputs, **{name: jnp.array(a, jnp.float32) for name, a in filled.items()}}


# 16 keys a block: lengths at a block's edge and beside it, ragged rows, a row without tokens.
CASES = [
    pytest.param(1, [0, 15], [1, 1], None, 40, id="first token, one full block"),
    pytest.param(1, [16, 31], [1, 1], None, 40, id="block + 1, two blocks"),
    pytest.param(5, [11, 60], [5, 3], None, 66, id="five tokens, ragged, fewer splits than blocks"),
    pytest.param(8, [9, 50], [8, 0], None, 58, id="eight tokens, an empty row"),
    pytest.param(1, [23, 24], [1, 1], 24, 25, id="window full and just passed"),
    pytest.param(5, [90, 7], [5, 2], 24, 28, id="ring wrapped"),
    pytest.param(5, [13, 7], [5, 2], 24, 20, id="fewer slots than the window"),
]


@pytest.mark.parametrize(("tokens", "start", "lengths", "window", "slots"), CASES)
def test_matches_reference(tokens, start, lengths, window, slots):
    inputs = make_inputs(tokens + slots, 2, tokens, slots, 24)
    inputs = poison(inputs, start, lengths, window, np.nan)
    where = (jnp.array(start, jnp.int32), jnp.array(lengths, jnp.int32))
    out = rel_attention_decode(
        *inputs.values(), *where, window=window, config=TileConfig(4, keys=16), interpret=True
    )
    clean = {name: jnp.nan_to_num(a) for name, a in inputs.items()}
    expected = reference(*clean.values(), *where, window=window)
    np.testing.assert_allclose(out, expected, atol=2e-5)


def test_hidden_slots_have_no_influence():  # KR-02
    inputs = make_inputs(3, 2, 5, 30, 8)
    where = (jnp.array([40, 3], jnp.int32), jnp.array([4, 2], jnp.int32))
    outs = [
        rel_attention_decode(
            *poison(inputs, [40, 3], [4, 2], 24, fill).values(),
            *where,
            window=24,
            config=TileConfig(2, keys=16),
            interpret=True,
        )
        for fill in (np.nan, 1e30)
    ]
    np.testing.assert_array_equal(*outs)


def test_bias_ends_at_its_reach():
    """Pitfall CM-02: distances beyond the table are neither boosted nor hidden."""
    inputs = make_inputs(0, 1, 1, 16, 4)
    inputs["q"] = jnp.zeros_like(inputs["q"])
    inputs["r"] = jnp.zeros_like(inputs["r"]).at[..., 0].set(1)
    inputs["proj"] = jnp.zeros((RANKS, 4), jnp.float32).at[0, 3].set(jnp.log(2.0))
    inputs["sink"] = jnp.zeros_like(inputs["sink"])
    inputs["gate"] = jnp.full_like(inputs["gate"], jnp.inf)
    inputs["v"] = jnp.zeros_like(inputs["v"]).at[0, :7, :, :7].set(jnp.eye(7)[:, None])
    out = rel_attention_decode(
        *inputs.values(),
        jnp.array([6], jnp.int32),
        jnp.array([1], jnp.int32),
        window=None,
        config=TileConfig(2, keys=16),
        interpret=True,
    )
    weights = np.full(7, 1 / 9)
    weights[3] = 2 / 9
    np.testing.assert_allclose(out[0, 0, 0, :7], weights, atol=1e-6)


def test_refusals_name_the_value():
    inputs = make_inputs(0, 1, 3, 17, 4)
    one = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="17 slots cannot hold a window of 16 for 3 tokens"):
        rel_attention_decode(*inputs.values(), one, one, window=16)
    inputs = {n: a[..., :48] if a.shape[-1] == DIM else a for n, a in inputs.items()}
    with pytest.raises(ValueError, match="head_dim is 48"):
        rel_attention_decode(*inputs.values(), one, one, window=None)
