"""The README's Python examples run as they stand there, with the shipped model."""

import pathlib
import re

import pytest

from inkling_jax import cli
from inkling_jax.commands import demo

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.long
def test_examples_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    demo.draw(tmp_path / "picture.png")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["convert", "checkpoints/inkling-jax-nano", "DST", "--json"]) == 0
    capsys.readouterr()

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    source = "\n".join(blocks).replace("/absolute/path/of/DST", str(tmp_path / "DST"))
    names = {}
    exec(compile(source, "README.md", "exec"), names)
    assert names["new"].ids.shape == (2, 16)
    assert names["seen"].text in capsys.readouterr().out
