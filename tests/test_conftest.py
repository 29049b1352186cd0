"""The rules that conftest.py sets for all other tests are in force."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from inkling_jax.cache import write


def test_there_are_eight_cpu_devices():
    assert len(jax.devices("cpu")) == 8


def test_mixed_dtypes_are_refused():
    with pytest.raises(jax.dtypes.TypePromotionError):
        jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.bfloat16)


def test_our_functions_check_their_shapes():
    with pytest.raises(jaxtyping.TypeCheckError):
        write(jnp.ones((1, 4)), jnp.ones((2, 4)), jnp.array([0]), jnp.array([4]))


def test_shapes_are_checked_but_not_those_of_rebuilt_dataclasses(tmp_path, monkeypatch):
    (tmp_path / "shaped.py").write_text(
        "import dataclasses, jax\n"
        "from jaxtyping import Array, Float\n"
        "@jax.tree_util.register_dataclass\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Pair:\n"
        "  a: Float[Array, '2']\n"
        "def add(x: Float[Array, 'N'], y: Float[Array, 'N'] | None) -> Float[Array, 'N']:\n"
        "  return x + y\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with jaxtyping.install_import_hook("shaped", "shape_checks.check"):
        import shaped  # pyright: ignore[reportMissingImports]
    assert shaped.add(jnp.ones(2), jnp.ones(2)).sum() == 4
    with pytest.raises(jaxtyping.TypeCheckError):
        shaped.add(jnp.ones(2), jnp.ones(3))
    names = jax.tree.map(str, shaped.Pair(jnp.ones(2)))
    assert isinstance(names.a, str)


def test_summary_counts_the_run(tmp_path):
    here = pathlib.Path(__file__).parent
    counted = (
        "\ncount = run_summary\n"
        "def run_summary(stats):\n"
        "  open('writers', 'a').write('one, ')\n"
        "  return count(stats)\n"
    )
    (tmp_path / "conftest.py").write_text((here / "conftest.py").read_text() + counted)
    (tmp_path / "shape_checks.py").write_text((here / "shape_checks.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: x\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.gpu\n"
        "def test_gpu(): assert False\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n1", "--summary", "new/out.json"]
    environment = {**os.environ, "COMMIT": "abc"}
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, env=environment)
    assert run.returncode == 1
    assert (tmp_path / "writers").read_text() == "one, "  # and not every worker of xdist its own
    summary = json.loads((tmp_path / "new/out.json").read_text())
    counts = [summary[name] for name in ("run", "passed", "skipped", "failed")]
    assert counts == [2, 1, 1, 1]
    assert (summary["device"], summary["commit"]) == ("cpu", "abc")
