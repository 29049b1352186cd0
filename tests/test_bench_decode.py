"""The benchmark of decoding from end to end, in small; on a CPU both of its paths are plain JAX."""

import json

import pytest
from jax.profiler import ProfileData

from scripts import bench_decode
from scripts.decode_step.profile import Total, of_a_trip, totals
from scripts.decode_step.programs import launches

PROGRAM = """HloModule step

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %a = f32[8]{0} fusion(%x), kind=kLoop, metadata={op_name="while/body/layer_0/moe/add"}
  %b = (f32[8]{0}, s32[]) custom-call(%a), metadata={op_name="while/body/layer_1/project"}
  %c = f32[8]{0} copy(%a), metadata={op_name="while/body/unembed/mul"}
  ROOT %out = (s32[], f32[8]{0}) tuple(%x, %c)
}

ENTRY %main (q: (s32[], f32[8])) -> (s32[], f32[8]) {
  %q = (s32[], f32[8]{0}) parameter(0)
  ROOT %w = (s32[], f32[8]{0}) while(%q), condition=%cond, body=%body
}
"""


def test_launches_are_those_of_the_loop_and_its_layers():
    assert launches(PROGRAM) == (3, 2)


PROFILE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "moe_experts_nvfp4" } }
  event_metadata { key: 2 value { id: 2 name: "moe_experts_nvfp4__1" } }
  event_metadata { key: 3 value { id: 3 name: "loop_fusion_12" } }
  lines {
    name: "Stream #13(Kernel)"
    events { metadata_id: 1 duration_ps: 2000000000 }
    events { metadata_id: 3 duration_ps: 1000000000 }
    events { metadata_id: 2 duration_ps: 4000000000 }
  }
  lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 9000000000 } }
}
planes { name: "/host:CPU" lines { name: "Stream" events { duration_ps: 9000000000 } } }
"""


def test_time_is_added_up_by_kernel_on_the_streams_of_a_gpu():
    assert totals(ProfileData.from_text_proto(PROFILE)) == {
        "moe_experts_nvfp4": Total(2, 6.0),
        "loop_fusion": Total(1, 1.0),
    }


def test_only_what_runs_in_the_loop_is_told():
    few = {"copy": Total(9, 3.0), "project": Total(4, 4.0), "convert": Total(5, 5.0)}
    many = {"copy": Total(9, 3.2), "project": Total(12, 16.0), "convert": Total(9, 7.0)}
    many["late"] = Total(4, 16.0)
    found = of_a_trip(few, many, 4)
    assert list(found.items()) == [("late", 4.0), ("project", 3.0), ("convert", 0.5)]


def test_kernels_beyond_the_longest_are_others():
    rows = [{"ms_by_kernel": {"a": 1.0, "b": 5.0}}, {"ms_by_kernel": {"c": 2.0, "b": 1.0}}]
    shown = bench_decode.longest_kernels(rows, most=2)
    assert {name: list(ms) for name, ms in shown.items()} == {
        "b": [5.0, 1.0],
        "c": [0.0, 2.0],
        "others": [1.0, 0.0],
    }


@pytest.mark.long
def test_rows_in_small(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "decode.json"
    options = ["--smoke", "--parts", "rank", "--tokens", "4", "--contexts", "32,64"]
    bench_decode.main([*options, "--commit", "none", "--out", str(out)])
    result = json.loads(out.read_text())
    rows = [(row["path"], row["tokens"], row["context"]) for row in result["rows"]]
    assert rows == [(path, 4, context) for path in ("kernels", "plain") for context in (32, 64)]
    kernels, longer, plain, _ = result["rows"]
    assert kernels["plain_takes"] > 0
    assert 8 < kernels["distinct_experts"] <= 16 and "bytes" not in plain
    cached = 2 * 32 * 2 * 128 * 4  # a full layer's keys and values: tokens, KV heads, size, float32
    assert longer["bytes"] - kernels["bytes"] == cached
    assert out.with_suffix(".png").exists()
