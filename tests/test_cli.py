"""The command line: exit codes, one sentence for a mistake, JSON alone on standard output."""

import errno
import json
import os
import subprocess
import sys

import jax
import pytest

import inkling_jax
from inkling_jax import cli
from inkling_jax.commands import env


def fails(capsys, *arguments, code=2):
    """Runs the command line, which must fail with one sentence on stderr; returns the sentence."""
    assert cli.main(list(arguments)) == code
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("inkling-jax: ") and err.count("\n") == 1
    return err


def test_version_needs_no_jax():
    code = "import sys; from inkling_jax.cli import main; main(['--version'])"
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True
    )
    assert run.returncode == 0 and run.stdout.strip() == inkling_jax.__version__
    assert not any(line.rpartition("|")[2].strip() == "jax" for line in run.stderr.splitlines())


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help_and_the_common_flags(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert all(flag in out for flag in ("--json", "--verbose", "--profile"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "COMMAND"),
        (["frobnicate"], "frobnicate"),
        (["env", "--frobnicate"], "--frobnicate; `inkling-jax env --help`"),
        (["env", "--js"], "--js"),
        (["env", "--profile", __file__], f"--profile: {__file__!r} cannot be made"),
        (["env", "--profile", ""], "--profile: ''"),
        (["env", "--profile", "a/" * 3000], "--profile: 'a/a/"),
        (["demo", "--out", ""], "--out is empty"),
    ],
)
def test_wrong_words_are_named(capsys, arguments, named):
    assert named in fails(capsys, *arguments)


def test_env_reports_devices_as_json(capsys):
    assert cli.main(["env", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["packages"]["jax"] and result["backend"] == "cpu"
    assert len(result["devices"]) == 8


def test_env_advises_where_a_gpu_lies_idle(monkeypatch, tmp_path, capsys):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(env, "_NVIDIA_DEVICES", (str(tmp_path / "nvidia0"),))
    monkeypatch.setenv("JAX_PLATFORMS", "")
    assert cli.main(["env"]) == 0
    assert "pip install 'inkling-jax[cuda]'" in capsys.readouterr().out


def test_a_gpu_host_without_cuda_gets_one_warning():
    code = (
        "from jax._src import hardware_utils as h; h.has_visible_nvidia_gpu = lambda: True;"
        "from inkling_jax.cli import main; main(['env'])"
    )
    command = [sys.executable, "-c", code]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.stderr.count("\n") == 1 and "NVIDIA GPU" in run.stderr


def test_a_platform_that_jax_does_not_have_is_a_mistake():
    command = [sys.executable, "-m", "inkling_jax.cli", "env"]
    environment = os.environ | {"JAX_PLATFORMS": "abacus"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 2 and run.stderr.count("\n") == 1
    assert "JAX_PLATFORMS is 'abacus', and JAX has no such device here" in run.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "out.npy"), 2, "out.npy: No space left"),
        (OSError(errno.EIO, "Input/output error"), 1, "Input/output error"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), 2, "not text in UTF-8"),
        (RuntimeError("boom"), 1, "RuntimeError: boom"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_exit_codes(monkeypatch, capsys, error, code, said):
    def run(args):
        raise error

    monkeypatch.setattr(env, "run", run)
    assert said in fails(capsys, "env", code=code)


def test_an_interrupt_while_jax_compares_trees_is_an_interrupt(monkeypatch, capsys):
    @jax.tree_util.register_static
    class Interrupted:
        def __hash__(self):
            return 0

        def __eq__(self, _):
            raise KeyboardInterrupt

    function = jax.jit(lambda tree: 0)
    function(Interrupted())
    monkeypatch.setattr(env, "run", lambda args: function(Interrupted()))
    assert "interrupted" in fails(capsys, "env", code=130)


def test_closed_streams_are_empty(monkeypatch):
    read = []
    monkeypatch.setattr(env, "run", lambda args: read.append(sys.stdin.read()) or {})
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, None)
    assert cli.main(["env", "--json"]) == 0 and read == [""]


def test_profile_is_written(tmp_path, capsys):
    assert cli.main(["env", "--json", "--profile", str(tmp_path / "profile")]) == 0
    json.loads(capsys.readouterr().out)
    assert any((tmp_path / "profile").rglob("*.pb"))
