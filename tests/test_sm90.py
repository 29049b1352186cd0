"""Kernels of several GPUs are built for them on a machine without any."""

import functools

import jax
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import allreduce_conv_mix, conv_mix
from scripts.kernel_cases.conv_mix import OPTIONS, inputs

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def sm90():
    pytest.importorskip("jax_cuda13_plugin", reason="needs the packages of jax[cuda13]")
    from scripts import sm90

    return sm90


@pytest.mark.parametrize(("batch", "tokens", "queries"), [(1, 1, 1), (1, 8, 3), (8, 8, 1)])
def test_conv_mix(batch, tokens, queries, sm90):
    carry, (shared,) = jax.eval_shape(
        functools.partial(inputs, batch, tokens, queries), jax.random.key(0)
    )
    run = functools.partial(conv_mix.conv_mix, **OPTIONS)
    program = sm90.compile_h200(lambda given: run(**given), carry | shared).as_text()
    assert program.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(("axes", "tokens"), [({"tp": 2}, 1), ({"dp": 1, "tp0": 2, "tp1": 2}, 8)])
def test_allreduce_conv_mix(axes, tokens, sm90):
    """Every device is a peer, none of them by multicast."""
    carry, (shared,) = jax.eval_shape(functools.partial(inputs, 1, tokens, 1), jax.random.key(0))
    peers = [axis for axis in axes if axis.startswith("tp")]
    run = functools.partial(allreduce_conv_mix.allreduce_conv_mix, axes=peers, **OPTIONS)
    mesh = sm90.h200_mesh(axes)
    fn = jax.shard_map(
        lambda given: run(**given), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    program = sm90.compile_h200(fn, carry | shared, mesh=mesh).as_text()
    assert program.count("mosaic_gpu_v2") == 1 and "uses_xla_collective_metadata = true" in program
    assert "all-reduce" not in program and "multimem" not in program
