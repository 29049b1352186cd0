"""Processes that work as one: they meet, agree, and fail together."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sharding.hosts import join_hosts
from sharding.mesh import MeshError

ROOT = Path(__file__).parent.parent
SMALL = ROOT / "tests/fixtures/small"
DIFFER = "the processes were given different meshes"
SPLIT_TOKENS = "dp=1,cp=1,ep=1,tp=2,sp=on"
AGREE = """
import sys
from sharding.hosts import agree_on, join_hosts, together
from sharding.mesh import MeshConfig
join_hosts(60)
try:
    with together("reading"):
        if sys.argv[1] == "absent":
            raise OSError("no such file")
    agree_on(MeshConfig.parse(sys.argv[1]))
except (OSError, ValueError) as e:
    print(e)
"""
ANSWER = """
import sys
from safetensors.numpy import load_file
import inkling_jax as ij
model = ij.load(sys.argv[1] + "/checkpoint", mesh="tp=2", context=64)
expected = load_file(sys.argv[1] + "/expected.safetensors")
greedy = ij.SamplingParams(temperature=0.0, max_tokens=len(expected["greedy.tokens"]))
prompt, tokens = (expected["greedy." + name].tolist() for name in ("prompt", "tokens"))
print(model.generate([prompt], greedy)[0].token_ids == tokens)
"""
COMMAND = """
import sys
from inkling_jax.cli import main
sys.exit(main(sys.argv[1].split()))
"""
LOAD = """
import sys
import inkling_jax as ij
directory, mesh = sys.argv[1].split()
try:
    ij.load(directory, mesh=mesh)
except ij.InputError as e:
    print(e)
"""


def free_address():
    with socket.create_server(("localhost", 0)) as server:
        return f"localhost:{server.getsockname()[1]}"


def run_two(code, *arguments):
    """Runs code in two processes of one device each, and returns the lines that each prints."""
    settings = {
        "JAX_COORDINATOR_ADDRESS": free_address(),
        "JAX_NUM_PROCESSES": "2",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, argument],
            env={**os.environ, **settings, "JAX_PROCESS_ID": str(index)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for index, argument in enumerate(arguments)
    ]
    return [process.communicate(timeout=200)[0].splitlines() for process in processes]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("tp=2,sp=on", "cp=2"), [f"{DIFFER}: {SPLIT_TOKENS}; dp=1,cp=2,ep=1,tp=1,sp=auto"] * 2),
        (("absent", "tp=2"), ["no such file", "reading failed in processes [0]"]),
    ],
)
def test_processes_that_differ_stop_together(arguments, says):
    for printed, sentence in zip(run_two(AGREE, *arguments), says, strict=True):
        assert printed[-1].startswith(sentence)


@pytest.mark.long
def test_two_processes_give_the_text_of_one():
    assert [printed[-1] for printed in run_two(ANSWER, str(SMALL), str(SMALL))] == ["True"] * 2


@pytest.mark.long
def test_the_first_process_alone_prints_the_result(tmp_path):
    (tmp_path / "tokens.json").write_text("[5, 6, 7, 8]")
    command = f"score --json --mesh tp=2 --model {SMALL}/checkpoint --tokens {tmp_path}/tokens.json"
    [result], nothing = run_two(COMMAND, command, command)
    assert len(json.loads(result)["logprobs"]) == 3
    assert not nothing


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "mesh", "says"),
    [
        ("small", "tp=4", "needs 4 devices, 2 are there"),
        ("packed", "tp=2", "tp=2; tp can be 1"),
    ],
)
def test_two_processes_refuse_a_mesh_alike(case, mesh, says):
    for printed in run_two(LOAD, *[f"{ROOT}/tests/fixtures/{case}/checkpoint {mesh}"] * 2):
        assert says in printed[-1]


@pytest.mark.long
def test_a_file_that_one_process_lacks_stops_both(tmp_path):
    lacking = shutil.copytree(SMALL / "checkpoint", tmp_path / "checkpoint")
    (lacking / "model.safetensors").unlink()
    found = run_two(LOAD, f"{SMALL}/checkpoint tp=2", f"{lacking} tp=2")
    assert found[0][-1].startswith("loading failed in processes [1]")
    assert "model.safetensors" in found[1][-1]


@pytest.mark.parametrize(
    ("count", "index", "says"),
    [
        ("2", "0", r"process 0 of 2 did not meet \[1\] at localhost:\d+ in time"),
        ("2", "1", r"process 1 of 2 did not meet \[0\]"),
        ("2", "2", "they are '2' and '2'"),
        ("", "0", "JAX_NUM_PROCESSES must be the number of processes"),
    ],
)
def test_a_process_alone_does_not_wait_for_ever(monkeypatch, count, index, says):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", free_address())
    monkeypatch.setenv("JAX_NUM_PROCESSES", count)
    monkeypatch.setenv("JAX_PROCESS_ID", index)
    with pytest.raises(MeshError, match=says):
        join_hosts(1)


@pytest.mark.parametrize("name", ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID"])
def test_processes_without_an_address_are_refused(monkeypatch, name):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    monkeypatch.setenv(name, "1")
    with pytest.raises(MeshError, match="JAX_COORDINATOR_ADDRESS must be host:port"):
        join_hosts(1)
