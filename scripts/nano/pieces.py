"""What a training in pieces that resume from each other keeps: its state and its log."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def save(file: Path, state: Any, progress: dict[str, Any]) -> None:
    """Writes a tree of arrays so that a kill at any moment leaves the old or the new one."""
    arrays = {f"a{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
    with file.with_suffix(".tmp").open("wb") as f:
        np.savez(f, progress=json.dumps(progress), **arrays)
    file.with_suffix(".tmp").replace(file)


def restore[T](file: Path, like: T) -> tuple[T, dict[str, Any]]:
    """Reads what `save` wrote."""
    with np.load(file) as saved:
        leaves, tree = jax.tree.flatten(like)
        arrays = [jnp.asarray(saved[f"a{i}"]) for i in range(len(leaves))]
        return jax.tree.unflatten(tree, arrays), json.loads(str(saved["progress"]))


def open_log(file: Path, began: float) -> Callable[..., None]:
    """Returns what adds its fields as a line to a file, and prints it, with the seconds since."""
    lines = file.open("a")

    def log(**fields: Any) -> None:
        line = json.dumps({"at": round(time.monotonic() - began, 1), **fields})
        print(line, flush=True)
        lines.write(line + "\n")
        lines.flush()

    return log
