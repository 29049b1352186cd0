"""Published names to parameters: every key once, shapes checked, formats told by the tensors."""

import ml_dtypes
import numpy as np
import pytest
from helpers_checkpoints import TINY, expected, packed, tensors

from checkpoints.key_map import make_plan
from checkpoints.safetensors_reader import read_index
from checkpoints.safetensors_writer import write_file
from inkling_jax.errors import InputError


def index_of(tmp_path, named):
    write_file(tmp_path / "f.safetensors", named)
    return read_index(tmp_path / "f.safetensors")


def plan_of(tmp_path, named, **options):
    leaves = make_plan(index_of(tmp_path, named), expected(TINY), **options).leaves
    return {"/".join(map(str, leaf.path)): leaf for leaf in leaves}


def report(tmp_path, named):
    with pytest.raises(InputError) as error:
        plan_of(tmp_path, named)
    return str(error.value).splitlines()


# Written from the spec's table, not from ours: sizes of TINY, layer 1 is full, the others sliding.
SPEC = {
    "model.llm.embed.weight": ("embed/weight", [72, 64], [72, 64]),
    "model.llm.unembed.weight": ("unembed/weight", [72, 64], [72, 64]),
    "model.llm.embed_norm.weight": ("embed_norm/weight", [64], [64]),
    "model.llm.norm.weight": ("norm/weight", [64], [64]),
    "model.llm.attn_res.attn_queries.0": ("layers/1/attn_query", [3, 64], [3, 64]),
    "model.llm.attn_res.attn_queries.1": ("layers/2/attn_query", [64], [64]),
    "model.llm.attn_res.mlp_queries.0": ("layers/0/mlp_query", [64], [64]),
    "model.llm.attn_res.output_query": ("output_query", [64], [64]),
    "model.llm.layers.0.attn.wq_du.weight": ("layers/0/attn/wq", [64, 64], [8, 8, 64]),
    "model.llm.layers.1.attn.wq_du.weight": ("layers/1/attn/wq", [96, 64], [6, 16, 64]),
    "model.llm.layers.0.attn.gate_attn.weight": ("layers/0/attn/gate", [64, 64], [8, 8, 64]),
    "model.llm.layers.0.attn.wk_dv.weight": ("layers/0/attn/wk", [32, 64], [4, 8, 64]),
    "model.llm.layers.0.attn.wv_dv.weight": ("layers/0/attn/wv", [32, 64], [4, 8, 64]),
    "model.llm.layers.0.attn.wr_du.weight": ("layers/0/attn/wr", [40, 64], [8, 5, 64]),
    "model.llm.layers.0.attn.attn_sink_proj.weight": ("layers/0/attn/sink", [8, 64], [8, 64]),
    "model.llm.layers.1.attn.wo_ud.weight": ("layers/1/attn/wo", [64, 96], [64, 6, 16]),
    "model.llm.layers.0.attn.q_l2_clip.scale": ("layers/0/attn/q_scale", [8, 8], [8, 8]),
    "model.llm.layers.0.attn.rel_l2_clip.scale": ("layers/0/attn/r_scale", [8, 5], [8, 5]),
    "model.llm.layers.0.attn.rel_logits_proj.proj": ("layers/0/attn/rel_proj", [5, 10], [5, 10]),
    "model.llm.layers.1.attn.rel_logits_proj.proj": ("layers/1/attn/rel_proj", [5, 12], [5, 12]),
    "model.llm.layers.0.attn.k_sconv.weight": (
        "layers/0/attn/k_conv/weight", [32, 1, 3], [4, 8, 3],
    ),
    "model.llm.layers.1.attn.v_sconv.static_w": (
        "layers/1/attn/v_conv/static", [3, 32], [3, 2, 16],
    ),
    "model.llm.layers.1.attn.k_sconv.weight_proj": (
        "layers/1/attn/k_conv/dynamic", [6, 64], [2, 3, 64],
    ),
    "model.llm.layers.0.attn_sconv.weight": ("layers/0/attn_conv/weight", [64, 1, 3], [64, 3]),
    "model.llm.layers.1.mlp_sconv.weight": ("layers/1/mlp_conv/weight", [64, 1, 3], [64, 3]),
    "model.llm.layers.0.attn_norm.weight": ("layers/0/attn_norm/weight", [64], [64]),
    "model.llm.layers.1.q_input_norm.weight": ("layers/1/q_norm/weight", [64], [64]),
    "model.llm.layers.1.v_input_norm.weight": ("layers/1/v_norm/weight", [64], [64]),
    "model.llm.layers.0.mlp_norm.weight": ("layers/0/mlp_norm/weight", [64], [64]),
    "model.llm.layers.0.mlp.gate.weight": ("layers/0/moe/gate", [4, 64], [4, 64]),
    "model.llm.layers.0.mlp.gate.bias": ("layers/0/moe/bias", [4], [4]),
    "model.llm.layers.1.mlp.experts.w13_weight": ("layers/1/moe/w13", [4, 64, 64], [4, 64, 64]),
    "model.llm.layers.1.mlp.experts.w2_weight": ("layers/1/moe/w2", [4, 64, 32], [4, 64, 32]),
    "model.visual.backbone.embeddings.patch_embedding.weight": (
        "vision/patch_embedding", [24, 75], [24, 75],
    ),
    "model.visual.backbone.embeddings.position_embedding": (
        "vision/position_embedding", [9, 24], [9, 24],
    ),
    "model.visual.backbone.embeddings.class_embedding": ("vision/class_embedding", [24], [24]),
    "model.visual.backbone.embeddings.cls_position_embedding": (
        "vision/class_position", [24], [24],
    ),
    "model.visual.backbone.ln_pre.bias": ("vision/ln_pre/bias", [24], [24]),
    "model.visual.backbone.layers.0.ln_1.weight": ("vision/layers/0/ln_1/weight", [24], [24]),
    "model.visual.backbone.layers.0.ls_2.gamma": ("vision/layers/0/ls_2", [24], [24]),
    "model.visual.backbone.layers.0.self_attn.out_proj.weight": (
        "vision/layers/0/attn/out/weight", [24, 24], [24, 24],
    ),
    "model.visual.backbone.layers.0.mlp.c_fc.weight": (
        "vision/layers/0/mlp/fc/weight", [48, 24], [48, 24],
    ),
    "model.visual.backbone.layers.0.mlp.c_proj.bias": ("vision/layers/0/mlp/proj/bias", [24], [24]),
    "model.visual.proj_in.weight": ("vision/proj_in/weight", [40, 96], [40, 96]),
    "model.visual.proj_out.bias": ("vision/proj_out/bias", [64], [64]),
}  # fmt: skip


