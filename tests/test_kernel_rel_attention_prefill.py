"""rel_attention_prefill against its plain reference, in Pallas' interpreter.

The interpreter knows neither inline code nor accumulators that start from a value; their
specifications stand in for them here.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest
from helpers import interpret_mosaic

from pallas_kernels.rel_attention_prefill import kernel_sm90, rel_attention_prefill, shear
from pallas_kernels.rel_attention_prefill.reference import rel_attention_prefill as reference

HEADS, KV_HEADS, DIM, RANKS = 2, 1, 128, 16


def plain_products(table_ref, r, first):
    """`shear.products` as it is described: warps lie 32 lines apart."""
    lines = table_ref[...].reshape(-1, 4, 2, 2).swapaxes(1, 2).reshape(-1, RANKS)
    warp = jnp.arange(shear.QUERIES) // 16
    at = first - 32 * warp[:, None] + jnp.arange(shear.LINES)
    p = jnp.einsum("qr,qlr->ql", r, lines[at], preferred_element_type=jnp.float32)
    return p.astype(jnp.float16)


def plainly_skewed(p):
    """`shear.skewed` as it is described."""
    query = jnp.arange(shear.QUERIES) % 16
    at = shear.LEAD - 2 * query[:, None] + jnp.arange(shear.KEYS)
    return jnp.take_along_axis(p, at, axis=1)


def plainly_accumulated(acc, weight, values_ref):
    return acc + jnp.dot(weight, values_ref[...], preferred_element_type=jnp.float32)


def interpreted_prefill(monkeypatch):
    """Makes the kernel run in the interpreter."""
    monkeypatch.setattr(kernel_sm90, "accumulate", plainly_accumulated)
    monkeypatch.setattr(kernel_sm90, "products", plain_products)
    monkeypatch.setattr(kernel_sm90, "skewed", plainly_skewed)
    interpret_mosaic(monkeypatch, kernel_sm90)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    interpreted_prefill(monkeypatch)


def make_inputs(seed, batch, tokens, slots, extent):
    keys = iter(jax.random.split(jax.random.key(seed), 7))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    cache = (batch, slots, KV_HEADS, DIM)
    return {
        "q": normal(batch, tokens, HEADS, DIM),
        "r": normal(batch, tokens, HEADS, RANKS),
        "k": normal(*cache),
        "v": normal(*cache),
        "proj": normal(RANKS, extent) / 4,
        "sink": normal(batch, tokens, HEADS).astype(jnp.float32),
        "gate": normal(batch, tokens, HEADS, DIM),
    }


def poison(inputs, start, lengths, window, fill):
    """Fills all that no valid token can see."""
    tokens, slots = inputs["q"].shape[1], inputs["k"].shape[1]
    hidden = np.ones(inputs["k"].shape[:2], bool)
    for row, (p, n) in enumerate(zip(start, lengths, strict=True)):
        first = p if window is None else window
        lowest = 0 if window is None else max(window - p, 1)
        hidden[row, lowest : first + n] = n == 0
    assert slots == hidden.shape[1]
    dead = np.arange(tokens) >= np.array(lengths)[:, None]
    filled = {n: np.where(hidden[..., None, None], fill, inputs[n]) for n in ("k", "v")}
    for name in ("q", "r", "gate"):
        filled[name] = np.where(dead[..., None, None], fill, inputs[name])
    return {**inputs, **{name: jnp.array(a, jnp.bfloat16) for name, a in filled.items()}}


CASES = [
    pytest.param(
        127, [0, 0], [127, 100], None, 136, 24, marks=pytest.mark.long, id="less than a block"
    ),
    pytest.param(129, [128, 64], [129, 2], None, 264, 200, id="a block and one, after others"),
    pytest.param(128, [333, 5], [128, 0], None, 464, 24, id="off the tile, an empty row"),
    pytest.param(
        130,
        [300, 100],
        [130, 64],
        128,
        None,
        128,
        marks=pytest.mark.long,
        id="window full, and not yet",
    ),
    pytest.param(
        *(257, [0, 1000], [257, 129], 256, None, 100),
        id="several blocks of a window",
        marks=pytest.mark.long,
    ),
]


@pytest.mark.parametrize(("tokens", "start", "lengths", "window", "slots", "extent"), CASES)
def test_matches_reference(tokens, start, lengths, window, slots, extent):
    slots = slots or window + tokens
    inputs = make_inputs(tokens, 2, tokens, slots, extent)
    inputs = poison(inputs, start, lengths, window, np.nan)
    where = (jnp.array(start, jnp.int32), jnp.array(lengths, jnp.int32))
    out = rel_attention_prefill(*inputs.values(), *where, window=window)
    clean = {name: jnp.nan_to_num(a) for name, a in inputs.items()}
    expected = reference(*clean.values(), *where, window=window)
    out, expected = (np.asarray(x, np.float32) for x in (out, expected))
    np.testing.assert_allclose(out, expected, atol=2e-2)
    assert np.linalg.norm(out - expected) < 4e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("tile", [0, 1, 2, 3])
def test_the_program_skews_as_described(tile):
    """The bias of a warpgroup with a tile of keys, in the lanes' order of a wgmma accumulator."""
    rng = np.random.default_rng(tile)
    proj = jnp.asarray(rng.normal(size=(RANKS, 200)), jnp.bfloat16)
    r = jnp.asarray(rng.normal(size=(shear.QUERIES, RANKS)), jnp.bfloat16)
    lines = shear.table(proj, 3)
    first = shear.KEYS * (4 - tile) - 1 - shear.LEAD  # query 0 sees key 0 from `tile` tiles away

    warp, lane = np.divmod(np.arange(128, dtype=np.uint32), 32)
    row = 16 * warp + lane // 4
    words = np.asarray(r).view(np.uint32)  # pairs of ranks
    given = [words[row + 8 * half, lane % 4 + 4 * upper] for upper in (0, 1) for half in (0, 1)]
    given += [np.full(128, first, np.uint32), np.zeros(128, np.uint32)]  # the table's address
    memory = np.asarray(lines).reshape(-1).view(np.uint32)
    p = ptx_emulator.execute(shear.products_ptx(), shear.LINES // 4, given, memory)
    out = np.stack(ptx_emulator.execute(shear.skew_ptx(), shear.KEYS // 4, p))
    out = out.reshape(shear.KEYS // 8, 2, 4, 8, 4).view(np.float16)  # 8 keys, half, warp, row, lane
    out = out.reshape(16, 2, 4, 8, 8).transpose(2, 1, 3, 0, 4).reshape(shear.QUERIES, shear.KEYS)

    line, key = np.mgrid[: shear.QUERIES, : shear.KEYS]
    distance = shear.KEYS * tile + 2 * line - key
    near = (distance >= 0) & (distance < 200)
    bias = np.asarray(r, np.float32) @ np.asarray(proj, np.float32)
    expected = np.where(near, bias[line, np.clip(distance, 0, 199)], 0)
    np.testing.assert_allclose(out, expected, atol=1e-2)
    plain = plainly_skewed(plain_products(lines, r, first))
    np.testing.assert_allclose(plain, expected, atol=1e-2)


def test_bias_ends_at_its_reach():
    """Pitfall CM-02: distances beyond the table are neither boosted nor hidden."""
    inputs = make_inputs(0, 1, 7, 8, 4)
    inputs["q"] = jnp.zeros_like(inputs["q"])
    inputs["r"] = jnp.zeros_like(inputs["r"]).at[..., 0].set(1)
    inputs["proj"] = jnp.zeros((RANKS, 4), jnp.bfloat16).at[0, 3].set(math.log(2))
    inputs["sink"] = jnp.zeros_like(inputs["sink"])
    inputs["gate"] = jnp.full_like(inputs["gate"], 100)
    inputs["v"] = (
        jnp.zeros_like(inputs["v"]).at[0, :7, :, :7].set(jnp.eye(7, dtype=jnp.bfloat16)[:, None])
    )
    out = rel_attention_prefill(
        *inputs.values(), jnp.zeros(1, jnp.int32), jnp.full(1, 7, jnp.int32), window=None
    )
    weights = np.full(7, 1 / 9)
    weights[3] = 2 / 9
    np.testing.assert_allclose(np.asarray(out[0, 6, 0, :7], np.float32), weights, rtol=1e-2)


@pytest.mark.long
def test_chunks_continue_one_another():
    """A sequence at once and in chunks off the tile, through a cache and a window."""
    inputs = make_inputs(1, 1, 300, 304, 40)
    zero, sizes = jnp.zeros(1, jnp.int32), (140, 160)
    for window in (None, 128):
        outs, at = [], 0
        for size in (300, *sizes):
            at = at % 300
            cut = {n: inputs[n][:, at : at + size] for n in ("q", "r", "sink", "gate")}
            for name in ("k", "v") if window else ():
                before = jnp.pad(inputs[name], ((0, 0), (window, 0), (0, 0), (0, 0)))
                cut[name] = before[:, at : at + window + size]
            where = {"start": zero + at, "lengths": zero + size}
            outs.append(rel_attention_prefill(**inputs | cut, **where, window=window))
            at += size
        outs = [np.asarray(out, np.float32) for out in outs]
        np.testing.assert_allclose(np.concatenate(outs[1:], axis=1), outs[0], atol=1e-2)


def test_refusals_name_the_value():
    one = jnp.zeros(1, jnp.int32)
    inputs = make_inputs(0, 1, 9, 20, 4)
    with pytest.raises(ValueError, match="20 slots are not a multiple of 8"):
        rel_attention_prefill(*inputs.values(), one, one, window=None)
    with pytest.raises(ValueError, match="the window of 24 is not a multiple of 128"):
        rel_attention_prefill(*inputs.values(), one, one, window=24)
    with pytest.raises(ValueError, match="20 keys, not 128 before and 9 of the call"):
        rel_attention_prefill(*inputs.values(), one, one, window=128)
    wide = inputs | {"q": inputs["q"].astype(jnp.float32)}
    with pytest.raises(ValueError, match="q is float32, not bfloat16"):
        rel_attention_prefill(*wide.values(), one, one, window=128)
