"""Meshes from text, the rules that lay arrays out on them, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TINY, tiny

from inkling_jax.attention import attend
from inkling_jax.config import inkling2_small
from inkling_jax.model import abstract_params, param_specs
from inkling_jax.quant import abstract
from sharding.mesh import PRESETS, MeshConfig, MeshError, abstract_mesh, make_mesh
from sharding.partition import partition
from sharding.rules import spec

P = jax.P


def sizes(text):
    return abstract_mesh(MeshConfig.parse(text))


def test_sizes_come_from_text_presets_and_yaml(tmp_path):
    file = tmp_path / "mesh.yaml"
    file.write_text('# eight devices\ntp: 4\n\ncp: 2  # halves of the context\nsp: "on"\n')
    expected = MeshConfig(cp=2, tp=4, sp="on")
    assert MeshConfig.parse(str(file)) == MeshConfig.parse(" cp=2, tp=4,sp=on") == expected
    assert MeshConfig.parse("h200-tp8") == MeshConfig(tp=8)
    assert all(MeshConfig.parse(text).devices in (4, 8) for text in PRESETS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bogus", "mesh: 'bogus' is not understood"),
        ("tp=x", "'tp=x' is not understood; write sizes of dp, cp, ep, tp and sp=auto|on|off"),
        ("tp=2,sp=2", "'sp=2' is not"),
        ("dp=2,sp=on", "sp=on splits tokens over the devices of tp, which is 1; give tp=2 or more"),
        ("tp=-2", "'tp=-2' is not"),
        ("pp=2", "'pp=2' is not"),
        ("tp=2,tp=2", "tp is given twice"),
        ("tp=" + 5000 * "9", "99.*is not understood"),
        ("tp=0", "tp is 0, it must be a whole number from 1 on"),
        ("absent.yaml", "absent.yaml: cannot be read"),
        ("a\0.yaml", "cannot be read"),
        ("", "is not understood"),
    ],
)
def test_other_text_is_refused(text, says):
    with pytest.raises(MeshError, match=says) as error:
        MeshConfig.parse(text)
    assert len(str(error.value)) < 300


def test_a_file_in_another_encoding_is_refused_by_name(tmp_path):
    (tmp_path / "mesh.yaml").write_bytes("tp: 4".encode("utf-16"))
    with pytest.raises(MeshError, match=r"mesh\.yaml: is not text in UTF-8"):
        MeshConfig.parse(str(tmp_path / "mesh.yaml"))


def test_a_mesh_has_neighbours_in_a_tp_group():
    mesh = make_mesh(MeshConfig(dp=2, tp=4))
    assert dict(mesh.shape) == {"dp": 2, "cp": 1, "ep": 1, "tp0": 2, "tp1": 2}
    assert [d.id for d in mesh.devices[1].flat] == [4, 5, 6, 7]


@pytest.mark.parametrize("text", ["tp=8", "dp=2,cp=2,ep=2", "tp=4"])
def test_devices_lie_in_the_order_of_their_ids(text):
    """As kernels that add up over a mesh need."""
    mesh = make_mesh(MeshConfig.parse(text))
    assert [d.id for d in mesh.devices.flat] == [*range(mesh.size)]


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(MeshError, match=r"needs 16 devices, 8 are there; use at most 8, or sim"):
        make_mesh(MeshConfig(tp=16))


def test_devices_of_other_processes_are_not_left_out():
    remote = dataclasses.make_dataclass("Device", ["process_index"])(1)
    with pytest.raises(MeshError, match=r"uses 8 of 9 devices and none of the processes \[1\]"):
        make_mesh(MeshConfig(tp=8), [*jax.devices(), remote])


def test_rules_split_each_dimension_over_its_group():
    shape = sizes("dp=2,ep=2,tp=4").shape
    tp = ("tp0", "tp1")
    assert spec(("vocab", "embed"), (8, 6), shape) == P(tp, None)
    assert spec(("experts", "expert_width", None), (4, 8, 3), shape) == P("ep", tp, None)
    assert spec(("batch", None, "kv_heads", None), (2, 9, 2, 3), shape) == P(
        "dp", None, "tp0", None
    )
    assert spec(("kv_heads",), (1,), shape) == P(None)
    with pytest.raises(ValueError, match="two of them would be split over tp"):
        spec(("heads", "expert_width"), (4, 4), shape)
    with pytest.raises(ValueError, match="axis 'depth' has no rule"):
        spec(("depth",), (4,), shape)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6])
def test_query_heads_meet_their_kv_head(tp):
    """12 query heads of 2 groups; the values of group h are all h (SH-01)."""
    mesh = make_mesh(MeshConfig(tp=tp))
    one = jnp.ones((1, 1, 12, 8))
    v = jnp.broadcast_to(jnp.arange(2.0)[:, None], (1, 4, 2, 8))
    inputs = {"q": one, "k": v, "v": v, "r": one[..., :4], "sink": jnp.full((1, 1, 12), -1e9)}
    heads, kv_heads = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)
    axes = {"q": heads, "k": kv_heads, "v": kv_heads, "r": heads, "sink": heads[:3]}
    if tp == 3:
        with pytest.raises(MeshError, match=r"kv_heads of size 2 .* tp can be 1, 2, 4, 6, 12$"):
            partition(inputs, axes, mesh)
        return
    local = functools.partial(attend, proj=jnp.ones((4, 3)), start=jnp.zeros(1, int), window=None)
    specs = partition(inputs, axes, mesh)
    run = jax.shard_map(
        lambda a: local(**a), mesh=mesh, in_specs=(specs,), out_specs=specs["q"], check_vma=False
    )
    out = jax.jit(run)(inputs)
    np.testing.assert_allclose(out[0, 0], np.repeat([0.0, 1.0], 6)[:, None] * np.ones(8))


def test_heads_that_do_not_divide_are_refused():
    params = abstract_params(tiny(num_attention_heads=13, num_key_value_heads=1))
    with pytest.raises(MeshError, match=r"1/attn/.*: heads of size 13 .*tp=2; tp can be 1$"):
        param_specs(params, sizes("tp=2"))


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(MeshError, match=r"moe/.*: experts of size 4 .*ep=3; ep can be 1, 2, 4$"):
        param_specs(abstract_params(TINY), sizes("ep=3"))


@pytest.mark.parametrize(("fmt", "works"), [("nvfp4", "1, 2, 3, 6"), ("mxfp8", "1, 3")])
def test_shards_hold_whole_groups_of_packed_values(fmt, works):
    """3 experts of 40 × 96 in groups of 16 or 32 (QZ-04)."""
    tree = {"w2": abstract((3, 40, 96), fmt)}
    axes = {"w2": ("experts", "embed", "expert_width")}
    found = partition(tree, axes, sizes("tp=3"))["w2"]
    assert found.values == found.scales == P(None, None, "tp0")
    with pytest.raises(MeshError, match=rf"w2: .* cannot be split by tp=4; tp can be {works}$"):
        partition(tree, axes, sizes("tp=4"))


@pytest.mark.parametrize("text", ["gb200-tp4", "gb200-tp8", "tp=4,ep=2", "tp=16", "ep=8,dp=2"])
def test_the_full_size_divides(text):
    """Every parameter is split like the table says, and a device holds its share of the experts."""
    mesh, params = sizes(text), abstract_params(inkling2_small(), jnp.bfloat16)
    specs = param_specs(params, mesh)
    shards = jax.tree.map(
        lambda p, s: np.prod(jax.NamedSharding(mesh, s).shard_shape(p.shape)), params, specs
    )
    moe = jax.tree.leaves(shards["layers"][0]["moe"]["w13"])[0]
    assert moe * np.prod(list(mesh.shape.values())) // mesh.shape["dp"] == 384 * 4608 * 4608
