"""Streams a published checkpoint to an Orbax checkpoint, resumably and in bounded memory.

Everything is written to TARGET.partial, which becomes TARGET by one rename when it is complete. An
interrupted conversion goes on where it stopped when it is started again.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from checkpoints.key_map import Plan, ShapeDtype, make_plan
from checkpoints.orbax_store import (
    array_name,
    describe_array,
    is_intact,
    write_array,
    write_tree,
    write_whole,
)
from checkpoints.safetensors_reader import TensorInfo, parse_json, read_index
from checkpoints.transforms import Leaf
from checkpoints.transforms import Path as LeafPath
from inkling_jax.errors import InputError

MANIFEST, PARAMS = "manifest.json", "params"

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "processor_config.json",
    "README.md",
    "LICENSE",
)
DRAFTERS = ("drafter", "dspark")  # folders, copied as well


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What a conversion did, or would do.

    Attributes:
      arrays, nbytes: of the parameter tree.
      kept: arrays that an earlier, interrupted run had finished.
      ignored: published tensors that were left out, and why.
    """

    arrays: int
    nbytes: int
    kept: int
    ignored: Mapping[str, str]


def is_converted(directory: Path) -> bool:
    """Tells whether a conversion made this directory and finished it."""
    return (directory / MANIFEST).is_file() and (directory / PARAMS).is_dir()


def convert(
    source: Path,
    target: Path,
    expected: Mapping[LeafPath, ShapeDtype],
    dry_run: bool = False,
    progress: bool = True,
) -> Conversion:
    """Converts a published checkpoint; dtypes stay as published, float32 islands are float32.

    Args:
      source: directory in the published layout.
      target: becomes a directory with the Orbax checkpoint `params`, `manifest.json` (digest and
        origin of every array) and the source's configuration, text files and drafter.
      expected: shape and dtype of every parameter, as `make_plan` takes them.
      dry_run: checks everything that can be checked without reading the tensors, writes nothing.
      progress: shows a bar with rate and time left on stderr.

    Raises:
      InputError: the source is faulty, the target exists, another process writes it, or the disk
        is full. What was written so far is kept for the next run.
    """
    if is_converted(source):
        raise InputError(f"{source}: is a converted checkpoint already, load it as it is")
    index = read_index(source)
    plan = make_plan(index, expected, where=str(source))
    identity = _identity(source, index, plan)
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        if is_converted(target) and _identity_of(target / MANIFEST) == identity:
            return Conversion(len(plan.leaves), plan.nbytes, len(plan.leaves), plan.ignored)
        raise InputError(f"{target}: exists already, remove it or choose another name")
    partial = target.with_name(target.name + ".partial")
    _check_space(source, partial, plan)
    if dry_run:
        return Conversion(len(plan.leaves), plan.nbytes, 0, plan.ignored)
    try:
        with _locked(partial):
            _claim(partial, identity)
            kept = _write_arrays(partial / PARAMS, plan, progress)
            _write_manifest(source, partial, plan, identity)
            partial.rename(target)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise InputError(
                f"{target}: {e.strerror}; make room and run the same command again, it goes on "
                "where it stopped"
            ) from e
        raise InputError(f"{e.filename or target}: {e.strerror}") from e
    return Conversion(len(plan.leaves), plan.nbytes, kept, plan.ignored)


def _identity(source: Path, index: Mapping[str, TensorInfo], plan: Plan) -> str:
    """Digest of all that a conversion depends on; times stand in for the tensors' contents."""
    stated = (
        sorted((file.name, _stamp(file)) for file in {info.file for info in index.values()}),
        sorted((name, i.file.name, i.dtype, i.shape, i.start) for name, i in index.items()),
        sorted((array_name(leaf.path), leaf.shape, leaf.dtype.name) for leaf in plan.leaves),
        [(str(file.relative_to(source)), _stamp(file)) for file in _copied(source)],
    )
    return hashlib.sha256(repr(stated).encode()).hexdigest()


