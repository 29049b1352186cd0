"""The public names of inkling_jax are fetched lazily, and are the same for people and checkers."""

import ast
import pathlib
import subprocess
import sys

import pytest

import inkling_jax as ij


def test_every_public_name_resolves():
    assert ij.__all__ == sorted(ij._HOME)
    for name in ij.__all__:
        assert getattr(ij, name).__module__ == f"inkling_jax.{ij._HOME[name]}"


def test_type_checkers_see_the_same_names():
    tree = ast.parse(pathlib.Path(ij.__file__).read_text("utf-8"))
    declared = {
        alias.name: node.module.removeprefix("inkling_jax.")
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert declared == ij._HOME


def test_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="modell"):
        ij.modell  # noqa: B018


def test_importing_the_package_does_not_import_jax():
    code = "import sys, inkling_jax, inkling_jax.cli; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