def test_names_and_shapes_are_the_specs(tmp_path):
    named = tensors(TINY)
    plan = plan_of(tmp_path, named)
    for name, (path, shape, ours) in SPEC.items():
        assert list(named[name].shape) == shape, name
        assert plan[path].names == (name,)
        np.testing.assert_array_equal(plan[path][()], named[name].reshape(ours))


def test_every_key_is_used_once(tmp_path):
    named = tensors(TINY)
    used = [name for leaf in plan_of(tmp_path, named).values() for name in leaf.names]
    assert sorted(used) == sorted(named)


def test_gate_and_up_rows_and_taps_keep_their_order(tmp_path):  # LD-06
    named = dict(tensors(TINY, formats=("bf16",) * 3))
    rows = np.where(np.arange(64) % 2, -1, 1).astype(np.float32)[None, :, None]
    w13, conv = "model.llm.layers.0.mlp.experts.w13_weight", "model.llm.layers.0.attn_sconv.weight"
    named[w13] = np.broadcast_to(rows, (4, 64, 64)).astype(ml_dtypes.bfloat16)
    named[conv] = np.broadcast_to(np.float32([1, 2, 3]), (64, 1, 3))
    plan = plan_of(tmp_path, named)
    w13 = plan["layers/0/moe/w13"][()]
    assert (w13[:, 0::2] == 1).all() and (w13[:, 1::2] == -1).all()
    assert (plan["layers/0/attn_conv/weight"][()] == [1, 2, 3]).all()


