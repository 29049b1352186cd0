"""The drafter's loss against what it states, that it can be learnt, and calibration."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from drafting import calibrate, data, loss, step
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
def found(params, target, key):
    """Blocks of a tiny drafter."""
    tokens, lengths, mask = batch()
    cache = init_cache(TARGET.text, ROWS, WIDTH, 1, jnp.float32)
    out = forward(target, TARGET, tokens, lengths, cache, taps=CONFIG.target_layer_ids)
    anchors, real = loss.choose_anchors(mask, key, ANCHORS)
    blocks = loss.blocks(params, CONFIG, target, TARGET, out, tokens, mask, lengths, anchors, real)
    return blocks, anchors


def test_blocks_count_what_is_to_be_learnt_up_to_the_end_of_the_row():
    params, target = init_drafter(CONFIG, jax.random.key(1)), tiny_params(TARGET)
    blocks, anchors = found(params, target, jax.random.key(2))
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
    tokens, lengths, mask = batch()
    side, index = TARGET.vision.tile_size, jnp.full(tokens.shape, -1, jnp.int32)
    tiles, grid = jnp.zeros((1, 2, side, side, 3), jnp.uint8), jnp.array([[1, 2]], jnp.int32)
    optimizer = step.make_optimizer()
    params = step.flatten(init_drafter(CONFIG, jax.random.key(1)))
    state = step.TrainState(params, optimizer.init(params))
    options = {"drafter": CONFIG, "config": TARGET, "optimizer": optimizer, "anchors": ANCHORS}
    train = jax.jit(functools.partial(step.train_step, **options))
    target, made = tiny_params(TARGET), data.Batch(tokens, mask, lengths, index, tiles, grid)
    values = []
    with jax.numpy_dtype_promotion("standard"):  # for optax
        for _ in range(12):
            state, summary = train(state, target, made, jnp.int32(2), jnp.float32(0.003))
            values.append(float(summary["loss"]))
    assert values[-1] < 0.95 * values[0]


def test_temperatures_mend_overconfidence():
    """Confidences of twice the true logit: the fitted temperatures are near 2, errors fall."""
    rng = np.random.default_rng(0)
    score = rng.normal(size=(8000, 3))
    accept = 1 / (1 + np.exp(-score))
    said = 1 / (1 + np.exp(-2 * score))
    found = calibrate.assess(said, accept, np.ones(said.shape, bool))
    np.testing.assert_allclose(found["temperatures"], 2.0, rtol=0.15)
    assert found["after"]["error"] < 0.02 < found["before"]["error"]
