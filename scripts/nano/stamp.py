"""What a committed result says about where it was measured."""

import datetime
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax")


def stamp(checkpoint: Path) -> dict[str, Any]:
    """Returns device, versions, commit, date and the digest of a checkpoint's shards."""
    return {
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "commit": os.environ.get("COMMIT") or _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "checkpoint_sha256": _digest(checkpoint),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Returns the checkout's commit; a copy without .git is told it by $COMMIT."""
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return git.stdout.strip() or None


def _digest(checkpoint: Path) -> str:
    total = hashlib.sha256()
    for shard in sorted(checkpoint.glob("*.safetensors")):
        total.update(shard.read_bytes())
    return total.hexdigest()
