"""The engine over a tiny random model: outputs, limits, and no program compiled twice."""

import contextlib
import dataclasses
import functools

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny, tiny_params

import inkling_jax as ij
from inkling_jax import generation, reading
from inkling_jax.config import FULL, SLIDING
from inkling_jax.engine import Engine
from inkling_jax.sampling import Sampling, keys_from_seeds

CONFIG = tiny(num_hidden_layers=2, layer_types=(SLIDING, FULL))
GREEDY = ij.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[3, 14, 15, 9, 26], [5], [35, 8, 9, 7, 9, 3, 2, 38, 4, 6]]


@pytest.fixture(scope="module", autouse=True)
def small_buckets():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PREFILL_BUCKETS", (8, 32))
        yield


@pytest.fixture(scope="module")
def engine():
    return Engine(tiny_params(CONFIG), CONFIG, stop_ids=CONFIG.text.eos_token_id, context=64)


@contextlib.contextmanager
def compilations():
    seen = []

    def listen(event, _seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def picture(rng, rows=2, columns=3):
    size = CONFIG.vision.tile_size
    return rng.integers(0, 256, (rows * size, columns * size, 3), dtype=np.uint8)


def test_rows_of_a_batch_equal_rows_alone(engine):
    together = engine.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, together, strict=True):
        assert output.token_ids == engine.generate([prompt], GREEDY)[0].token_ids
        assert (output.text, output.finish_reason, len(output.token_ids)) == (None, "length", 6)


def test_same_seed_same_tokens_in_any_slot(engine):
    drawn = ij.SamplingParams(temperature=1.0, seed=7, max_tokens=6, ignore_eos=True)
    other = dataclasses.replace(drawn, seed=8)
    alone = engine.generate([PROMPTS[0]], drawn)[0].token_ids
    settings = [other, drawn, other]
    batch = engine.generate([PROMPTS[0], PROMPTS[0], PROMPTS[2]], settings)
    assert batch[1].token_ids == alone != batch[0].token_ids
    unseeded = dataclasses.replace(drawn, seed=None)
    first, second = (engine.generate([PROMPTS[0]], unseeded)[0].token_ids for _ in range(2))
    assert first != second


def test_prompts_may_be_rows_of_an_array(engine):
    rows = [[3, 4, 5], [6, 7, 8]]
    expected = [output.token_ids for output in engine.generate(rows, GREEDY)]
    for prompts in (np.array(rows), jnp.array(rows), [list(row) for row in jnp.array(rows)]):
        assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == expected


def test_arrays_that_hold_no_prompts_are_refused(engine):
    for prompts, message in (
        (jnp.array(5), "prompts is 5"),
        (jax.random.key(0), "prompts is Array"),
        ([jax.random.key(0)], "a prompt is Array"),
        ([jnp.array([[3, 4]])], r"token 0 of the prompt is \[3, 4\]"),
    ):
        with pytest.raises(ij.InputError, match=message):
            engine.generate(prompts)


def test_a_stream_refuses_at_once(engine):
    with pytest.raises(ij.InputError, match="a prompt is None"):
        engine.stream(None)
    with pytest.raises(ij.InputError, match="max_tokens is 64"):
        engine.stream([3], ij.SamplingParams(max_tokens=64))


def test_stream_equals_generate(engine):
    pieces = list(engine.stream(PROMPTS[0], GREEDY))
    output = engine.generate([PROMPTS[0]], GREEDY)[0]
    assert [token for p in pieces for token in p.token_ids] == output.token_ids
    assert pieces[-1].output is not None and pieces[-1].output.token_ids == output.token_ids


def test_stop_ids_end_a_reply_and_are_its_last_token(engine):
    ids = engine.generate([PROMPTS[0]], GREEDY)[0].token_ids
    stop = dataclasses.replace(GREEDY, stop_token_ids=(ids[2],))
    output = engine.generate([PROMPTS[0]], stop)[0]
    assert output.token_ids == ids[: ids.index(ids[2]) + 1] and output.finish_reason == "stop"


def test_logprobs_are_those_of_scoring(engine):
    asked = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1)
    output = engine.generate([PROMPTS[2]], asked)[0]
    score = engine.score(PROMPTS[2] + output.token_ids, logits=True)
    assert score.logits.shape == (16, CONFIG.text.unpadded_vocab_size)
    reported = [t.logprob for t in output.prompt_logprobs + output.logprobs]
    np.testing.assert_allclose(reported, score.logprobs, atol=1e-5)
    for token in output.logprobs:  # greedy: the first alternative is the token itself
        assert token.alternatives[0] == (token.token_id, token.logprob)
        assert len(token.alternatives) == 2
    expected = jax.nn.log_softmax(score.logits)[
        jnp.arange(15), jnp.array(PROMPTS[2] + output.token_ids)[1:]
    ]
    np.testing.assert_allclose(score.logprobs, expected, atol=1e-5)
    assert score.perplexity == pytest.approx(np.exp(-score.sum / 15))