def test_each_layer_says_its_own_format(tmp_path):
    plan = plan_of(tmp_path, tensors(TINY, formats=("mxfp8", "nvfp4", "bf16")))
    parts = {
        i: {
            p.split("/")[-1]: (str(leaf.dtype), leaf.shape)
            for p, leaf in plan.items()
            if f"layers/{i}/moe/w2" in p
        }
        for i in range(3)
    }
    assert parts[0] == {
        "values": ("float8_e4m3fn", (4, 64, 32)),
        "scales": ("uint8", (4, 64, 1)),
    }
    assert parts[1] == {
        "values": ("uint8", (4, 64, 16)),
        "scales": ("float8_e4m3fn", (4, 64, 2)),
        "outer": ("float32", (4,)),
    }
    assert parts[2] == {"w2": ("bfloat16", (4, 64, 32))}


def test_packed_codes_and_outer_scale(tmp_path):
    named = tensors(TINY)
    plan = plan_of(tmp_path, named)
    name = "model.llm.layers.0.mlp.experts.w13_weight"
    np.testing.assert_array_equal(plan["layers/0/moe/w13/values"][()], named[name])
    outer = named[f"{name}_amax"] / named[f"{name}_outer_scale_denominator"]
    np.testing.assert_array_equal(plan["layers/0/moe/w13/outer"][()], outer)
    np.testing.assert_array_equal(plan["layers/0/moe/w13/outer"][1:3], outer[1:3])


def test_scales_may_arrive_as_e8m0(tmp_path):
    named = dict(tensors(TINY))
    scale = "model.llm.layers.2.mlp.experts.w2_weight_scale"
    codes = named[scale]
    named[scale] = codes.view(ml_dtypes.float8_e8m0fnu)
    leaf = plan_of(tmp_path, named)["layers/2/moe/w2/scales"]
    np.testing.assert_array_equal(leaf[1:], codes[1:])
    assert leaf[()].dtype == np.uint8


def test_slices_of_a_leaf_are_slices_of_the_parameter(tmp_path):
    named = tensors(TINY)
    wo = plan_of(tmp_path, named)["layers/1/attn/wo"]
    whole = named["model.llm.layers.1.attn.wo_ud.weight"].reshape(64, 6, 16)
    np.testing.assert_array_equal(wo[:, 2:4], whole[:, 2:4])


def test_float32_islands_stay_and_the_rest_takes_the_dtype(tmp_path):
    named = tensors(TINY)
    for dtype in (np.dtype(np.float32), np.dtype(np.float16), None):
        plan = plan_of(tmp_path, named, dtype=dtype)
        assert plan["layers/0/attn/wq"][()].dtype == (dtype or ml_dtypes.bfloat16)
        for island in ("attn_query", "moe/gate", "moe/bias", "mlp_conv/weight"):
            assert plan[f"layers/1/{island}"][()].dtype == np.float32
        assert plan["layers/0/moe/w13/values"].dtype == np.uint8
    bf16 = {n: a.astype(ml_dtypes.bfloat16) if "mlp.gate" in n else a for n, a in named.items()}
    assert plan_of(tmp_path, bf16)["layers/1/moe/gate"][()].dtype == np.float32


