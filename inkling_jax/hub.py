"""Finds a model by the name that a user gives: a directory, or a repository on the hub."""

import os
import re
from pathlib import Path

from checkpoints.convert import COPIED, DRAFTERS
from checkpoints.safetensors_reader import INDEX, SINGLE, parse_json
from inkling_jax.errors import InputError


def resolve(model: str | Path, revision: str | None = None) -> Path:
    """Returns the directory of a model, fetched from the hub where the name is not a directory.

    Args:
      model: directory, published or converted, or hub id such as "org/name".
      revision: branch, tag or commit of a hub id.

    Raises:
      InputError: there is neither such a directory nor such a model or revision.
    """
    if not isinstance(model, str | Path) or not str(model):
        raise InputError(f"the model is {model!r:.40}, it must be a directory or a hub id")
    if not isinstance(revision, str | None):
        raise InputError(f"revision is {revision!r:.40}, it must be a branch, tag or commit")
    if os.path.isdir(model):  # which takes names that are none for the system
        if revision is not None:
            raise InputError(f"{model}: is a directory here, it has no revision {revision!r}")
        return Path(model)
    if os.path.exists(model):
        raise InputError(f"{model}: is a file, give the directory that holds config.json")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(model)):
        raise InputError(f"{str(model)!r:.120}: is neither a directory nor a hub id (org/name)")
    return _fetch(str(model), revision)


def _fetch(repo: str, revision: str | None) -> Path:
    """Downloads what a model consists of; other files of the repository stay there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]
    )

    try:
        first = [*COPIED, *(f"{folder}/*" for folder in DRAFTERS), INDEX]
        directory = Path(snapshot_download(repo, revision=revision, allow_patterns=first))
        shards = {SINGLE}
        if (directory / INDEX).exists():
            index = parse_json((directory / INDEX).read_bytes(), directory / INDEX)
            shards = set(index.get("weight_map", {}).values())
        # By commit, so that a branch that moves meanwhile cannot mix two versions.
        snapshot_download(repo, revision=directory.name, allow_patterns=sorted(shards))
    except (OSError, HTTPError, HFValidationError) as e:
        at = f" at revision {revision}" if revision else ""
        reason = str(e).splitlines()[0].rstrip(".:")
        raise InputError(
            f"{repo}: is no directory here, and cannot be fetched from the hub{at} ({reason})"
        ) from e
    return directory