def _stamp(file: Path) -> tuple[int, int] | str:
    if file.suffix == ".safetensors":
        return file.stat().st_size, file.stat().st_mtime_ns
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _copied(source: Path) -> list[Path]:
    """The files that a conversion copies as they are."""
    drafters = (file for name in DRAFTERS for file in (source / name).rglob("*"))
    texts = (source / name for name in COPIED)
    return sorted(file for file in (*texts, *drafters) if file.is_file())


def _identity_of(file: Path) -> str | None:
    return parse_json(file.read_bytes(), file).get("source")


def _check_space(source: Path, partial: Path, plan: Plan) -> None:
    copied = sum(file.stat().st_size for file in _copied(source))
    present = sum(f.stat().st_size for f in partial.rglob("*") if f.is_file())
    parent = next(p for p in partial.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"{parent}: is no directory that can be written, choose another target")
    need = plan.nbytes + copied + (len(plan.leaves) << 14) - present
    free = shutil.disk_usage(parent).free
    if need > free:
        raise InputError(
            f"{parent}: the conversion needs {decimal(need)}, only {decimal(free)} are free; make "
            "room or choose another target"
        )


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Holds the unfinished directory for this process; the lock ends with the process."""
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{partial}: another conversion is writing it") from None
    else:
        yield
    finally:
        os.close(handle)


def _claim(partial: Path, identity: str) -> None:
    """Begins the manifest of an empty directory, or checks that it is this conversion's."""
    if not (partial / MANIFEST).exists():
        if (partial / PARAMS).exists():
            raise InputError(f"{partial}: is not of a conversion, remove it")
        _write_json(partial / MANIFEST, {"source": identity})
    if _identity_of(partial / MANIFEST) != identity:
        raise InputError(f"{partial}: was begun from another source or version of it, remove it")


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    write_whole(file, (json.dumps(value, indent=1) + "\n").encode())


def _write_arrays(params: Path, plan: Plan, progress: bool) -> int:
    """Writes the arrays that are not there yet; returns how many were."""
    params.mkdir(exist_ok=True)
    stop = threading.Event()
    columns = (
        TextColumn("converting"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with (
        Progress(*columns, console=Console(stderr=True), disable=not progress) as bar,
        ThreadPoolExecutor(2 * min(8, os.cpu_count() or 1)) as pool,
    ):
        task = bar.add_task("", total=plan.nbytes)

        def advance(nbytes: int) -> None:
            if stop.is_set():
                raise InterruptedError(errno.EINTR, "stopped")
            bar.advance(task, nbytes)

        def work(leaf: Leaf) -> bool:
            if is_intact(params / array_name(leaf.path)):
                advance(leaf.nbytes)
                return True
            write_array(params, leaf, advance)
            return False

        # In the order of the files, so that disks read ahead.
        order = sorted(plan.leaves, key=lambda leaf: (leaf.sources[0].file, leaf.sources[0].start))
        jobs = [pool.submit(work, leaf) for leaf in order]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
            failed = next((j for j in jobs if j.done() and j.exception()), None)
            if failed:
                failed.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
        return sum(job.result() for job in jobs)


def _write_manifest(source: Path, partial: Path, plan: Plan, identity: str) -> None:
    arrays = {}
    for leaf in sorted(plan.leaves, key=lambda leaf: array_name(leaf.path)):
        described = describe_array(partial / PARAMS / array_name(leaf.path))
        assert described is not None
        arrays[array_name(leaf.path)] = {
            "shape": leaf.shape,
            "dtype": leaf.dtype.name,
            **described["attributes"],
        }
    write_tree(partial / PARAMS, [leaf.path for leaf in plan.leaves])
    for file in _copied(source):
        copy = partial / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    manifest = {"version": 1, "source": identity, "ignored": plan.ignored, "arrays": arrays}
    _write_json(partial / MANIFEST, manifest)
