"""The drafter and the loop against what the DSpark authors' code does (fixtures/dspark)."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_dspark import GREEDY
from safetensors.numpy import load_file

from inkling_jax import speculative
from inkling_jax.cache import init_cache
from inkling_jax.config import Config
from inkling_jax.draft_layers import init_context
from inkling_jax.drafter import confidences, draft, extend, markov_start, propose_next
from inkling_jax.load_drafter import load_drafter
from inkling_jax.loading import load_params
from inkling_jax.model import forward
from inkling_jax.proposing import Speculator
from inkling_jax.sampling import Sampling, keys_from_seeds

FIXTURES = Path(__file__).parent / "fixtures"
HEADS = ("vanilla", "gated", "rnn")
TAPS = (1, 2, 3)  # the same for all three


@functools.cache
def target():
    directory = FIXTURES / "small" / "checkpoint"
    config = Config.from_file(directory / "config.json")
    return config, load_params(directory, config, jnp.float32)


def case(head):
    directory = FIXTURES / "dspark" / head
    config, _ = target()
    drafter, params = load_drafter(directory, config.text, jnp.float32)
    assert drafter.target_layer_ids == TAPS and drafter.markov_head_type == head
    return drafter, params, load_file(directory / "expected.safetensors")


@functools.partial(jax.jit, static_argnames="config")
def read_taps(params, config, tokens):
    lengths = jnp.array([tokens.shape[1]], jnp.int32)
    cache = init_cache(config.text, 1, tokens.shape[1], 1, jnp.float32)
    return forward(params, config, tokens, lengths, cache, taps=TAPS).taps


@functools.partial(jax.jit, static_argnames=("config", "vocab"))
def propose(params, config, target, context, anchor, start, vocab):
    """Drafts greedily at many anchors; returns logits, tokens and confidences, [A, n(, V)]."""
    at = functools.partial(draft, params, config, target, context)
    h, base = jax.vmap(lambda a, s: at(a[None], s[None]))(anchor, start)
    h, base, tokens = h[:, 0], base[:, 0], [anchor]
    memory, logits = markov_start(config, len(anchor), h.dtype), []
    for j in range(config.block_size):
        row, memory = propose_next(params, config, h[:, j], base[:, j], tokens[-1], memory, vocab)
        tokens.append(jnp.argmax(row, axis=-1).astype(jnp.int32))
        logits.append(row)
    sure = confidences(params, config, h, jnp.stack(tokens[:-1], axis=1))
    return jnp.stack(logits, axis=1), jnp.stack(tokens[1:], axis=1), sure


@pytest.mark.parametrize("head", HEADS)
def test_drafts_are_those_of_the_reference(head):  # SP-03
    (config, params), (drafter, weights, want) = target(), case(head)
    text = np.concatenate([want["prompt"], want["target_greedy"]])
    taps = read_taps(params, config, jnp.asarray(text)[None])
    context = init_context(drafter, 1, len(text), jnp.float32)
    zero, whole = jnp.zeros(1, jnp.int32), jnp.array([len(text)], jnp.int32)
    context = extend(weights, drafter, context, taps, zero, whole)
    every = jnp.arange(len(want["prompt"]), len(text))
    anchors = jnp.asarray(text)[every]
    vocab = config.text.unpadded_vocab_size
    found = propose(weights, drafter, params, context, anchors, every.astype(jnp.int32), vocab)
    logits, tokens, confidence = (np.asarray(x) for x in found)

    chosen = want["anchors"] - len(want["prompt"])
    np.testing.assert_allclose(logits[chosen], want["draft_logits"], atol=5e-4)
    np.testing.assert_array_equal(tokens[chosen], want["draft_tokens"])
    np.testing.assert_allclose(confidence[chosen], want["confidence"], atol=1e-5)

    at, accepted = len(want["prompt"]), []
    while at < 90:  # as the reference: rounds that begin before the 72nd token
        drafts, true = tokens[at - len(want["prompt"])], text[at + 1 : at + 1 + drafter.block_size]
        agree = drafts[: len(true)] == true
        accepted.append(int(np.cumprod(agree).sum()))
        at += 1 + accepted[-1]
    assert accepted[: len(want["rounds_accepted"])] == want["rounds_accepted"].tolist()


@pytest.mark.long
@pytest.mark.parametrize("head", HEADS)
def test_the_loop_accepts_what_the_reference_accepts(head):
    (config, params), (drafter, weights, want) = target(), case(head)
    generate = jax.jit(speculative.generate, static_argnames=("config", "max_new"))
    tokens, _, rounds = generate(
        params,
        config,
        Speculator(weights, drafter, drafter.block_size),
        jnp.asarray(want["prompt"])[None],
        jnp.array([len(want["prompt"])], jnp.int32),
        Sampling.stack([GREEDY]),
        keys_from_seeds([0]),
        len(want["target_greedy"]),
        stop_ids=jnp.array([[-1]], jnp.int32),
    )
    np.testing.assert_array_equal(tokens.ids[0], want["target_greedy"])
    accepted = np.asarray(rounds.accepted[0])[: len(want["rounds_accepted"])]
    np.testing.assert_array_equal(accepted, want["rounds_accepted"])
