"""The benchmark between GPUs as far as CPU devices can run it: its judgement and its watchdog."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh

from pallas_kernels.allreduce_conv_mix.reference import allreduce_conv_mix as plain
from pallas_kernels.conv_mix.reference import conv_mix
from scripts import bench_sharded
from scripts.kernel_cases import conv_mix as cases


@pytest.fixture
def two_devices(monkeypatch):
    monkeypatch.setattr(cases, "HIDDEN", 256)
    monkeypatch.setattr(cases, "BLOCKS", 2)
    monkeypatch.setattr(bench_sharded, "ROWS", ((1, 2),))
    monkeypatch.setattr(bench_sharded, "MAX_SPIN", 4)
    return Mesh(jax.devices()[:2], bench_sharded.AXES)


def own_summand_only(u, axes, **given):
    return conv_mix(u, **given)


def half_of_the_first(u, axes, **given):
    """As if the first device had not written all of its summand before it was read."""
    first = lax.axis_index(axes) == 0
    return plain(jnp.where(first, u.at[..., 128:].set(0), u), axes=axes, **given)


def test_the_check_finds_nothing_wrong_with_the_plain_version(two_devices):
    [row] = bench_sharded.check(two_devices, 8, plain)
    assert row["correct"] and row["calls"] == 8 and row["relative_error"] < 1e-6


@pytest.mark.parametrize(("fused", "differ"), [(own_summand_only, 8), (half_of_the_first, 0)])
def test_the_check_counts_every_wrong_call(fused, differ, two_devices):
    [row] = bench_sharded.check(two_devices, 8, fused)
    assert not row["correct"]
    assert row["wrong"] == 8 and row["differ_between_devices"] == differ


def test_every_variant_gets_a_row(two_devices, monkeypatch):
    monkeypatch.setattr(bench_sharded, "time_case", lambda loop, carry, args, target: [
        jax.block_until_ready(loop(2, carry, *args)) and 8e-6
    ])  # fmt: skip
    runs = {"plain": plain, "alone": own_summand_only}
    rows = list(bench_sharded.latency(two_devices, runs))
    assert [(row["variant"], row["rows"], row["us"]) for row in rows] == [
        ("plain", 2, pytest.approx(1.0)),
        ("alone", 2, pytest.approx(1.0)),
    ]


def watched(program, patience=20.0, seconds=20.0):
    command = [sys.executable, "-c", program]
    return list(bench_sharded.watch(command, patience, time.monotonic() + seconds))


def test_a_process_that_hangs_is_killed_and_its_rows_are_kept():
    program = "import time\nprint('# hello')\nprint('{\"row\": 1}', flush=True)\ntime.sleep(60)"
    begin = time.monotonic()
    assert watched(program, patience=3.0) == [{"row": 1}, {"error": "killed: no result for 3 s"}]
    assert watched(program, seconds=0.0) == [{"skipped": "the time was up"}]
    assert time.monotonic() - begin < 30


def test_a_process_that_fails_is_reported():
    assert watched("print('{}')\nraise SystemExit(3)") == [
        {},
        {"error": "the process ended with 3"},
    ]


def test_without_two_gpus_it_says_so(tmp_path):
    out = tmp_path / "new" / "rows.json"
    arguments = ["--only", "check", "--out", str(out), "--commit", "none"]
    assert bench_sharded.main(arguments) == 0
    reason = "needs two GPUs in one process, 0 there"
    assert json.loads(out.read_text())["rows"] == [{"part": "check", "skipped": reason}]
