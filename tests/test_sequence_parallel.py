"""Tokens split over devices: which calls are, and what a convolution keeps of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax.short_conv import ShortConv
from sharding.collectives import AUTO_TOKENS, Collectives, splits_tokens
from sharding.mesh import MeshConfig, abstract_mesh, make_mesh

P = jax.P
HALO = 3


@pytest.mark.parametrize(
    ("text", "rows", "tokens", "splits"),
    [
        ("tp=4,sp=on", 1, 12, True),
        ("tp=4,sp=on", 1, 11, False),  # a slice would be shorter than the halo
        ("tp=2,ep=2,sp=on", 1, 11, False),
        ("tp=2,sp=on", 1, 8, False),  # a block that may be taken back
        ("tp=2,sp=on", 1, 9, True),
        ("tp=2", 1, AUTO_TOKENS - 1, False),
        ("tp=2", 1, AUTO_TOKENS, True),
        ("tp=2", 2, AUTO_TOKENS // 2, True),
        ("tp=2,dp=2", 2, AUTO_TOKENS // 2, False),
        ("tp=2,sp=off", 1, AUTO_TOKENS, False),
        ("ep=2", 1, AUTO_TOKENS, False),
    ],
)
def test_which_calls_split_their_tokens(text, rows, tokens, splits):
    sizes = abstract_mesh(MeshConfig.parse(text)).shape
    assert splits_tokens(sizes, (rows, tokens), HALO, max_block=8) == splits


@pytest.mark.parametrize("tokens", [12, 17])
def test_a_convolution_of_slices_equals_that_of_all_tokens(tokens):
    """Rows end in the first slice, at its edge, inside the halo of the next, nowhere, everywhere.

    Compared are the real tokens' results and every slot of the state, which each device returns.
    """
    count = jnp.array([2, tokens // 4 + 1, 7, 0, tokens], np.int32)
    start = jnp.array([0, 5, 1, 9, 2], np.int32)
    rng = np.random.default_rng(0)
    u, state = (jnp.asarray(rng.normal(size=(5, n, 6)), jnp.float32) for n in (tokens, 5))
    conv = ShortConv((6,), ("embed",), HALO + 1)
    conv.weight.set_value(jnp.asarray(rng.normal(size=(6, HALO + 1)), jnp.float32))
    y, expected = conv(u, state, start, count)
    mesh = make_mesh(MeshConfig(ep=2, tp=2))
    split = Collectives.of(mesh.abstract_mesh, split_tokens=True)

    def own(u, state):
        u = split.own_tokens(jnp.pad(u, ((0, 0), (0, -tokens % 4), (0, 0))))
        y, state = conv(u, state, start, count, split)
        return split.gather_tokens(y), state[None]

    run = functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), check_vma=False)
    found, states = jax.jit(run(own, out_specs=(P(), P(("ep", "tp0")))))(u, state)
    real = np.arange(tokens) < count[:, None]
    np.testing.assert_array_equal(np.asarray(found)[:, :tokens][real], np.asarray(y)[real])
    np.testing.assert_array_equal(states, np.broadcast_to(expected, (4, *expected.shape)))
