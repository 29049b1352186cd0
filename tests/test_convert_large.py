"""Conversion of a 2 GB checkpoint: host memory, kills at random moments.

Its speed beside a copy is measured by scripts/measure_conversion.py.
"""

import dataclasses
import filecmp
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers_checkpoints import TEXT, VISION, config_json, published
from test_convert import kill_when, start

from checkpoints.safetensors_writer import write_published
from inkling_jax.config import Config

LARGE = Config(
    dataclasses.replace(
        TEXT,
        vocab_size=32768,
        unpadded_vocab_size=32000,
        hidden_size=1024,
        num_hidden_layers=14,
        layer_types=(),
        n_routed_experts=64,
        moe_intermediate_size=1024,
    ),
    dataclasses.replace(VISION, text_hidden_size=1024),
    image_token_id=60,
)
SHARD = 300 << 20

# Converts, and says how long it took and by how much the process grew meanwhile.
MEASURE = """
import json, sys, threading, time
from pathlib import Path
from inkling_jax.loading import convert

def resident():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])

def watch():
    while not done.wait(0.005):
        peak[0] = max(peak[0], resident())

convert(sys.argv[1], sys.argv[2], dry_run=True, progress=False)  # imports are not conversion
before, done, peak = resident(), threading.Event(), [0]
watcher = threading.Thread(target=watch)
watcher.start()
began = time.perf_counter()
convert(sys.argv[1], sys.argv[2], progress=False)
took = time.perf_counter() - began
done.set()
watcher.join()
print(json.dumps({"seconds": took, "extra": peak[0] - before}))
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]


def make_large(directory):
    """Writes a checkpoint of over 2 GB in several shards."""
    formats = ("nvfp4",) * 9 + ("mxfp8",) * 5
    write_published(directory, published(LARGE, formats), config_json(LARGE), SHARD)
    assert sum(file.stat().st_size for file in directory.iterdir()) > 2 * 10**9


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    directory = tmp_path_factory.mktemp("large")
    make_large(directory)
    yield directory
    shutil.rmtree(directory)


def measure(source, target):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, source, target],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(run.stdout)


def test_memory(large, tmp_path):
    largest = max(file.stat().st_size for file in large.glob("*.safetensors"))
    assert measure(large, tmp_path / "model")["extra"] <= 1.5 * largest


def test_ten_kills_at_random_moments(large, tmp_path):
    target, whole, moment = tmp_path / "model", tmp_path / "whole", random.Random(7)
    began = time.monotonic()
    start(large, whole).communicate()
    total, kills, finished = time.monotonic() - began, 0, 0
    while kills < 10:
        end = time.monotonic() + moment.uniform(0.2, 1.0) * total
        killed = kill_when(start(large, target), lambda end=end: time.monotonic() > end)
        kills += killed
        if target.exists():  # the kill came too late, or just after the rename
            finished += 1
            assert same_files(target, whole)
            shutil.rmtree(target)
    print(f"{kills} kills, {finished} conversions had finished before")
    process = start(large, target)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert same_files(target, whole)


def same_files(one, other):
    names = [
        {file.relative_to(top) for file in top.rglob("*") if file.is_file()} for top in (one, other)
    ]
    return names[0] == names[1] and all(
        filecmp.cmp(one / name, other / name, shallow=False) for name in names[0]
    )
