"""The kernels around attention, at production shapes, are built for an H200 without one."""

import jax
import pytest

from scripts.kernel_cases import projections, qkv_prep

CASES = [
    case
    for module in (projections, qkv_prep)
    for case in module.cases()
    if case.variant == "default"
]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.shape}")
def test_builds(case, tmp_path):
    pytest.importorskip("jax_cuda13_plugin", reason="needs the packages of jax[cuda13]")
    from scripts import sm90

    carry, args = jax.eval_shape(case.setup, jax.random.key(0))
    [kernel] = [
        found
        for found in sm90.resources(case.result, carry, *args, folder=tmp_path)
        if found.name in ("project", "qkv_prep")
    ]
    assert kernel.spills == 0
