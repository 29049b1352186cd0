"""The benchmark of decoding from end to end, in small; on a CPU both of its paths are plain JAX."""

import json

import pytest

from scripts import bench_decode
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
