"""The drafter against its definition: block, positions, Markov heads, vocabulary, confidences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny_params
from helpers_dspark import DRAFTER, TARGET, VOCAB, with_heads

from inkling_jax import drafter, ops
from inkling_jax.draft_layers import init_context, rotate
from inkling_jax.drafter import confidences, init_drafter, markov_start, propose_next
from pallas_kernels.draft_attention import draft_attention
from pallas_kernels.projections import project

ROWS, LENGTHS = 2, jnp.array([6, 3], jnp.int32)
extend = jax.jit(drafter.extend, static_argnames="config")
draft = jax.jit(drafter.draft, static_argnames="config")


def made(config, **changed):
    params = init_drafter(config, jax.random.key(0))
    for path, value in changed.items():
        *folders, name = path.split("__")
        place = params
        for folder in folders:
            place = place[folder]
        place[name] = place[name].replace(jnp.asarray(value))
    return params


def taps(seed=0, width=6):
    values = np.random.default_rng(seed).normal(size=(2, ROWS, width, 32)).astype(np.float32)
    return tuple(jnp.asarray(values))


def chain(params, config, h, base, first, forced=None):
    """Proposes greedily; returns tokens [B, n], logits, confidences."""
    before, memory, out = [jnp.asarray(first)], markov_start(config, len(first), h.dtype), []
    for j in range(h.shape[1]):
        row, memory = propose_next(params, config, h[:, j], base[:, j], before[-1], memory, VOCAB)
        token = jnp.argmax(row, axis=-1).astype(jnp.int32)
        out.append((token, row))
        before.append(jnp.asarray(forced) if forced is not None and j == 0 else token)
    tokens, logits = (np.stack(x, axis=1) for x in zip(*out, strict=True))
    return tokens, logits, confidences(params, config, h, jnp.stack(before[:-1], axis=1))


def test_context_in_chunks_equals_context_at_once():
    params, empty = made(DRAFTER), init_context(DRAFTER, ROWS, 8, jnp.float32)
    whole = extend(params, DRAFTER, empty, taps(), jnp.zeros(ROWS, jnp.int32), LENGTHS)
    first = jnp.array([4, 1], jnp.int32)
    part = extend(params, DRAFTER, empty, taps(), jnp.zeros(ROWS, jnp.int32), first)
    later = tuple(
        jnp.stack([jnp.roll(x[b], -first[b], axis=0) for b in range(ROWS)]) for x in taps()
    )
    part = extend(params, DRAFTER, part, later, first, LENGTHS - first)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
        for row, n in enumerate(LENGTHS):
            np.testing.assert_allclose(a[row, :n], b[row, :n], atol=1e-6)
            assert not np.any(b[row, n:])


def test_a_block_sees_its_context_and_nothing_beyond():
    params, target = made(DRAFTER), tiny_params(TARGET)
    zero, anchor = jnp.zeros(ROWS, jnp.int32), jnp.array([5, 9], jnp.int32)
    context = extend(
        params, DRAFTER, init_context(DRAFTER, ROWS, 8, jnp.float32), taps(), zero, LENGTHS
    )
    h, _ = draft(params, DRAFTER, target, context, anchor, LENGTHS)
    beyond = jax.tree.map(lambda x: x.at[0, 6:].set(7.0).at[1, 3:].set(7.0), context)
    np.testing.assert_array_equal(draft(params, DRAFTER, target, beyond, anchor, LENGTHS)[0], h)
    within = jax.tree.map(lambda x: x.at[:, 2].set(7.0), context)
    assert np.abs(draft(params, DRAFTER, target, within, anchor, LENGTHS)[0] - h).max() > 1e-3


def test_kernels_attend_as_the_plain_layer_does(monkeypatch):
    config = with_heads(head_dim=32)
    params, target = made(config), tiny_params(TARGET)
    empty, zero = init_context(config, ROWS, 8, jnp.float32), jnp.zeros(ROWS, jnp.int32)
    context = extend(params, config, empty, taps(), zero, LENGTHS)
    args = (params, config, target, context, jnp.array([5, 9], jnp.int32), LENGTHS)

    def drafted(differentiable=False):
        """Traces anew: what is chosen has changed."""
        compute = functools.partial(drafter.draft, differentiable=differentiable)
        return jax.jit(compute, static_argnames="config")(*args)[0]

    plain = drafted()
    monkeypatch.setattr(ops, "takes_draft", lambda *_: True)
    for name, kernel in {"_project": project, "attend_draft": draft_attention}.items():
        monkeypatch.setattr(ops, name, functools.partial(kernel, interpret=True))
    np.testing.assert_allclose(drafted(), plain, atol=1e-5)
    monkeypatch.setattr(ops, "attend_draft", None)
    np.testing.assert_array_equal(drafted(differentiable=True), plain)


def test_rotation_turns_half_split_pairs_by_position():
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 8)).astype(np.float32)
    at = np.array([[0, 5, 700]])
    turn = np.exp(1j * at[..., None, None] * 100.0 ** (-np.arange(4) / 4))
    z = (x[..., :4] + 1j * x[..., 4:]) * turn
    got = rotate(jnp.asarray(x), jnp.asarray(at, jnp.int32), 100.0)
    np.testing.assert_allclose(got, np.concatenate([z.real, z.imag], -1), atol=2e-4)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_heads_against_float64(kind):
    config = with_heads(markov_head_type=kind, markov_rank=6, block_size=3)
    params, rng = made(config), np.random.default_rng(2)
    h, base = (rng.normal(size=(2, 3, n)).astype(np.float32) for n in (32, VOCAB))
    tokens, logits, _ = chain(params, config, jnp.asarray(h), jnp.asarray(base), [4, 8])

    def weight(*path):
        place = params["markov"]
        for name in path:
            place = place[name]
        return np.asarray(place[...], np.float64)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    state, prev = np.zeros((2, 6)), np.array([4, 8])
    for j in range(3):
        e = weight("w1")[prev]
        if kind == "gated":
            z = np.concatenate([h[:, j], e], axis=1)
            e = sigmoid(z @ weight("gate", "weight").T + weight("gate", "bias")) * e
        elif kind == "rnn":
            z = np.concatenate([state, e, h[:, j]], axis=1)
            g, c, o = np.split(z @ weight("joint", "weight").T + weight("joint", "bias"), 3, axis=1)
            state = sigmoid(g) * state + (1 - sigmoid(g)) * np.tanh(c)
            e = np.tanh(o)
        np.testing.assert_allclose(logits[:, j], base[:, j] + e @ weight("w2").T, atol=1e-5)
        prev = tokens[:, j]


def test_each_proposal_follows_the_token_that_was_drawn_before_it():  # SP-04
    """A table that sends a to a + 1, flat logits: 7 proposes 8, 9, 10; a drawn 20 gives 21."""
    rank = VOCAB
    successor = np.zeros((VOCAB, rank), np.float32)
    successor[np.arange(1, VOCAB), np.arange(VOCAB - 1)] = 9.0
    params = made(DRAFTER, markov__w1=np.eye(VOCAB, dtype=np.float32), markov__w2=successor)
    h, flat = jnp.zeros((1, 4, 32)), jnp.zeros((1, 4, VOCAB))
    assert chain(params, DRAFTER, h, flat, [7])[0].tolist() == [[8, 9, 10, 11]]
    assert chain(params, DRAFTER, h, flat, [7], forced=[20])[0].tolist() == [[8, 21, 22, 23]]


def test_hidden_row_i_decides_proposal_i_and_none_before_it():  # SP-04
    config = with_heads(markov_head_type="gated", markov_rank=6)
    params, rng = made(config), np.random.default_rng(4)
    h, base = (jnp.asarray(rng.normal(size=(1, 5, n)), jnp.float32) for n in (32, VOCAB))
    before = chain(params, config, h, base, [4])[1]
    after = chain(params, config, h.at[:, 2].add(1.0), base, [4])[1]
    same = np.all(before == after, axis=-1)[0]
    assert same[:2].all() and not same[2]


def test_softcap_comes_after_the_markov_bias():
    config = with_heads(final_logit_softcapping=30.0, block_size=1)
    bias = np.zeros((VOCAB, VOCAB), np.float32)
    bias[:4, 5] = [0, 20, 40, 1990]
    params = made(config, markov__w1=np.eye(VOCAB, dtype=np.float32), markov__w2=bias)
    base = jnp.full((1, 1, VOCAB), 10.0)
    row = chain(params, config, jnp.zeros((1, 1, 32)), base, [5])[1][0, 0]
    np.testing.assert_allclose(row[:4], 30 * np.tanh(np.array([10, 30, 50, 2000]) / 30), rtol=1e-6)


def test_a_reduced_vocabulary_proposes_its_own_tokens_only():
    config = with_heads(
        draft_vocab_size=5, own_head=True, markov_rank=0, enable_confidence_head=False
    )
    tokens = np.array([1, 3, 7, 20, 42], np.int32)
    params = made(config, tokens=tokens)
    base = jnp.asarray([[[0.5, 3.0, 3.0, -1.0, 2.0]]])
    got, logits, sure = chain(params, config, jnp.zeros((1, 1, 32)), base, [0])
    assert got.tolist() == [[3]] and sure.tolist() == [[1.0]]
    np.testing.assert_array_equal(logits[0, 0, tokens], base[0, 0])
    assert np.isneginf(np.delete(logits[0, 0], tokens)).all()


def test_sharing_the_targets_tables_equals_owning_copies_of_them():
    target = tiny_params(TARGET)
    own = with_heads(own_embedding=True, own_head=True)
    shared, params = made(DRAFTER), made(own)
    owned = dict(nnx.to_flat_state(shared)) | {
        ("embed",): params["embed"].replace(target["embed"]["weight"][...][:VOCAB]),
        ("head",): params["head"].replace(target["unembed"]["weight"][...][:VOCAB]),
    }
    owned = nnx.from_flat_state(list(owned.items()))
    context = init_context(DRAFTER, ROWS, 8, jnp.float32)
    args = (context, jnp.array([5, 9], jnp.int32), jnp.zeros(ROWS, jnp.int32))
    for a, b in zip(
        draft(shared, DRAFTER, target, *args), draft(owned, own, target, *args), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert a.shape[-1] == VOCAB < TARGET.text.vocab_size


def test_confidences_read_the_state_and_the_token_before():
    weight = np.zeros((1, 32 + VOCAB), np.float32)
    weight[0, 0], weight[0, 32 + 9] = 2.0, 1.0
    params = made(
        DRAFTER, markov__w1=np.eye(VOCAB, dtype=np.float32),
        confidence__weight=weight, confidence__bias=np.array([0.5], np.float32),
    )  # fmt: skip
    h = jnp.zeros((1, 1, 32)).at[0, 0, 0].set(0.75)
    base = jnp.zeros((1, 1, VOCAB))
    for config, prev, score in [
        (DRAFTER, 9, 3.0),
        (DRAFTER, 8, 2.0),
        (with_heads(confidence_temperatures=(4.0,) * 8), 9, 0.75),
    ]:
        sure = chain(params, config, h, base, [prev])[2]
        np.testing.assert_allclose(sure, 1 / (1 + np.exp(-score)), rtol=1e-6)
