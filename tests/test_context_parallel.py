"""Full layers' slots split over devices: what is written where, and one softmax over all of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TEXT

from inkling_jax import attention
from inkling_jax.attention import attend
from inkling_jax.cache import cache_specs, init_cache, write
from sharding.collectives import Collectives
from sharding.mesh import MeshConfig, MeshError, abstract_mesh, make_mesh

P = jax.P


def test_each_part_of_a_ring_takes_the_positions_of_its_slots():
    """Also a block across the border of two parts, one that wraps, and one of padding."""
    ring, new = jnp.zeros((3, 8)), 1.0 + jnp.arange(12.0).reshape(3, 4)
    start, count = jnp.array([2, 6, 0]), jnp.array([4, 3, 0])
    whole = write(ring, new, start, count)
    parts = [write(ring[:, i : i + 4], new, start, count, (i, 8)) for i in (0, 4)]
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=1), whole)
    assert np.count_nonzero(whole) == 7


def test_one_softmax_over_slots_of_several_devices(monkeypatch):
    """4 devices of 3 slots each; bands inside, across and outside of them, and one sink."""
    monkeypatch.setattr(attention, "MAX_QUERY_BLOCK", 4)
    start = jnp.array([0, 2, 5], jnp.int32)
    t, slots, heads, kv_heads, d, rel, extent = 6, 12, 4, 2, 4, 3, 5
    rng = np.random.default_rng(3)
    shapes = [(3, t, heads, d), (3, slots, kv_heads, d), (3, slots, kv_heads, d)]
    shapes += [(3, t, heads, rel), (rel, extent), (3, t, heads)]
    arrays = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]
    mesh = make_mesh(MeshConfig(cp=4))
    split = functools.partial(attend, window=None, collectives=Collectives.of(mesh.abstract_mesh))
    keys = P(None, "cp")
    run = jax.shard_map(
        split, mesh=mesh, in_specs=(P(), keys, keys, P(), P(), P(), P()), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    np.testing.assert_allclose(
        jax.jit(run)(*arrays, start), attend(*arrays, start, None), rtol=2e-6, atol=2e-6
    )


def test_a_cache_has_a_capacity_that_splits():
    with jax.set_mesh(make_mesh(MeshConfig(cp=4))):
        cache = jax.eval_shape(lambda: init_cache(TEXT, 1, 30, 1, jnp.float32))
    assert [layer.k.shape[1] for layer in cache.layers] == [9, 32, 9]  # 8 + 1 in a window's ring
    specs = cache_specs(cache, abstract_mesh(MeshConfig(cp=4)))
    assert [layer.k[1] for layer in specs.layers] == [None, "cp", None]
    odd = jax.eval_shape(lambda: init_cache(TEXT, 1, 30, 1, jnp.float32))
    with pytest.raises(
        MeshError, match=r"slots of size 30 cannot be split by cp=4; cp can be 1, 2"
    ):
        cache_specs(odd, abstract_mesh(MeshConfig(cp=4)))
