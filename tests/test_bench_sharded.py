"""The benchmark between GPUs as far as CPU devices can run it: its judgement and its watchdog."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from inkling_jax import kernel_choice
from pallas_kernels.allreduce_conv_mix.reference import allreduce_conv_mix as plain
from pallas_kernels.conv_mix.reference import conv_mix
from pallas_kernels.moe_experts import PackedExperts
from scripts import bench_sharded
from scripts.sharded_parts import agreement, allreduce, slices, texts, turns


@pytest.fixture
def mesh(monkeypatch):
    monkeypatch.setattr(allreduce, "MAX_SPIN", 4)
    return allreduce.mesh_of(jax.devices()[:2])


def own_summand_only(u, axes, **given):
    return conv_mix(u, **given)


def half_of_the_first(u, axes, **given):
    """As if the first device had not written all of its summand before it was read."""
    first = lax.axis_index(axes) == 0
    return plain(jnp.where(first, u.at[..., 128:].set(0), u), axes=axes, **given)


def checked(mesh, fused):
    prepared, row = allreduce.check_rows(mesh, allreduce.problems(small=True), 8, fused)
    assert prepared is None
    return row


def test_the_check_finds_nothing_wrong_with_the_plain_version(mesh):
    row = checked(mesh, plain)
    assert row["correct"] and row["calls"] == 8 and row["relative_error"] < 1e-6


@pytest.mark.parametrize(("fused", "differ"), [(own_summand_only, 8), (half_of_the_first, 0)])
def test_the_check_counts_every_wrong_call(fused, differ, mesh):
    row = checked(mesh, fused)
    assert not row["correct"]
    assert row["wrong"] == 8 and row["differ_between_devices"] == differ


def test_every_variant_gets_a_row_though_one_fails(mesh, monkeypatch):
    def time_case(loop, carry, args, target):
        jax.block_until_ready(loop(jnp.int32(2), carry, *args))
        return [8e-6]

    def fails_to_compile():
        raise RuntimeError("too large")

    monkeypatch.setattr(allreduce, "time_case", time_case)
    side_by_side = allreduce.side_by_side
    monkeypatch.setattr(allreduce, "side_by_side", lambda jobs: side_by_side(
        jobs | {("alone", 2): fails_to_compile}
    ))  # fmt: skip
    given, runs = allreduce.problems(small=True), {"alone": own_summand_only, "plain": plain}
    prepared, *rows = allreduce.latency_rows(mesh, given, runs, 1e-4)
    assert prepared is None
    assert rows == [
        {"variant": "alone", "rows": 2, "error": "RuntimeError: too large"},
        {"variant": "plain", "rows": 2, "us": pytest.approx(1.0), "spread_us": 0.0},
    ]


@pytest.mark.parametrize("refusal", [None, "no kernel"])
def test_shares_join_to_what_load_leaves_on_a_mesh(refusal, monkeypatch):
    monkeypatch.setattr(kernel_choice, "device_refusal", lambda: refusal)
    part = slices.few_layers(jax.devices()[:2], jnp.bfloat16, small=True)
    whole = slices.stored(part.whole, part.mesh())
    share = jax.eval_shape(lambda: slices.drawn(part.rank))
    assert isinstance(share["layers"][0]["moe"]["w13"].get_value(), PackedExperts) == (not refusal)
    assert jax.tree.structure(whole) == jax.tree.structure(share)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(share), strict=True):
        assert (a.sharding.shard_shape(a.shape), a.dtype) == (b.shape, b.dtype)


def test_differences_are_those_of_the_worst_logit_and_of_the_middle_token():
    expected = np.array([[3.0, 4.0], [3.0, 4.0], [3.0, 4.0]])
    found = expected + np.array([[0.0, 0.0], [0.0, 0.5], [5.0, 0.0]])
    assert agreement.differences(found, expected) == (5.0, pytest.approx(0.1))


def test_texts_are_compared_up_to_where_they_differ():
    ids, logprobs = np.array([[1, 2, 3], [4, 5, 6]]), np.zeros((2, 3))
    other, apart = np.array([[1, 2, 3], [4, 0, 6]]), np.array([[0, 0, 0.1], [0.25, 9, 9]])
    assert texts.agree((ids, logprobs), (other, apart), 1.0) == {
        "tokens": 3, "equal_texts": 1, "largest_difference": 0.25, "correct": False,
    }  # fmt: skip
    assert texts.agree((ids, logprobs), (ids, logprobs), 1.0)["correct"]


def watched(program, patience=20.0, seconds=20.0):
    worker = turns.start([sys.executable, "-c", program], {})
    rows = list(turns.turn(worker, patience, time.monotonic() + seconds))
    assert worker.process.poll() is not None
    return rows


def test_a_process_that_hangs_is_killed_and_its_rows_are_kept():
    program = "import time\nprint('# hello')\nprint('{\"row\": 1}', flush=True)\ntime.sleep(60)"
    begin = time.monotonic()
    assert watched(program, patience=3.0) == [{"row": 1}, {"error": "killed: no result for 3 s"}]
    assert watched(program, seconds=3.0) == [{"row": 1}, {"skipped": "the time was up"}]
    assert watched(program, seconds=0.0) == [{"skipped": "the time was up"}]
    assert time.monotonic() - begin < 30


def test_a_process_that_fails_is_reported():
    assert watched("print('{}')\nraise SystemExit(3)") == [
        {},
        {"error": "the process ended with 3"},
    ]


def test_a_process_measures_when_it_is_told_to():
    worker = turns.start([sys.executable, "-c", "print([input()], {}); print('{}')"], {})
    with pytest.raises(turns.queue.Empty):
        worker.lines.get(timeout=1)
    assert list(turns.turn(worker, 20.0, time.monotonic() + 20)) == [{}]


def test_multicast_is_off_and_memory_shared_in_every_process():
    for part in bench_sharded.PARTS:
        found = bench_sharded.environment(part, small=False)
        assert found["NCCL_NVLS_ENABLE"] == "0"
        assert found["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def run(tmp_path, *arguments):
    out = tmp_path / "new" / "rows.json"
    code = bench_sharded.main([*arguments, "--out", str(out), "--commit", "none"])
    return code, json.loads(out.read_text())["rows"]


def test_without_two_gpus_it_says_so(tmp_path):
    code, rows = run(tmp_path, "--only", "check")
    reason = "needs two GPUs in one process, 0 there"
    assert code == 0 and rows == [{"part": "check", "skipped": reason}]


@pytest.mark.long
@pytest.mark.parametrize(
    ("part", "count"),
    [("check", 1), ("slice", 2), ("layers", 1), ("latency", 1), ("prefill", 4), ("decode", 3)],
)
def test_a_part_runs_to_its_end_on_simulated_devices(part, count, tmp_path):
    code, rows = run(tmp_path, "--small", "--only", part, "--patience", "250")
    assert code == 0 and len(rows) == count
    assert all("error" not in row and "skipped" not in row for row in rows)
