"""The kernel benchmark from end to end, interpreted at toy sizes."""

import dataclasses
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ptx_emulator
import pytest
from helpers import interpret_mosaic
from test_kernel_rel_attention_prefill import interpreted_prefill

from pallas_kernels.conv_mix import kernel as mixing
from pallas_kernels.moe_experts import kernel_sm90
from scripts import bench_kernels, kernel_cases
from scripts.kernel_cases import (
    Case,
    attention,
    attention_prefill,
    conv_mix,
    draft_attention,
    limits,
    moe_experts,
    projections,
    qkv_prep,
    router,
    sampling,
)
from scripts.kernel_cases.case import all_of

TOY = {
    limits: {"FLOATS": 1 << 10, "SIDE": 32},
    moe_experts: {"HIDDEN": 64, "WIDTH": 32, "WIDTH_TP4": 16, "PICKS": 2, "EXPERTS": 16},
    attention: {
        **{"CONTEXTS": (40, 70, 90), "WINDOW": 16, "EXTENT": 16},
        **{"HEADS": 6, "KV_HEADS": 1, "DIM": 64},
    },
    attention_prefill: {
        **{"SLIDING": 130, "FULL": (136,), "CONTINUED": (9, None, 127), "PART": 16},
        **{"WINDOW": 128, "EXTENT": 24, "HEADS": 2, "KV_HEADS": 1, "DIM": 64},
    },
    conv_mix: {"HIDDEN": 256, "BLOCKS": 2, "LONG": 20},
    projections: {
        **{"HIDDEN": 512, "SLIDING": (128, 8, 64), "RANK": (64, 2), "FULL": (64, 8, 4)},
        **{"WO": (128, 1024), "HEAD_ROWS": 192},
    },
    qkv_prep: {"HEADS": 6, "KV_HEADS": 2, "DIM": 8, "RANKS": 4, "SLOTS": 16, "LONG": 20},
    router: {"HIDDEN": 512, "EXPERTS": 24},
    sampling: {"VOCABULARY": 9000},
    draft_attention: {"HEADS": 4, "KV_HEADS": 2, "DIM": 32, "LAYERS": 2, "CONTEXTS": (70, 90)},
}


def is_bfloat16(x):
    return isinstance(x, jax.Array) and x.dtype == jnp.bfloat16


def bench(out, *arguments):
    """The exit code and the rows of a run."""
    code = bench_kernels.main(["--out", str(out), "--commit", "none", *arguments])
    return code, json.loads(out.read_text())["rows"]


@pytest.fixture
def interpreted(monkeypatch):
    for module, sizes in TOY.items():
        for name, value in sizes.items():
            monkeypatch.setattr(module, name, value)
        monkeypatch.setattr(module, "CALLS", 2, raising=False)
        monkeypatch.setattr(module, "ROTATE", 1, raising=False)
    ptx_emulator.interpreted(monkeypatch, kernel_sm90)
    interpret_mosaic(monkeypatch, mixing)
    interpreted_prefill(monkeypatch)
    plain = attention_prefill.attend  # XLA's CPU takes not all of its products in bfloat16
    monkeypatch.setattr(
        attention_prefill,
        "attend",
        lambda *args: plain(*(a.astype(jnp.float32) if is_bfloat16(a) else a for a in args)),
    )

    def two_trips(loop, carry, args, target):
        jax.block_until_ready(loop(jnp.int32(2), carry, *args))
        return [1e-6]

    monkeypatch.setattr(bench_kernels, "time_case", two_trips)
    monkeypatch.setattr(bench_kernels, "PATIENCE", 200)  # seconds, on cores that others use too


@pytest.mark.long
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "op",
    [
        *("moe_experts", "attention", "prefill", "conv_mix", "project", "qkv_prep", "router"),
        *("sampling", "draft_attention"),
    ],
)
def test_every_variant_runs_and_is_right(op, tmp_path, monkeypatch):
    variants = {(case.op, case.variant): case for case in kernel_cases.cases()}
    monkeypatch.setattr(kernel_cases, "cases", variants.values)
    code, rows = bench(tmp_path / "rows.json", "--only", op)
    ran = [row for row in rows if "not installed" not in row.get("skipped", "")]
    assert [row for row in ran if not row.get("correct", "xla" in row["variant"])] == []
    assert code == 0 and {row["op"] for row in rows} == {"limit", op}


