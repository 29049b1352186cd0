"""Sampled speculation follows the target's distribution, and the test notices when it does not."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny, tiny_params

from inkling_jax import speculative
from inkling_jax.cache import init_cache
from inkling_jax.config import FULL, SLIDING
from inkling_jax.drafter import init_drafter
from inkling_jax.drafter_config import DrafterConfig
from inkling_jax.model import forward, unembed
from inkling_jax.proposing import Speculator
from inkling_jax.sampling import Sampling, accept, filtered_logits, keys_from_seeds
from inkling_jax.sampling_params import SamplingParams

pytestmark = pytest.mark.long

SYMBOLS, NEW, DRAFTS = 4, 4, 2  # a round of up to three tokens, after one from the prompt
CONFIG = tiny(
    num_hidden_layers=2,
    layer_types=(SLIDING, FULL),
    vocab_size=48,
    unpadded_vocab_size=SYMBOLS,
    eos_token_id=(SYMBOLS - 1,),
)
DRAFTER = DrafterConfig(
    vocab_size=SYMBOLS,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    block_size=3,
    mask_token_id=0,
    target_layer_ids=(-1, 0),
    num_target_layers=2,
    markov_rank=8,
    enable_confidence_head=True,
    confidence_head_with_markov=True,
)
SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.5),
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(temperature=1.2, top_p=0.8),
    SamplingParams(temperature=0.9, min_p=0.2),
]
PROMPT = np.array([[2, 0, 1, 1, 3]], np.int32)
COST = [1.0, 1.45, 1.9]  # one draft, two or none, by the confidences
SHARED = [1.0, 1.002, 1.004]  # the same where all rows of a batch share the drafts that pay
ROWS, CALLS = 240, 60
COPIES = ROWS // len(SETTINGS)


@functools.cache
def exact() -> np.ndarray:
    """Probability of every sequence of `NEW` tokens under each setting, [settings, 4, 4, 4, 4]."""
    params = tiny_params(CONFIG)
    every = np.array(list(itertools.product(range(SYMBOLS), repeat=NEW - 1)), np.int32)
    tokens = np.concatenate([np.repeat(PROMPT, len(every), axis=0), every], axis=1)
    lengths = jnp.full(len(every), tokens.shape[1], jnp.int32)
    cache = init_cache(CONFIG.text, len(every), tokens.shape[1], 1, jnp.float32)
    hidden = forward(params, CONFIG, jnp.asarray(tokens), lengths, cache).hidden
    logits = unembed(params, CONFIG, hidden)[:, PROMPT.shape[1] - 1 :]  # [64, NEW, 4]
    found = []
    for setting in SETTINGS:
        flat = logits.reshape(-1, SYMBOLS)
        sampling = Sampling.stack([setting] * len(flat))
        p = np.asarray(jax.nn.softmax(filtered_logits(flat, sampling), axis=-1), np.float64)
        p = p.reshape(*(SYMBOLS,) * (NEW - 1), NEW, SYMBOLS)
        joint = np.ones((SYMBOLS,) * NEW)
        for place in range(NEW):
            # what follows `place` tokens does not depend on those after them
            before = p[(slice(None),) * place + (0,) * (NEW - 1 - place) + (place,)]
            joint *= before.reshape(*before.shape, *(1,) * (NEW - 1 - place))
        found.append(joint)
    return np.stack(found)


def count(check: bool = True, pooled: bool = False) -> np.ndarray:
    """Counts of the sequences that the compiled loop gives, [settings, 4, 4, 4, 4]."""
    params, drafter = tiny_params(CONFIG), init_drafter(DRAFTER, jax.random.key(9))
    # confidences that depend on the token before, so on what was drafted
    table, weight = drafter["markov"]["w1"], drafter["confidence"]["weight"]
    sure = jnp.array([-1.0, 1.0, -0.3, 0.5])
    drafter["markov"]["w1"] = table.replace(table[...].at[:, 0].set(sure))
    drafter["confidence"]["weight"] = weight.replace(jnp.zeros((1, 40)).at[0, 32].set(6.0))
    cost = jnp.asarray(SHARED if pooled else COST, jnp.float32)
    spec = Speculator(drafter, DRAFTER, DRAFTS, cost)
    settings = [s for s in SETTINGS for _ in range(COPIES)]
    generate = jax.jit(
        lambda params, spec, keys: speculative.generate(
            params, CONFIG, spec, jnp.repeat(jnp.asarray(PROMPT), ROWS, axis=0),
            jnp.full(ROWS, PROMPT.shape[1], jnp.int32), Sampling.stack(settings), keys, NEW,
            stop_ids=jnp.full((ROWS, 1), -1, jnp.int32),
            pooled=jnp.ones(ROWS, bool) if pooled else None,
        )
    )  # fmt: skip
    found = np.zeros((len(SETTINGS), *(SYMBOLS,) * NEW))
    setting = np.repeat(np.arange(len(SETTINGS)), COPIES)
    kinds = set()
    for call in range(CALLS):
        keys = keys_from_seeds(range(call * ROWS, (call + 1) * ROWS))
        tokens, _, rounds = generate(params, spec, keys)
        np.add.at(found, (setting, *np.asarray(tokens.ids).T), 1)
        pairs = zip(np.ravel(rounds.proposed), np.ravel(rounds.accepted), strict=True)
        kinds |= {(int(p), int(a)) for p, a in pairs if p >= 0}
    if check:  # refusal, acceptance and bonus at every width
        assert {(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)} <= kinds
    return found


def p_values(counts: np.ndarray) -> np.ndarray:
    """Chi-square p-value of each setting; cells that expect fewer than 5 are joined into one."""
    found = []
    for seen, p in zip(counts, exact(), strict=True):
        seen, want = seen.ravel(), p.ravel() * seen.sum()
        assert not seen[want == 0].any() or seen[want == 0].sum() > 0
        rare = want < 5
        seen = np.append(seen[~rare], seen[rare].sum())
        want = np.append(want[~rare], max(want[rare].sum(), 1e-9))
        statistic = ((seen - want) ** 2 / want).sum()
        freedom = len(want) - 1
        found.append(float(jax.scipy.special.gammaincc(freedom / 2, statistic / 2)))
    return np.array(found)


@pytest.mark.parametrize("pooled", [False, True])
def test_the_joint_distribution_of_four_tokens_is_the_targets(pooled):
    np.testing.assert_allclose(exact().sum(axis=(1, 2, 3, 4)), 1, atol=1e-5)
    assert p_values(count(pooled=pooled)).min() > 1e-4


def always(draft_tokens, q, p, n_valid, uniform, noise):
    _, following = accept(draft_tokens, q, p, n_valid, uniform, noise)
    return n_valid, following


def from_target(draft_tokens, q, p, n_valid, uniform, noise):
    accepted, _ = accept(draft_tokens, q, p, n_valid, uniform, noise)
    at = jnp.take_along_axis(p, accepted[:, None, None], axis=1)[:, 0]
    return accepted, jnp.argmax(jnp.log(at) + noise, axis=-1).astype(jnp.int32)


def unfiltered(draft_tokens, q, p, n_valid, uniform, noise):
    return accept(draft_tokens, jnp.full_like(q, 1 / SYMBOLS), p, n_valid, uniform, noise)


@pytest.mark.parametrize("wrong", [always, from_target, unfiltered])
def test_planted_errors_are_noticed(monkeypatch, wrong):
    monkeypatch.setattr(speculative, "accept", wrong)
    assert p_values(count(check=False)).min() < 1e-6


@pytest.mark.parametrize(("rule", "pooled"), [("choose_widths", False), ("share_widths", True)])
def test_a_width_chosen_by_later_confidences_is_noticed(monkeypatch, rule, pooled):
    """Verifying a draft only if the one after it looks likely to be accepted biases the output."""

    def peeking(confidence, *_):
        return jnp.where(confidence[:, 1] > 0.5, 2, 0).astype(jnp.int32)

    monkeypatch.setattr(speculative, rule, peeking)
    assert p_values(count(check=False, pooled=pooled)).min() < 1e-6