def test_all_faults_are_one_report(tmp_path):
    named = dict(tensors(TINY))
    del named["model.llm.norm.weight"]
    named["model.llm.extra"] = np.zeros(1)
    named["model.llm.embed.weight"] = np.zeros((70, 64), np.float32)
    named["model.llm.layers.0.attn.wq_du.weight"] = np.zeros((64, 64), np.int8)
    assert report(tmp_path, named) == [
        "checkpoint: 4 faults in its tensors:",
        "  misshapen: model.llm.embed.weight is [70, 64], it must be [72, 64]",
        "  missing: model.llm.norm.weight, for norm/weight",
        "  unknown: model.llm.extra, no parameter is made of it",
        "  wrong dtype: model.llm.layers.0.attn.wq_du.weight is I8, it must be F32 or BF16 or F16",
    ]


def test_a_long_report_is_cut(tmp_path):
    lines = report(tmp_path, {"model.llm.extra": np.zeros(1)})
    count = int(lines[0].split()[1])
    assert count > 100 and len(lines) == 22
    assert lines[-1] == f"  and {count - 20} more"


@pytest.mark.parametrize("lost", ["_scale", "_amax", "_outer_scale_denominator"])
def test_no_scale_is_ever_made_up(tmp_path, lost):
    named = dict(tensors(TINY))
    del named[name := f"model.llm.layers.0.mlp.experts.w2_weight{lost}"]
    assert f"  missing: {name}, for layers/0/moe/w2" in report(tmp_path, named)


def test_scales_beside_plain_weights_are_unknown(tmp_path):
    named = dict(tensors(TINY))
    named[scale := "model.llm.layers.1.mlp.experts.w2_weight_scale"] = np.zeros(
        (4, 64, 1), np.uint8
    )
    assert f"  unknown: {scale}, no parameter is made of it" in report(tmp_path, named)


def test_ignored_keys_are_listed_with_their_reason(tmp_path):
    name = "model.visual.backbone.rotary_emb.inv_freq"
    index = index_of(tmp_path, {**tensors(TINY), name: np.zeros(3)})
    assert make_plan(index, expected(TINY)).ignored == {
        name: "rotary frequencies are computed from rope_theta"
    }


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("model.llm.layers.2.mlp.experts.w13_weight_scale", 255),  # e8m0
        ("model.llm.layers.0.mlp.experts.w13_weight_scale", 0x7F),  # e4m3
        ("model.llm.layers.0.mlp.experts.w13_weight_scale", 0xFF),
    ],
)
def test_nan_scales_are_refused_when_read(tmp_path, name, code):  # QZ-01
    named = dict(tensors(TINY))
    codes = named[name].view(np.uint8).copy()
    codes[3, 5, 1] = code
    named[name] = codes.view(named[name].dtype)
    layer = name.split(".")[3]
    leaf = plan_of(tmp_path, named)[f"layers/{layer}/moe/w13/scales"]
    leaf[:3]  # the experts before it are sound
    with pytest.raises(InputError, match=f"tensor {name} has 1 block scales that are NaN"):
        leaf[3:]


@pytest.mark.parametrize(("amax", "denominator"), [(np.inf, 1), (np.nan, 1), (1, 0), (1, np.nan)])
def test_outer_scales_must_be_finite(tmp_path, amax, denominator):
    named = dict(tensors(TINY))
    name = "model.llm.layers.0.mlp.experts.w2_weight"
    named[f"{name}_amax"] = np.full(4, amax, np.float32)
    named[f"{name}_outer_scale_denominator"] = np.array(denominator, np.float32)
    with pytest.raises(InputError, match=f"{name}_amax and .* must be finite"):
        plan_of(tmp_path, named)["layers/0/moe/w2/outer"][()]


def test_widths_that_blocks_do_not_divide(tmp_path):
    want = {
        ("layers", 0, "moe", "w2"): expected(TINY)["layers", 0, "moe", "w2"].update(
            shape=(4, 64, 40)
        )
    }
    name = "model.llm.layers.0.mlp.experts.w2_weight"
    named = dict(packed(np.random.default_rng(0), name, (4, 64, 64), "mxfp8"))
    with pytest.raises(InputError, match="blocks of 32, which do not divide its columns, 40"):
        make_plan(index_of(tmp_path, named), want)
