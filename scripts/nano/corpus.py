"""The text: documentation of an installed Python and of the packages that JAX needs.

One document per documentation topic or module. A document is held out by the hash of its name, so
the split does not depend on what else is installed.
"""

import ast
import concurrent.futures
import hashlib
import importlib
import importlib.util
import sysconfig
import textwrap
import warnings
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("numpy", "scipy", "jax", "flax", "optax")
HELD_OUT_PERCENT = 4
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "_vendor"}
_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Document(NamedTuple):
    """A named text; `name` starts with "stdlib." or the package."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def build() -> list[Document]:
    """Collects all documents, in the order of their names."""
    roots = {"stdlib": Path(sysconfig.get_paths()["stdlib"])}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"corpus: package {package} is not installed")
        roots[package] = Path(spec.submodule_search_locations[0])
    files = [
        (name, root, file)
        for name, root in roots.items()
        for file in sorted(root.rglob("*.py"))
        if not _LEFT_OUT & set(file.relative_to(root).parts)
    ]
    with concurrent.futures.ProcessPoolExecutor() as pool:
        texts = list(pool.map(_docstrings, files, chunksize=32))
    documents = [*_topics(), *(d for d in texts if len(d.text) > 200)]
    return sorted({d.text: d for d in documents}.values())


def digest(documents: list[Document]) -> str:
    """Returns the SHA-256 of all names and texts."""
    total = hashlib.sha256()
    for document in documents:
        total.update(f"{document.name}\0{document.text}\0".encode())
    return total.hexdigest()


def _topics() -> list[Document]:
    """The language reference as `help()` shows it."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return [Document(f"stdlib.topics.{k}", text.strip() + "\n") for k, text in topics.items()]


def _docstrings(source: tuple[str, Path, Path]) -> Document:
    """All docstrings of a module, each under the signature of what it describes."""
    package, root, file = source
    parts = file.relative_to(root).with_suffix("").parts
    name = ".".join((package, *(p for p in parts if p != "__init__")))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return Document(name, "")
    module = name.removeprefix("stdlib.")
    sections = [f"{module}\n\n{doc}"] if (doc := ast.get_docstring(tree)) else []
    _collect(tree, "", sections)
    text = "\n\n".join(sections) + "\n"
    return Document(name, text.encode("utf-8", "replace").decode())


def _collect(node: ast.AST, prefix: str, sections: list[str]) -> None:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _NAMED):
            continue
        name = f"{prefix}{child.name}"
        if doc := ast.get_docstring(child):
            head = f"class {name}" if isinstance(child, ast.ClassDef) else _signature(name, child)
            sections.append(f"{head}\n{textwrap.indent(doc, '    ')}")
        _collect(child, f"{name}.", sections)


def _signature(name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = ast.unparse(function.args)
    return f"{name}({arguments})" if len(arguments) <= 80 else f"{name}(...)"
