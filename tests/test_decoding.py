"""What the engine decodes with: packed arrays, and rings that one batch leaves to the next."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_engine import CONFIG, GREEDY, PROMPTS, engine, picture, small_buckets

import inkling_jax as ij
from inkling_jax import decoding, generation, reading, speculative
from inkling_jax.decoding import Packed, Seen
from inkling_jax.sampling import Filters, Sampling, keys_from_seeds

__all__ = ["engine", "small_buckets"]


@pytest.mark.parametrize("alternatives", [0, 3])
def test_a_report_gives_back_what_was_seen(alternatives):
    rng = np.random.default_rng(0)
    tokens = generation.Tokens(
        rng.integers(-1, 99, (2, 5), np.int32),
        np.array([[-0.0, np.inf, np.nan, 1e-42, -3]] * 2, np.float32),
        rng.integers(0, 99, (2, 5, alternatives), np.int32),
        rng.standard_normal((2, 5, alternatives), np.float32),
    )
    rounds = speculative.Rounds(*rng.integers(-1, 7, (2, 2, 4), np.int32))
    flags = np.array([True, False])
    for seen in (Seen(tokens, flags, ~flags, None), Seen(tokens, flags, ~flags, rounds)):
        found = decoding.fetch(jax.jit(Packed.of)(jax.tree.map(jnp.asarray, seen)))
        assert jax.tree.structure(found) == jax.tree.structure(seen)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(seen), strict=True):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def test_reports_lie_in_host_memory(engine, monkeypatch):
    fetch, kinds = decoding.fetch, []

    def looking(report):
        kinds.append(report.words.sharding.memory_kind)
        return fetch(report)

    monkeypatch.setattr(decoding, "fetch", looking)
    engine.generate([PROMPTS[0]], GREEDY)
    assert kinds == ["pinned_host"] * 2


def test_requests_are_unpacked_as_they_were_packed():
    filters = Filters(jnp.arange(2), jnp.array([0.5, 1.0]), jnp.zeros(2))
    stop_ids = jnp.array([[3, -1, -1], [4, 5, -1]])
    requests = generation.Requests(
        Sampling(jnp.ones(2), filters), keys_from_seeds([7, 2**62]), stop_ids, jnp.array([1, 2])
    )
    packed = jax.jit(Packed.of)(requests)
    assert packed.words.shape == (2, 1 + 3 + 2 + 3 + 1)
    found = jax.jit(Packed.unpack)(packed)
    assert jax.tree.structure(found) == jax.tree.structure(requests)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(requests), strict=True):
        assert a.dtype == b.dtype and (a == b).all()


def test_a_request_finds_nothing_of_those_before(engine, monkeypatch):  # CS-07, CM-11
    """Whether they were longer, given up in their reply, or failed while they were read."""
    long, short = [1 + i % 39 for i in range(50)], [3, 14]
    cold = {n: engine.generate([p], GREEDY)[0].token_ids for n, p in ((2, short), (50, long))}
    assert engine.generate([short], GREEDY)[0].token_ids == cold[2]
    stream = engine.stream(long, GREEDY)
    next(stream)
    stream.close()
    assert engine.generate([short], GREEDY)[0].token_ids == cold[2]
    read_chunk, chunks = reading._prefill, []

    def failing(*args):
        chunks.append(args)
        if len(chunks) == 2:
            raise RuntimeError("cancelled")
        return read_chunk(*args)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="cancelled"):
        patch.setattr(reading, "_prefill", failing)
        engine.generate([long], GREEDY)
    assert engine.generate([long], GREEDY)[0].token_ids == cold[50]


def test_what_a_request_asks_ends_with_it(engine, monkeypatch):
    """In rings that others left behind, a reply is what it is in new ones."""
    drawn = ij.SamplingParams(temperature=1.0, seed=7, max_tokens=6, ignore_eos=True)
    [ids] = [output.token_ids for output in engine.generate([PROMPTS[0]], GREEDY)]
    asked = [
        drawn,
        dataclasses.replace(drawn, seed=8, max_tokens=3),
        dataclasses.replace(drawn, top_k=2),
        dataclasses.replace(GREEDY, stop_token_ids=(ids[1], ids[2], 41)),
        dataclasses.replace(GREEDY, logprobs=2),
        GREEDY,
        drawn,
    ]
    cold = [dataclasses.replace(engine).generate([PROMPTS[0]], s)[0] for s in asked]
    warm = [engine.generate([PROMPTS[0]], setting)[0] for setting in asked]
    assert [o.token_ids for o in warm] == [o.token_ids for o in cold]
    assert len({tuple(o.token_ids) for o in cold}) == 5

    advance = decoding.advance

    def failing(*args):
        advance(*args)
        raise RuntimeError("cancelled")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="cancelled"):
        patch.setattr(decoding, "advance", failing)
        engine.generate([PROMPTS[0]], drawn)
    assert engine.generate([PROMPTS[0]], drawn)[0].token_ids == cold[0].token_ids
    engine.score(PROMPTS[2])
    assert engine.generate(PROMPTS[:2], drawn)[0].token_ids == cold[0].token_ids
    running = engine.stream(PROMPTS[0], GREEDY)  # two batches at a time have rings of their own
    pieces = [next(running)]
    assert engine.generate([PROMPTS[0]], drawn)[0].token_ids == cold[0].token_ids
    pieces += running
    assert [token for p in pieces for token in p.token_ids] == ids


def test_the_next_batch_lies_where_the_last_one_did(engine, monkeypatch):
    """Of one batch only, and of none while scoring or while pictures are encoded."""

    def places():
        [rings] = engine._spare.values()
        return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(rings)]

    engine.generate([PROMPTS[0]], GREEDY)
    before = places()
    engine.generate([PROMPTS[2]], GREEDY)
    assert places() == before
    engine.generate(PROMPTS[:2], GREEDY)
    assert len(engine._spare) == 1
    engine.score(PROMPTS[0])
    assert not engine._spare
    engine.generate([PROMPTS[0]], GREEDY)
    made, make = [], reading._init_cache
    monkeypatch.setattr(reading, "_init_cache", lambda *size: made.append(size) or make(*size))
    prompt, image = [CONFIG.image_token_id] * 6, picture(np.random.default_rng(0))
    for images in ([image], [], [image]):
        engine.generate([prompt if images else PROMPTS[0]], GREEDY, images=[images])
    assert len(made) == 2
