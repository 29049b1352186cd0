"""The Pallas-Triton kernels, at production shapes, are built for an H200 without one."""

import re

import jax
import pytest

from scripts.kernel_cases import (
    attention,
    conv_mix,
    moe_experts,
    projections,
    qkv_prep,
    router,
    sampling,
)

pytestmark = pytest.mark.long
MODULES = (attention, conv_mix, moe_experts, projections, qkv_prep, router, sampling)
KERNELS = (
    "rel_attention_",
    "moe_experts_",
    "project",
    "qkv_prep",
    "conv_mix_",
    "router_",
    "sampling_",
)
CASES = [
    case
    for module in MODULES
    for case in module.cases()
    if not case.compared and "valid" not in case.shape
    if module is not conv_mix or case.variant == "long"  # the others are Mosaic's, see test_sm90
]


@pytest.fixture(scope="module")
def sm90():
    pytest.importorskip("jax_cuda13_plugin", reason="needs the packages of jax[cuda13]")
    from scripts import sm90

    return sm90


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.variant} {case.shape}")
def test_builds(case, sm90, tmp_path):  # KR-01
    carry, args = jax.eval_shape(case.setup, jax.random.key(0))
    found = sm90.resources(case.result, carry, *args, folder=tmp_path)
    kernels = [kernel for kernel in found if kernel.name.startswith(KERNELS)]
    assert kernels and [kernel for kernel in kernels if kernel.spills] == []


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "bfloat16"])
def test_experts_load_sixteen_bytes_at_a_time(format, sm90, tmp_path):
    """Of each projection; Triton joins neighbours only as long as it knows that they are some."""
    case = next(c for c in CASES if (c.op, c.variant) == ("moe_experts", format))
    carry, args = jax.eval_shape(case.setup, jax.random.key(0))
    found = sm90.resources(case.result, carry, *args, folder=tmp_path)
    kernels = [k.cubin.with_suffix(".ptx") for k in found if k.name.startswith("moe_experts")]
    assert len(kernels) == 2
    for ptx in kernels:
        loads = re.findall(r"ld\.global\S*", ptx.read_text())
        joined = sum("v4" in load or "v2" in load for load in loads)
        assert joined > len(loads) / 4, loads
