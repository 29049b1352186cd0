"""Kernels of a model on a mesh: each device packs its own experts, and its step is made of them."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest
from flax import nnx
from test_ops import CONFIG, KERNELS, MAX_BLOCK, bfloat16_params, on_gpu, primitives

from inkling_jax import kernel_choice, moe, ops
from inkling_jax.cache import init_cache
from inkling_jax.generation import decode
from inkling_jax.loading import pack_for_kernels, packed_shapes
from inkling_jax.model import param_shardings, param_specs
from inkling_jax.quant import dequantize
from pallas_kernels.moe_experts import kernel_sm90, unpack
from sharding.collectives import Collectives
from sharding.mesh import MeshConfig, make_mesh

__all__ = ["on_gpu"]


def uneven_params():
    """Parameters whose MXFP8 experts have larger scales in their later rows and columns."""
    params = bfloat16_params()
    for name in ("w13", "w2"):
        variable = params["layers"][1]["moe"][name]
        weights = variable.get_value()
        rows = weights.shape[1] // 2
        scales = weights.scales.at[:, rows:].add(2).at[:, :, 1:].add(3)
        params["layers"][1]["moe"][name] = variable.replace(
            dataclasses.replace(weights, scales=scales)
        )
    return params


def on_mesh(text):
    """A mesh, and parameters that lie on it."""
    mesh, params = make_mesh(MeshConfig.parse(text)), uneven_params()
    return mesh, jax.device_put(params, param_shardings(params, mesh))


def experts(params):
    """The experts' matrices of each layer by path."""
    flat = nnx.to_flat_state(params)
    return {path: v.get_value() for path, v in flat if path[-1] in ("w13", "w2")}


def kind(array):
    return array.shape, array.dtype


@pytest.mark.long
@pytest.mark.parametrize("text", ["ep=2,tp=2", "ep=4,dp=2"])
def test_devices_pack_their_own_parts(text, on_gpu):
    """Whole experts come out as they went in, and nothing lies where it did not before."""
    mesh, params = on_mesh(text)
    expected = {path: dequantize(w, jnp.float32) for path, w in experts(params).items()}
    with jax.set_mesh(mesh):
        shapes = packed_shapes(params, CONFIG)
        packed = pack_for_kernels(params, CONFIG)
    assert list(map(kind, jax.tree.leaves(shapes))) == list(map(kind, jax.tree.leaves(packed)))
    for path, weights in experts(packed).items():
        np.testing.assert_array_equal(unpack(weights), expected[path])
        assert weights.shape == expected[path].shape
    wanted = jax.tree.leaves(param_shardings(packed, mesh))
    for array, sharding in zip(jax.tree.leaves(packed), wanted, strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)


@pytest.mark.parametrize(
    ("rows", "refusal", "choice"),
    [
        (ops.REDUCED_ROWS, None, kernel_choice.KERNEL),
        (ops.REDUCED_ROWS, "16 devices add up", "16 devices add up"),
        (ops.REDUCED_ROWS + 1, None, None),
    ],
)
def test_a_step_on_a_mesh_is_made_of_kernels(rows, refusal, choice, on_gpu, monkeypatch):
    """Each sublayer's sum is within the kernel that ends it, or in front of it."""
    monkeypatch.setattr(ops.allreduce_conv_mix_kernel, "unsupported", lambda *_: refusal)
    mesh, params = on_mesh("ep=2,tp=2")
    with jax.set_mesh(mesh):
        params = packed_shapes(params, CONFIG)
        cache = init_cache(CONFIG.text, rows, 64, MAX_BLOCK, jnp.bfloat16)
        program = jax.make_jaxpr(decode, static_argnums=1)(
            params, CONFIG, jnp.zeros((rows, 1), jnp.int32), cache
        )
    found = primitives(program.jaxpr, Counter())
    for primitive, count in KERNELS.items():
        assert found[primitive] == count * CONFIG.text.num_hidden_layers
    layers = CONFIG.text.num_hidden_layers
    within = choice == kernel_choice.KERNEL
    assert found["psum"] == 1 + (0 if within else 2 * layers)  # the embedding's, the sublayers'
    reasons = dict(kernel_choice.chosen())
    assert reasons.pop(ops.REDUCE_MIX, None) == choice
    assert set(reasons.values()) == {kernel_choice.KERNEL}


@pytest.mark.long
def test_parts_of_experts_add_up(on_gpu, monkeypatch):
    """The kernel, interpreted, on two halves of the columns and two halves of the experts."""
    caps = CONFIG.text.mlp_gate_softcap, CONFIG.text.mlp_up_softcap
    z = jax.random.normal(jax.random.key(0), (3, 128)).astype(jnp.bfloat16)
    picks = jnp.array([[0, 3], [2, 1], [4, 4]], jnp.int32)  # the last row is padding
    weights = jnp.array([[0.5, 2.0], [1.0, 0.25], [0.0, 0.0]])

    def run(collectives, params):
        found, own = experts(params), collectives.own_experts(moe.experts)
        outs = (
            own(
                z,
                picks,
                weights,
                *(found["layers", i, "moe", name] for name in ("w13", "w2")),
                *caps,
            )
            for i in range(2)
        )
        return [collectives.sum(y[None], collectives.ep + collectives.tp)[0] for y in outs]

    with monkeypatch.context() as patch:
        patch.setattr(kernel_choice, "device_refusal", lambda: "it is told not to")
        plain = run(Collectives(), uneven_params())
    ptx_emulator.interpreted(monkeypatch, kernel_sm90)
    mesh, params = on_mesh("ep=2,tp=2")
    with jax.set_mesh(mesh):
        packed = pack_for_kernels(params, CONFIG)
        local = jax.shard_map(
            functools.partial(run, Collectives.of(mesh.abstract_mesh)),
            in_specs=(param_specs(packed, mesh),),
            out_specs=jax.P(),
            check_vma=False,
        )
        out = jax.jit(local)(packed)
    assert kernel_choice.chosen()[ops.EXPERTS] == kernel_choice.KERNEL
    for found, expected in zip(out, plain, strict=True):
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert 0 < error < 0.02
