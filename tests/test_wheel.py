"""The wheel holds exactly the four packages with the shipped model, and works where it is put."""

import json
import pathlib
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("inkling_jax", "pallas_kernels", "sharding", "checkpoints")
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Builds from a copy, so that no build leftovers of this tree get in or stay behind."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tree)
    for name in ("scripts", "tests"):  # what must stay out
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", out, tree]
    subprocess.run(command, check=True)
    return next(out.glob("*.whl"))


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        file.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for file in (ROOT / name).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert held == wanted


def test_installed_elsewhere_the_demo_runs(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    binaries = tmp_path / "env" / "bin"
    constraints = ROOT / "constraints.txt"
    command = [binaries / "python", "-m", "pip", "install", "--quiet", "-c", constraints, wheel]
    subprocess.run(command, check=True)

    def inkling_jax(*arguments):
        run = subprocess.run(
            [binaries / "inkling-jax", *arguments], cwd=tmp_path, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    assert inkling_jax("--version").strip() in wheel.name
    answers = json.loads(inkling_jax("demo", "--json"))
    assert answers["text"]["text"] and answers["picture"]["text"]
