"""What compute-sanitizer is to watch fits the kernels, whose own tests say what they compute."""

import jax
import pytest

from scripts import sanitize_kernels

pytestmark = pytest.mark.long


def test_every_kernel_takes_its_inputs():
    cases = list(sanitize_kernels.kernels())
    for _, run, given in cases:
        assert all(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(run, given)))
    watched = {name.split(",")[0] for name, *_ in cases}
    assert watched == {
        *("projections", "router", "moe_experts", "sampling", "rel_attention_decode", "qkv_prep"),
        *("qkv_prep_long", "draft_attention", "conv_mix", "conv_mix_long", "rel_attention_prefill"),
    }
