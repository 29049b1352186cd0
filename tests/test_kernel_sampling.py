"""The end of the kept tokens by the kernel, interpreted, against the sorted definition."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import sampling
from pallas_kernels.sampling import kernel, reference, tally

SETTINGS = list(itertools.product((1, 2, 7, 50, 10**6), (0.0, 1e-9, 0.4371, 0.91234, 1.0)))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """A head of 4 x 8 values, so that rows of 300 need the search of the whole row too."""
    for name, value in {"GROUP": 8, "GROUPS": 4, "HEAD": 4, "CHUNK": 32}.items():
        monkeypatch.setattr(kernel, name, value)
    monkeypatch.setattr(tally, "CHUNK", 32)


def assert_ends(logits, top_k, top_p, interpret=True):
    """Both name the same token, or none cuts; returns the ids."""
    k, p = jnp.asarray(top_k, jnp.int32), jnp.asarray(top_p, jnp.float32)
    run = jax.jit(lambda *args: sampling.prefix_end(*args, interpret=interpret))
    value, token = (np.asarray(x) for x in run(jnp.asarray(logits), k, p))
    expected, where = (np.asarray(x) for x in reference.prefix_end(jnp.asarray(logits), k, p))
    all_kept = (np.asarray(k) >= logits.shape[1]) & (np.asarray(p) >= 1)
    np.testing.assert_array_equal(value[~all_kept], expected[~all_kept])
    np.testing.assert_array_equal(token[~all_kept], where[~all_kept])
    assert (value[all_kept] == -np.inf).all() and (token[all_kept] == logits.shape[1] - 1).all()
    return token


@pytest.mark.parametrize("vocabulary", [5, 300])
@pytest.mark.parametrize("kind", ["distinct", "ties", "flat", "masked"])
def test_ends_where_sorting_ends(vocabulary, kind):
    rng = np.random.default_rng(vocabulary)
    top_k, top_p = np.array(SETTINGS).T
    logits = rng.normal(size=(len(SETTINGS), vocabulary)).astype(np.float32) * 3
    if kind == "ties":
        logits = np.round(logits) + np.float32(0)  # no -0.0
    if kind == "flat":
        logits[:] = -2.5
    if kind == "masked":
        logits[:, ::2] = -np.inf
        logits[0] = np.float32(1e30)
    assert_ends(logits, top_k, top_p)


def test_many_equal_ones_at_the_top():
    logits = np.random.default_rng(0).normal(size=(2, 300)).astype(np.float32)
    logits[:, 3::5] = 9.0  # more groups reach the largest value than are held
    ids = assert_ends(logits, [50, 7], [1.0, 1.0])
    np.testing.assert_array_equal(ids, [3 + 5 * 49, 3 + 5 * 6])


@pytest.mark.parametrize("largest", [[5, 9, 7, 8, 6, 4], [6, 9, 7, 6, 8, 6], [6] * 6, [7, 3, 8]])
def test_what_reaches_the_floor_is_held_equal_or_not(largest):
    """Else a search would read the whole row."""
    values = np.array(largest, np.float32)
    head, floor = kernel.choose_head(jnp.asarray(values)[None], interpret=True)
    held = np.flatnonzero([(values >= value).sum() <= kernel.HEAD for value in values])
    np.testing.assert_array_equal(head[0], [*held, *[-1] * (kernel.HEAD - len(held))])
    np.testing.assert_array_equal(np.flatnonzero(values.view(np.int32) >= floor[0]), held)


def test_refusals_name_the_value():
    assert "2000000" in sampling.unsupported(2_000_000)
    assert sampling.unsupported(200_058) is None
