"""Kernels are built for one GPU, or several, on a machine without any."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from test_kernel_draft_attention import make_inputs
from test_ops import CONFIG, MAX_BLOCK, bfloat16_params

from inkling_jax import kernel_choice, ops
from inkling_jax.loading import packed_shapes
from inkling_jax.planning.hardware import HARDWARE
from inkling_jax.planning.programs import compile_program, devices
from pallas_kernels import allreduce_conv_mix, conv_mix, draft_attention
from scripts.decode_step.parts import Part
from scripts.decode_step.programs import Case, launches, step_loop
from scripts.decode_step.programs import inputs as inputs_of_a_loop
from scripts.kernel_cases import attention_prefill, moe_prefill
from scripts.kernel_cases.conv_mix import OPTIONS, inputs
from sharding.mesh import MeshConfig, make_mesh

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


@pytest.mark.parametrize(
    "case",
    [case for case in moe_prefill.cases() if not case.compared],
    ids=lambda case: f"{case.variant} {case.shape}",
)
def test_moe_experts_of_many_tokens(case, sm90, tmp_path, monkeypatch):
    """Nothing spills, and no wgmma waits for the one before it."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    carry, args = jax.eval_shape(case.setup, jax.random.key(0))
    sm90.compile_h200(case.result, carry, *args)
    reports = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    assert len(reports) == 2
    for report in reports:
        assert "0 bytes spill stores" in report and "serialized" not in report


@pytest.mark.parametrize(
    "case",
    [case for case in attention_prefill.cases() if not case.compared],
    ids=lambda case: case.shape,
)
def test_rel_attention_prefill(case, sm90):
    carry, args = jax.eval_shape(case.setup, jax.random.key(0))
    program = sm90.compile_h200(case.result, carry, *args).as_text()
    assert program.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("slots", [1024, 9000])
def test_draft_attention(slots, sm90):
    inputs = jax.eval_shape(lambda: make_inputs(0, [3, 700], 7, slots, jnp.bfloat16))
    run = functools.partial(draft_attention.draft_attention, layer=1, eps=1e-6)
    kernels = sm90.resources(lambda given: run(**given), inputs)
    assert [k.spills for k in kernels if k.name.startswith("draft_attention")] == [0]


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


@pytest.mark.parametrize("tokens", [1, MAX_BLOCK])
def test_a_loop_of_a_model(tokens, sm90):
    """A layer launches its eleven kernels and nothing else."""
    case = Case(Part("tiny", CONFIG, ("nvfp4", "mxfp8"), jnp.bfloat16), "kernels", tokens, (64,))
    carry, params = inputs_of_a_loop(case)
    trips = jax.ShapeDtypeStruct((), jnp.int32)
    program = sm90.compile_h200(step_loop(case), carry, params, trips).as_text()
    which_tokens_are_real = 1  # made once, in the first layer
    assert launches(program)[1] == 11 * CONFIG.text.num_hidden_layers + which_tokens_are_real


@pytest.mark.usefixtures("sm90")
def test_a_step_of_a_model_on_two_devices(monkeypatch):
    """As `plan` compiles it; sublayers add up within the kernels that end them."""
    monkeypatch.setattr(kernel_choice, "_chosen", {})
    mesh = make_mesh(MeshConfig(tp=2), devices("cuda", HARDWARE["h200"], 2))
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), bfloat16_params())
    with jax.set_mesh(mesh):
        params = packed_shapes(params, CONFIG)
    program = compile_program("decode", CONFIG, params, mesh, "cuda", 2, 64, 1)
    kernels = (ops.EXPERTS, ops.ATTENTION, ops.ROUTER, ops.MIX, ops.REDUCE_MIX)
    assert program.kernels == dict.fromkeys(kernels, kernel_choice.KERNEL)
    assert {(c.kind, c.where, c.count, c.devices) for c in program.collectives} == {
        ("all-reduce", "embed", 1, 2),
        (ops.REDUCE_MIX, "attention", 2, 2),
        (ops.REDUCE_MIX, "moe", 2, 2),
        ("all-gather", "unembed", 1, 2),
    }


@pytest.mark.usefixtures("sm90")
def test_a_prefill_of_a_model_on_two_devices(monkeypatch):
    """80 tokens, whose experts each device computes of its own columns."""
    monkeypatch.setattr(kernel_choice, "_chosen", {})
    mesh = make_mesh(MeshConfig(tp=2), devices("cuda", HARDWARE["h200"], 2))
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), bfloat16_params())
    with jax.set_mesh(mesh):
        params = packed_shapes(params, CONFIG)
    compile_program("prefill", CONFIG, params, mesh, "cuda", 2, 64, 40)
    assert kernel_choice.chosen()[ops.EXPERTS] == kernel_choice.KERNEL
