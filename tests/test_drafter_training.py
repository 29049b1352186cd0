"""The drafter's loss against what it states, that it can be learnt, and calibration."""

import jax
import jax.numpy as jnp
import numpy as np
from drafting import calibrate, loss
from helpers import tiny_params
from helpers_dspark import TARGET, VOCAB, with_heads

from inkling_jax.cache import init_cache
from inkling_jax.drafter import init_drafter
from inkling_jax.model import forward

ROWS, WIDTH, ANCHORS = 2, 24, 6
CONFIG = with_heads(block_size=3, markov_rank=8)


def batch():
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (ROWS, WIDTH)), jnp.int32)
    lengths = jnp.array([WIDTH, 15], jnp.int32)
    mask = (jnp.arange(WIDTH) >= 4) & (jnp.arange(WIDTH) < lengths[:, None])
    return tokens, lengths, mask


@jax.jit
def found(params, key):
    """Blocks of a tiny drafter, whose target is the tiny model."""
    tokens, lengths, mask = batch()
    target = tiny_params(TARGET)
    cache = init_cache(TARGET.text, ROWS, WIDTH, 1, jnp.float32)
    out = forward(target, TARGET, tokens, lengths, cache, taps=CONFIG.target_layer_ids)
    anchors, real = loss.choose_anchors(mask, key, ANCHORS)
    blocks = loss.blocks(params, CONFIG, target, TARGET, out, tokens, mask, lengths, anchors, real)
    return blocks, anchors


def test_blocks_count_what_is_to_be_learnt_up_to_the_end_of_the_row():
    blocks, anchors = found(init_drafter(CONFIG, jax.random.key(1)), jax.random.key(2))
    _, lengths, mask = batch()
    counts = np.asarray(blocks.counts).reshape(ROWS, ANCHORS, -1)
    for row in range(ROWS):
        for at, counted in zip(np.asarray(anchors)[row], counts[row], strict=True):
            labels = at + 1 + np.arange(CONFIG.block_size)
            wanted = [bool(n < lengths[row] and mask[row, n]) for n in labels]
            np.testing.assert_array_equal(counted, np.cumprod(wanted).astype(bool))
    assert counts.any() and not counts.all()
    assert ((blocks.accept >= 0) & (blocks.accept <= 1)).all()


def test_the_loss_weighs_its_parts_and_positions():
    exist = jnp.array([[True, True, False]])
    half = jnp.full((1, 3), 0.5)
    blocks = loss.Blocks(exist, accept=half, confidence=half, ce=jnp.array([[1.0, 3.0, 9.0]]))
    each = 0.9 * 2 * 0.5 + np.log(2.0)  # 0.9 · ‖p - q‖₁, and the confidences' cross entropy
    weight = np.exp(-np.arange(2) / 4)
    wanted = (weight * (0.1 * np.array([1.0, 3.0]) + each)).sum() / weight.sum()
    np.testing.assert_allclose(loss.loss(blocks), wanted, rtol=1e-6)


def test_a_few_steps_lower_the_loss():
    params = init_drafter(CONFIG, jax.random.key(1))

    @jax.jit
    def step(params):
        value, gradient = jax.value_and_grad(lambda p: loss.loss(found(p, jax.random.key(2))[0]))(
            params
        )
        return value, jax.tree.map(lambda w, g: w - 0.3 * g, params, gradient)

    values = []
    for _ in range(12):
        value, params = step(params)
        values.append(float(value))
    assert values[-1] < 0.95 * values[0]


def test_temperatures_mend_overconfidence():
    """Confidences of twice the true logit: the fitted temperatures are near 2, errors fall."""
    rng = np.random.default_rng(0)
    score = rng.normal(size=(4000, 3))
    accept = 1 / (1 + np.exp(-score))
    said = 1 / (1 + np.exp(-2 * score))
    fitted, scaled = calibrate.temperatures(said, accept, np.ones(said.shape, bool))
    np.testing.assert_allclose(fitted, 2.0, rtol=0.15)
    truth = np.cumprod(accept, axis=1).ravel()
    before, after = (
        calibrate.calibration_error(np.cumprod(c, axis=1).ravel(), truth) for c in (said, scaled)
    )
    assert after < 0.02 < before