def adding(number, expected=1.0, **fields):
    """A case that adds `number` to a vector and is told what it should have added."""
    case = Case(
        "add", str(number), "8", lambda i, x: x + number, lambda key: (jnp.ones(8), ()), 64,
        result=lambda x: x + number, expected=lambda x: x + expected, tolerance=1e-6,
    )  # fmt: skip
    return dataclasses.replace(case, **fields)


def test_nothing_that_a_timed_call_makes_is_left_out():
    """XLA once made one product of six, and no mix at all, for a step that looked at no more."""

    def step(x, weights):
        return x.at[0, 0].set(all_of(*(x @ w for w in weights)))

    x, weights = jnp.ones((8, 64)), [jnp.ones((64, 128)), jnp.ones((64, 96))]
    text = jax.jit(step).lower(x, weights).compile().as_text()
    products = [line for line in text.splitlines() if " dot(" in line]
    assert {w.shape[1] for w in weights} == {
        width for width in (96, 128) for line in products if f"f32[8,{width}]" in line
    }


def test_what_depends_on_shared_inputs_alone_is_made_in_each_call():
    case = Case(
        "square", "one", "64", lambda call, x, w: x + (w @ w)[0],
        lambda key: (jnp.ones(64), (jnp.ones((64, 64)),)), 1, calls=3,
    )  # fmt: skip
    assert bench_kernels.compile_loop(case).as_text().count(" dot(") == 3


def test_a_trip_makes_as_many_calls_as_its_time_is_divided_by():
    case = adding(1.0, calls=5)
    loop = bench_kernels.compile_loop(case)
    assert loop(jnp.int32(3), jnp.zeros(8)).tolist() == [15.0] * 8


def test_a_wrong_result_and_a_fault_are_marked_and_the_next_case_runs(tmp_path, monkeypatch):
    def fails(x):
        raise ValueError("no such shape")

    cases = [adding(2.0), adding(jnp.nan), adding(1.0, result=fails), adding(1.0)]
    monkeypatch.setattr(kernel_cases, "cases", lambda: cases)
    code, rows = bench(tmp_path / "new" / "rows.json", "--target", "0.0001")
    assert code == 1
    assert [row.get("correct") for row in rows] == [False, False, None, True]
    assert rows[2]["error"] == "ValueError: no such shape" and "us" in rows[3]


def test_a_case_that_does_not_compile_in_time_is_skipped(tmp_path, monkeypatch):
    over = threading.Event()

    def stuck(i, x):
        over.wait(60)
        return x

    cases = [adding(1.0, step=stuck), adding(1.0)]
    monkeypatch.setattr(kernel_cases, "cases", lambda: cases)
    monkeypatch.setattr(bench_kernels, "PATIENCE", 2)
    code, rows = bench(tmp_path / "rows.json", "--target", "0.0001")
    over.set()
    assert code == 0 and rows[0]["skipped"] == "the time was up" and rows[1]["correct"]


def test_the_process_ends_in_time_though_the_interpreter_is_held(tmp_path):
    """A call that keeps the interpreter lock, as native code may, past the end of the time."""
    program = """
import ctypes, pathlib, sys
from scripts import time_limit

time_limit.GRACE = 0.5
with time_limit.limited(1e-3):
    time_limit.write_json(pathlib.Path(sys.argv[1]), {"rows": 1})
    ctypes.PyDLL(None).sleep(60)
"""
    out, begin = tmp_path / "new" / "rows.json", time.monotonic()
    command = [sys.executable, "-c", program, out]
    run = subprocess.run(command, cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, text=True)
    assert time.monotonic() - begin < 30 and run.returncode == 1
    assert "Timeout" in run.stderr and json.loads(out.read_text()) == {"rows": 1}


def test_nothing_starts_when_the_time_is_up(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cases, "cases", lambda: [adding(1.0)])
    code, rows = bench(tmp_path / "rows.json", "--minutes", "0")
    assert code == 0 and rows[0]["skipped"] == "the time was up"
