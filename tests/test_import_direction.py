"""Imports point one way (CONTRIBUTING.md, "Map of the code"), read from the syntax trees."""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
REFERENCE = {"torch", "transformers"}  # the other implementation, for comparisons only
PACKAGES = {"inkling_jax", "pallas_kernels", "sharding", "checkpoints"}

# What each package may import besides itself and the standard library; None: any third party.
THIRD_PARTY = {
    "pallas_kernels": {"jax", "jaxlib", "jax_triton", "jaxtyping", "numpy"},
    "sharding": {"jax", "jaxtyping", "numpy"},
    "checkpoints": None,
    "inkling_jax": None,
}
OURS = {
    "pallas_kernels": (),
    "sharding": (),
    "checkpoints": ("inkling_jax.errors",),
    "inkling_jax": ("pallas_kernels", "sharding", "checkpoints"),
}
# Inside inkling_jax a module imports only from rows above its own. The row `__init__` stands for
# the public names, which the package fetches lazily from the rows above.
ROWS = (
    {"errors"},
    {"config_fields"},
    {"config"},
    {"sampling_params", "drafter_config", "messages", "streaming"},
    {"quant", "cache", "memory", "widths", "images", "text"},
    {"kernel_choice", "reply", "prompts"},
    {"ops"},
    {"layers", "sampling"},
    {"short_conv"},
    {"residual"},
    {"attention", "moe", "vision", "draft_layers"},
    {"decoder_layer"},
    {"model", "drafter"},
    {"generation"},
    {"proposing"},
    {"speculative"},
    {"decoding"},
    {"outputs"},
    {"reading"},
    {"hub", "settings"},
    {"loading"},
    {"load_drafter", "inspection"},
    {"planning"},
    {"drafting"},
    {"engine"},
    {"opening"},
    {"__init__"},
    {"commands"},
    {"cli"},
)


def imported(source: str, package: str) -> set[str]:
    """Returns the dotted names that a module of `package` imports, anywhere in its source."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                above = package.split(".")[: len(package.split(".")) + 1 - node.level]
                base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
                names |= {f"{base}.{alias.name}" for alias in node.names}
            case ast.Call(
                func=ast.Name("__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(name)), *_],
            ):
                names.add(name)
    return names


def violations(path: str, source: str) -> list[str]:
    """Returns a sentence for each import in `source`, the file at `path`, in a wrong direction."""
    parts = pathlib.PurePosixPath(path).with_suffix("").parts
    package, found = parts[0], []
    for name in sorted(imported(source, ".".join(parts[:-1]))):
        top = name.partition(".")[0]
        if top in REFERENCE:
            if package != "scripts" and not path.startswith("tests/test_parity"):
                found.append(f"{path} imports {name}, only scripts and parity tests may")
        elif package not in PACKAGES or top in sys.stdlib_module_names:
            continue
        elif top == package:
            if package == "inkling_jax" and not _may_see(parts, name):
                found.append(f"{path} imports {name}, which is not in a row above its own")
        elif top in PACKAGES or top in ("scripts", "tests"):
            if not any(name == ok or name.startswith(f"{ok}.") for ok in OURS[package]):
                found.append(f"{path} imports {name}, {package} may not")
        elif (allowed := THIRD_PARTY[package]) is not None and top not in allowed:
            found.append(f"{path} imports {name}, {package} may import {sorted(allowed)}")
    return found


def _may_see(parts: tuple[str, ...], name: str) -> bool:
    """Tells whether the module at `parts` of inkling_jax may import `name` of inkling_jax."""
    other = name.split(".")[1] if "." in name else "__init__"
    is_module = any(other in row for row in ROWS) or (ROOT / f"inkling_jax/{other}.py").exists()
    return other == parts[1] or _row(other if is_module else "__init__") < _row(parts[1])


def _row(module: str) -> int:
    row = next((i for i, row in enumerate(ROWS) if module in row), None)
    assert row is not None, f"inkling_jax/{module}.py has no row in {__file__}"
    return row


def test_the_map_names_every_module():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    mapped = {name for row in ROWS for name in row} - {"__init__"}
    assert not {name for name in mapped if f"`{name}`" not in text}


def test_sources_keep_the_direction():
    files = [f for p in (*PACKAGES, "scripts", "tests") for f in (ROOT / p).rglob("*.py")]
    assert len(files) > 5
    found = [
        sentence
        for file in files
        for sentence in violations(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pallas_kernels/router/kernel.py", "import flax"),
        ("pallas_kernels/common.py", "from inkling_jax.config import Config"),
        ("sharding/mesh.py", "import checkpoints.convert"),
        ("checkpoints/convert.py", "from inkling_jax import model"),
        ("checkpoints/convert.py", "def f():\n    import inkling_jax.model"),
        ("inkling_jax/layers.py", "from inkling_jax.model import Model"),
        ("inkling_jax/layers.py", "from .model import Model"),
        ("inkling_jax/layers.py", "from . import attention"),
        ("inkling_jax/commands/demo.py", "from .. import cli"),
        ("inkling_jax/ops.py", "import inkling_jax as ij"),
        ("inkling_jax/ops.py", "from inkling_jax import Model"),
        ("inkling_jax/widths.py", "import inkling_jax.cache"),
        ("inkling_jax/ops.py", "import importlib\nimportlib.import_module('torch')"),
        ("inkling_jax/load.py", "import scripts.train_nano"),
        ("tests/test_model.py", "import transformers"),
    ],
)
def test_wrong_directions_are_caught(path, source):
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pallas_kernels/router/__init__.py", "from . import kernel\nimport jax.numpy, math"),
        ("checkpoints/convert.py", "from inkling_jax.errors import InputError\nimport orbax"),
        ("inkling_jax/attention.py", "from inkling_jax import layers, ops\nimport flax"),
        ("inkling_jax/__init__.py", "from inkling_jax.engine import Engine"),
        ("inkling_jax/commands/demo.py", "import inkling_jax as ij"),
        ("scripts/compare_reference.py", "import torch"),
        ("tests/test_parity_moe.py", "import transformers"),
    ],
)
def test_right_directions_pass(path, source):
    assert not violations(path, source)