@pytest.mark.parametrize("edge", [8, 32])
def test_the_edge_of_a_bucket_changes_nothing(engine, edge):  # JX-05
    longest = [int(t) for t in np.random.default_rng(1).integers(0, 40, edge + 1)]
    whole = engine.score(longest, logits=True)
    lengths = (edge - 1, edge, edge + 1)
    for n in lengths:
        np.testing.assert_allclose(
            engine.score(longest[:n]).logprobs, whole.logprobs[: n - 1], atol=1e-5
        )
    one = dataclasses.replace(GREEDY, max_tokens=1, logprobs=0)
    for output, n in zip(
        engine.generate([longest[:n] for n in lengths], one), lengths, strict=True
    ):
        logprobs = jax.nn.log_softmax(whole.logits[n - 1])
        assert output.token_ids == [int(logprobs.argmax())]
        np.testing.assert_allclose(output.logprobs[0].logprob, logprobs.max(), atol=1e-5)


def test_pictures_take_the_place_of_their_placeholders(engine):  # CS-06
    rng = np.random.default_rng(0)
    image, other = picture(rng), picture(rng)
    prompt = [3, 4, *[CONFIG.image_token_id] * 6, 5]
    tokens = [engine.generate([prompt], GREEDY, images=[[i]])[0].token_ids for i in (image, other)]
    assert tokens[0] != tokens[1]
    assert engine.generate([prompt], GREEDY, images=[[image]])[0].token_ids == tokens[0]
    batch = [prompt, PROMPTS[0], [9, *[CONFIG.image_token_id] * 6]]
    outputs = engine.generate(batch, GREEDY, images=[[image], [], [other]])
    assert outputs[0].token_ids == tokens[0]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 3)])
def test_a_picture_alone_is_a_prompt(engine, rows, columns):  # CS-01
    image = picture(np.random.default_rng(0), rows, columns)
    prompt = [CONFIG.image_token_id] * (rows * columns)
    asked = dataclasses.replace(GREEDY, logprobs=0)
    [output] = engine.generate([prompt], asked, images=[[image]])
    score = engine.score(prompt + output.token_ids, images=[image])
    reported = [token.logprob for token in output.logprobs]
    np.testing.assert_allclose(reported, score.logprobs[len(prompt) - 1 :], atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        ([], [], "empty"),
        ([3, -1], [], "token 1 of the prompt is -1, ids are whole numbers from 0 to 42"),
        ([1.5], [], "token 0 of the prompt is 1.5"),
        (np.array([5.0, 6.0]), [], "token 0 of the prompt is 5.0"),
        ([3, True], [], "token 1 of the prompt is True"),
        ([3, None], [], "token 1 of the prompt is None"),
        ([3, "a"], [], "token 1 of the prompt is 'a'"),
        ([43], [], "43"),
        ([47], [], "47"),
        (list(range(40)) * 2, [], "80 tokens"),
        ([1] * 64, [], "64 tokens"),
        ([40], [], "placeholder"),
        ("text", [], "tokenizer"),
    ],
)
def test_bad_prompts_are_refused_by_name(engine, prompt, images, message):
    with pytest.raises(ij.InputError, match=message):
        engine.generate([prompt], GREEDY, images=[images])


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (5, {}, "prompts is 5"),
        (np.array(5), {}, "prompts is 5"),
        ([[3]], {"raw": "no"}, "raw is 'no', use True or False"),
        ("text", {}, "prompts is 'text'"),
        ([5, 6], {}, "a prompt is 5"),
        ([b"ab"], {}, "a prompt is b'ab'"),
        ([bytearray(b"ab")], {}, "a prompt is bytearray"),
        ([np.array(5)], {}, "a prompt is 5"),
        ([[40]], {"images": [[5]]}, "an image is 5"),
        ([[3]], {"sampling": ij.SamplingParams(stop_token_ids=(43,))}, "stop_token_ids holds 43"),
        ([[3]], {"sampling": 1}, "sampling is 1"),
        ([[3]], {"sampling": [{"top_k": 1}]}, "sampling is"),
        ([[3]], {"images": 5}, "images is 5"),
        ([[3]], {"images": ["a.png"]}, "images holds 'a.png'"),
        ([[3]], {"effort": 0.5}, "effort is for chat prompts"),
        ([[3]], {"sampling": ij.SamplingParams(stop="x")}, "stop holds texts"),
    ],
)
def test_values_of_another_type_or_without_effect_are_refused(engine, prompts, options, message):
    with pytest.raises(ij.InputError, match=message):
        engine.generate(prompts, **options)


@pytest.mark.parametrize("tokens", [0, 4097, "9", 9.0])
def test_a_context_that_the_model_does_not_read_is_refused(tokens):
    with pytest.raises(ij.InputError, match=f"context is {tokens!r}, it must .* 1 to 4096"):
        CONFIG.text.check_context(tokens)


def test_the_longest_prompt_that_fits_is_served(engine):
    one = dataclasses.replace(GREEDY, max_tokens=1)
    assert len(engine.generate([[1] * 63], one)[0].token_ids) == 1
    with pytest.raises(ij.InputError, match="room for 1"):
        engine.generate([[1] * 63], dataclasses.replace(GREEDY, max_tokens=2))


