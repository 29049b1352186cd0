"""However a text is cut, padded or taken back, the model must see the same tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TINY, read, read_in_chunks, tiny, tiny_params, visible

from inkling_jax.cache import init_cache, rollback
from inkling_jax.config import SLIDING, inkling2_small
from inkling_jax.generation import decode, prefill
from inkling_jax.model import abstract_params, forward

WIDTH = 37
TOKENS = np.random.default_rng(5).integers(0, 40, WIDTH)


@pytest.fixture(scope="module")
def whole():
    return read_in_chunks(tiny_params(), TINY, TOKENS, [WIDTH], WIDTH)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 9, 16, 17, 36])
def test_chunked_prefill_equals_whole(whole, size):  # CS-02, CM-03
    sizes = [size] * (WIDTH // size) + [WIDTH % size] * (WIDTH % size > 0)
    logits, cache = read_in_chunks(tiny_params(), TINY, TOKENS, sizes, WIDTH)
    np.testing.assert_allclose(logits, whole[0], atol=1e-5)
    for got, want in zip(visible(cache, TINY), visible(whole[1], TINY), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * max(1.0, np.abs(want).max()))


def test_token_by_token_equals_whole(whole):  # CM-03
    """Also the first tokens, whose convolutions reach before the text."""
    logits, _ = read_in_chunks(tiny_params(), TINY, TOKENS, [1] * WIDTH, 1)
    np.testing.assert_allclose(logits, whole[0], atol=1e-5)


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5])
def test_short_prompts_go_on(whole, prompt):  # CS-01
    sizes = [prompt, 1, 1, 1, 1]
    logits, _ = read_in_chunks(tiny_params(), TINY, TOKENS[: prompt + 4], sizes, WIDTH)
    np.testing.assert_allclose(logits, whole[0][: prompt + 4], atol=1e-5)


def test_ragged_rows_equal_rows_alone_in_any_order(whole):
    for lengths in ([WIDTH, 1, 20], [20, WIDTH, 1]):
        tokens = np.full((3, WIDTH), 3, np.int32)
        for row, n in enumerate(lengths):
            tokens[row, :n] = TOKENS[:n]
        cache = init_cache(TINY.text, 3, 64, 4, jnp.float32)
        logits, cache = read(tiny_params(), TINY, tokens, jnp.array(lengths, jnp.int32), cache)
        for row, n in enumerate(lengths):
            np.testing.assert_allclose(logits[row, :n], whole[0][:n], atol=1e-5)
        np.testing.assert_array_equal(cache.length, lengths)


def test_rows_that_cannot_be_read_are_left_as_they_are(whole):  # JX-01
    """One is too long for the cache, one has an id beyond the vocabulary, one is sound."""
    tokens = np.full((3, WIDTH), -1, np.int32)
    lengths = [WIDTH, 1, 20]
    for row, n in enumerate(lengths):
        tokens[row, :n] = TOKENS[:n]
    cache = init_cache(TINY.text, 3, 64, 4, jnp.float32)
    _, before = read(tiny_params(), TINY, tokens, jnp.array(lengths, jnp.int32), cache)
    tokens = np.zeros((3, WIDTH), np.int32)
    tokens[1, 2], tokens[2, :5] = TINY.text.unpadded_vocab_size, TOKENS[20:25]
    logits, after = read(tiny_params(), TINY, tokens, jnp.array([28, 3, 5], jnp.int32), before)
    assert np.isnan(logits[:2]).all()
    np.testing.assert_allclose(logits[2, :5], whole[0][20:25], atol=1e-5)
    np.testing.assert_array_equal(after.length, [WIDTH, 1, 25])
    jax.tree.map(
        lambda kept, old: np.testing.assert_array_equal(kept[:2], old[:2]),
        after.layers,
        before.layers,
    )
    tokens[1, 2] = 3
    logits, _ = read(tiny_params(), TINY, tokens, jnp.array([27, 3, 0], jnp.int32), after)
    assert np.isfinite(logits[0, :27]).all() and np.isfinite(logits[1, :3]).all()


def test_without_full_layers_a_text_has_no_end():
    config = tiny(num_hidden_layers=1, layer_types=(SLIDING,))
    run = functools.partial(read_in_chunks, tiny_params(config), config, TOKENS[:12])
    short, _ = run([4, 4, 4], 4, capacity=4)
    np.testing.assert_allclose(short, run([4, 4, 4], 4, capacity=64)[0], atol=1e-6)


@pytest.mark.parametrize("refused", [1, 3, 4])
@pytest.mark.parametrize("committed", [2, 7, 20])  # before, at and beyond the window of 8
def test_refused_blocks_leave_nothing_behind(whole, committed, refused):  # CS-04
    _, cache = read_in_chunks(tiny_params(), TINY, TOKENS[:committed], [committed], WIDTH)
    before = visible(cache, TINY)
    block = np.zeros((1, WIDTH), np.int32)
    block[0, :4] = 39 - TOKENS[committed : committed + 4]
    block[0, : 4 - refused] = TOKENS[committed : committed + 4 - refused]
    count = jnp.array([4], jnp.int32)
    _, cache = read(tiny_params(), TINY, block, count, cache)
    cache = rollback(cache, jnp.array([committed + 4 - refused], jnp.int32))
    if refused == 4:
        for got, want in zip(visible(cache, TINY), before, strict=True):
            np.testing.assert_array_equal(got, want)
    at = committed + 4 - refused
    rest = np.zeros((1, WIDTH), np.int32)
    rest[0, :10] = TOKENS[at : at + 10]
    logits, _ = read(tiny_params(), TINY, rest, jnp.array([10], jnp.int32), cache)
    np.testing.assert_allclose(logits[0, :10], whole[0][at : at + 10], atol=1e-5)


def test_padding_is_routed_to_no_expert():
    tokens, lengths = jnp.ones((2, 6), jnp.int32), jnp.array([4, 1], jnp.int32)

    @jax.jit
    def routed(params):
        seen = []

        def spy(z, picks, weights, *_):
            seen.append((picks, weights))
            return jnp.zeros(z.shape, jnp.float32)

        cache = init_cache(TINY.text, 2, 16, 1, jnp.float32)
        forward(params, TINY, tokens, lengths, cache, experts=spy)
        return seen

    seen, experts = routed(tiny_params()), TINY.text.n_routed_experts
    for picks, weights in seen:
        assert int((picks < experts).sum()) == 5 * TINY.text.num_experts_per_tok
        assert float(weights[picks == experts].sum()) == 0.0
    assert len(seen) == TINY.text.num_hidden_layers


def test_donated_caches_can_share_nothing():  # JX-02
    step = jax.jit(decode, static_argnames="config", donate_argnames="cache")
    cache = init_cache(TINY.text, 1, 16, 4, jnp.float32)
    snapshot = jax.tree.map(jnp.copy, cache)
    tokens = jnp.asarray(TOKENS[None, :2], jnp.int32)
    step = step.lower(tiny_params(), TINY, tokens, cache).compile()
    in_place = step.memory_analysis().alias_size_in_bytes
    assert in_place >= sum(buffer.nbytes for buffer in jax.tree.leaves(cache))
    first, cache = step(tiny_params(), tokens, cache)
    for _ in range(2):
        _, cache = step(tiny_params(), tokens, cache)
    again, _ = step(tiny_params(), tokens, snapshot)
    np.testing.assert_array_equal(first, again)


def test_full_size_shapes():
    """594.05 B parameters; prefill and decode of the whole model trace without a weight."""
    config = inkling2_small()
    params = abstract_params(config, jnp.bfloat16)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert round(count / 1e9, 2) == 594.05
    cache = jax.eval_shape(lambda: init_cache(config.text, 1, 4096, 8, jnp.bfloat16))
    tokens, one = jax.ShapeDtypeStruct((1, 8), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    logits, after = jax.eval_shape(
        lambda p, t, n, c: prefill(p, config, t, n, c), params, tokens, one, cache
    )
    assert (logits.shape, logits.dtype) == ((1, 200058), jnp.float32)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == jax.tree.map(
        lambda a: (a.shape, a.dtype), cache
    )
    traced = jax.make_jaxpr(lambda p, t, c: decode(p, config, t, c), return_shape=True)
    jaxpr, (logits, _) = traced(params, tokens, cache)
    assert logits.shape == (1, 8, 200058)
    assert sum(constant.nbytes for constant in jaxpr.consts) < 1 << 20  # JX-03
