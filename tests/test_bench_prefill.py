"""The benchmark of prefill from end to end, in small; on a CPU both of its paths are plain JAX."""

import json

import pytest

from scripts import bench_prefill
from scripts.decode_step.parts import full_size
from scripts.prefill_step.calls import work


def test_work_of_the_slice_is_counted_from_shapes():
    """By hand: 2 FLOP per weight and token of what is multiplied, 4 · d per pair and head."""
    tokens, hidden, heads, dim, kv = 8192, 4608, 48, 128, 8
    todo = work(full_size()[0], 0, tokens)
    assert todo.parts["experts"].flops == tokens * 12 * 8 * 6 * hidden * 2304
    sliding = 1024 * 1025 // 2 + (tokens - 1024) * 1024
    pairs = 10 * sliding + 2 * tokens * (tokens + 1) // 2
    assert todo.parts["attention"].flops == 4 * dim * heads * pairs
    projected = 12 * hidden * (3 * heads * dim + heads * 16 + heads + 2 * kv * dim + 384)
    head = 2 * 201024 * hidden
    rest = todo.parts["products"].flops - 2 * tokens * projected - head
    assert 0 <= rest < 1e-3 * todo.flops  # dynamic taps, and what is counted though not multiplied


@pytest.mark.long
def test_rows_in_small(tmp_path):
    out = tmp_path / "new" / "prefill.json"
    parts = "slice,rank,long"
    bench_prefill.main(["--smoke", "--parts", parts, "--commit", "none", "--out", str(out)])
    kernels, plain, rank, *long = json.loads(out.read_text())["rows"]
    assert [row["path"] for row in (kernels, plain)] == ["kernels", "plain"]
    assert kernels["plain_takes"] > 0 and kernels["floor_ms"] < kernels["ms"]
    assert (rank["tokens"], rank["context"]) == (40, 64)
    assert [row["chunk"] for row in long] == [64, 96]
    assert long[1]["differs"] < 1e-5 and long[1]["same_token"]