def test_a_cache_that_does_not_fit_is_refused_before_it_is_made(engine, monkeypatch):
    monkeypatch.setattr(reading, "_init_cache", lambda *_: pytest.fail("allocated"))
    needs = r"a cache of 1 x 10{12} tokens: needs \d+\.\d\d GB on .*, \d+\.\d\d GB are free"
    with pytest.raises(ij.InputError, match=needs):
        dataclasses.replace(engine, context=10**12).generate([PROMPTS[0]], GREEDY)


def test_logits_that_are_not_finite_are_blamed_on_the_checkpoint():
    flat = dict(nnx.to_flat_state(tiny_params(CONFIG)))
    norm = flat[("norm", "weight")]
    flat[("norm", "weight")] = norm.replace(norm.get_value().at[0].set(jnp.nan))
    broken = Engine(nnx.from_flat_state(list(flat.items())), CONFIG, context=64)
    with pytest.raises(ij.InputError, match="not finite after 0 tokens; check that weights"):
        broken.generate([PROMPTS[0]], GREEDY)


def test_nothing_compiles_after_warm_up(engine):  # JX-03
    rng = np.random.default_rng(1)

    def request(length, pictures, logprobs, **settings):
        prompt = rng.integers(0, 40, length).tolist()
        images = [picture(rng, *rng.integers(1, 3, 2)) for _ in range(pictures)]
        tiles = sum(image.size for image in images) // (CONFIG.vision.tile_size**2 * 3)
        prompt += [CONFIG.image_token_id] * tiles
        sampling = ij.SamplingParams(logprobs=logprobs, **settings)
        engine.generate([prompt], sampling, images=[images])

    for length in (3, 33):  # both buckets, with and without pictures
        for pictures in range(3):
            request(length, pictures, logprobs=None, max_tokens=3)
    for logprobs in (None, 2):  # with and without alternatives and filters
        for top_k in (0, 5):
            request(3, 0, logprobs, top_k=top_k, max_tokens=3)
    with compilations() as seen:
        for i in range(100):
            request(
                int(rng.integers(1, 40)),
                int(rng.integers(0, 3)),
                int(rng.integers(1, 4)) if i % 2 else None,
                temperature=float(rng.choice([0.0, 0.7, 1.0])),
                top_p=float(rng.uniform(0.1, 1)),
                top_k=int(rng.integers(0, 9)),
                seed=i,
                max_tokens=int(rng.integers(1, 8)),
            )
    assert not seen
    with compilations() as seen:
        jax.jit(lambda x: x * 3)(jnp.ones(17))
    assert seen  # the listener does hear compilations


def test_all_chunks_of_a_prompt_share_a_program():
    """With parameters that are committed to a device, as loaded ones are."""
    params = jax.device_put(tiny_params(CONFIG), jax.devices()[0])
    engine = Engine(params, CONFIG, stop_ids=CONFIG.text.eos_token_id, context=64)
    one = dataclasses.replace(GREEDY, max_tokens=1)
    engine.generate([[5]], one)
    with compilations() as seen:
        engine.generate([[1 + i % 39 for i in range(8 + 8)]], one)
    assert not seen


@pytest.fixture(scope="module")
def own():
    """Generates for the prompts inside a user's own jit, each row up to its budget."""
    rows = len(PROMPTS)
    sampling = Sampling.stack([ij.SamplingParams(temperature=0.0)] * rows)

    @jax.jit
    def mine(params, tokens, lengths, keys, budget):
        stop = jnp.full((rows, 1), generation.NO_TOKEN, jnp.int32)
        args = (params, CONFIG, tokens, lengths, sampling, keys, 6)
        out, state = ij.generate(*args, stop_ids=stop, budget=budget)
        return out.ids + 0, state.count, state.cache.length

    tokens = np.zeros((rows, 10), np.int32)
    for i, prompt in enumerate(PROMPTS):
        tokens[i, : len(prompt)] = prompt
    lengths = jnp.array([len(p) for p in PROMPTS], jnp.int32)
    args = (tiny_params(CONFIG), jnp.asarray(tokens), lengths, keys_from_seeds(range(rows)))
    return functools.partial(mine, *args)


def test_generate_inside_the_users_own_jit(own):
    """One program, and nothing leaves the device before its end."""
    budget = jnp.full(len(PROMPTS), 6, jnp.int32)
    first = own(budget)
    with jax.transfer_guard("disallow"), compilations() as seen:
        ids, count, _ = own(budget)
    assert not seen
    np.testing.assert_array_equal(ids, first[0])
    np.testing.assert_array_equal(count, 6)
    engine = Engine(tiny_params(CONFIG), CONFIG, context=64)
    for row, output in zip(ids.tolist(), engine.generate(PROMPTS, GREEDY), strict=True):
        assert row == output.token_ids


def test_ragged_ends_and_budgets(own):
    ids, count, length = own(jnp.array([2, 5, 6], jnp.int32))
    assert (np.asarray(ids) >= 0).sum(1).tolist() == [2, 5, 6] == count.tolist()
    assert length.tolist() == [6, 5, 15]  # all but the last token have been read
