"""The arrays of a converted checkpoint: an Orbax checkpoint, written as bytes, restored by Orbax.

An array is uncompressed zarr v3 in a directory of its own, as Orbax lays them out without OCDBT: a
chunk's file holds rows of the array as they lie in memory. They are written as plain files, which
copies less than tensorstore does. Digests are XXH3: they find damage and, unlike SHA-256, cost
little beside reading and writing. An interrupted conversion keeps the arrays that are finished:
those whose `zarr.json`, written last, is there and whose bytes have the digest in it.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import xxhash

from checkpoints.key_map import ShapeDtype
from checkpoints.transforms import Leaf
from checkpoints.transforms import Path as LeafPath
from inkling_jax.errors import report

CHUNK_BYTES = 64 << 20  # of a file; an array's last one is padded with zeros, as zarr wants it
PIECE_BYTES = 1 << 20  # read, hashed and written at once; half and twice as much were slower


def array_name(path: LeafPath) -> str:
    """Returns Orbax's name of the array at `path` of the tree."""
    return ".".join(map(str, path))


def write_array(directory: Path, leaf: Leaf, advance: Callable[[int], Any]) -> None:
    """Streams one array to `directory`/name; `advance` is told of the bytes as they are written."""
    folder = directory / array_name(leaf.path)
    folder.mkdir(exist_ok=True)
    digest = xxhash.xxh3_128()
    row = leaf.nbytes // leaf.shape[0]
    rows = min(leaf.shape[0], max(1, CHUNK_BYTES // row))
    buffer = np.empty(PIECE_BYTES, np.uint8)
    step = PIECE_BYTES // max(leaf.dtype.itemsize, 4)
    with leaf.sources[0].file.open("rb", buffering=0) as source:
        for name, start, stop in _chunks(leaf.shape, rows):
            with (folder / name).open("wb") as chunk:
                for begin in range(start, stop, step):
                    values = leaf.flat(source, begin, min(begin + step, stop), buffer)
                    data = values.view(np.uint8).data
                    digest.update(data)
                    chunk.write(data)
                advance(chunk.tell())
                chunk.truncate(rows * row)
    described = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": leaf.shape,
        "data_type": leaf.dtype.name,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [rows, *leaf.shape[1:]]},
        },
        # One folder for all chunks: making folders takes longer than writing a small array.
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "fill_value": 0,
        "attributes": {"xxh3_128": digest.hexdigest(), "made_of": leaf.names},
    }
    write_whole(folder / "zarr.json", json.dumps(described).encode())


def write_whole(file: Path, content: bytes) -> None:
    """Writes a file that is never seen half-written."""
    unfinished = file.with_name(file.name + ".tmp")
    unfinished.write_bytes(content)
    unfinished.rename(file)


_DESCRIPTION = {"shape", "data_type", "chunk_grid", "attributes"}


def describe(directory: Path) -> dict[str, dict[str, Any]]:
    """Returns `zarr.json` of every array by its name."""
    found = {
        folder.name: describe_array(folder) for folder in directory.iterdir() if folder.is_dir()
    }
    return {name: described for name, described in found.items() if described is not None}


def describe_array(folder: Path) -> dict[str, Any] | None:
    """Returns `zarr.json` of an array, or None where it was not finished."""
    try:
        described = json.loads((folder / "zarr.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    known = isinstance(described, dict) and described.keys() >= _DESCRIPTION
    return described if known else None


def is_intact(folder: Path) -> bool:
    """Tells whether an array is finished and its bytes still have the digest it was stored with."""
    described = describe_array(folder)
    if described is None:
        return False
    shape, dtype = described["shape"], np.dtype(described["data_type"])
    (rows, *_) = described["chunk_grid"]["configuration"]["chunk_shape"]
    digest = xxhash.xxh3_128()
    for name, start, stop in _chunks(shape, rows):
        left = (stop - start) * dtype.itemsize
        try:
            with (folder / name).open("rb", buffering=0) as file:
                while data := file.read(min(left, PIECE_BYTES)):
                    digest.update(data)
                    left -= len(data)
        except FileNotFoundError:
            return False
    return digest.hexdigest() == described["attributes"]["xxh3_128"]


def write_tree(directory: Path, paths: Iterable[LeafPath]) -> None:
    """Writes the file by which Orbax finds the arrays of the tree, nested dictionaries."""
    tree = {
        str(tuple(map(str, path))): {
            "key_metadata": [{"key": str(key), "key_type": 2} for key in path],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for path in paths
    }
    metadata = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    write_whole(directory / "_METADATA", json.dumps(metadata).encode())


def check(directory: Path, abstract: Mapping[LeafPath, ShapeDtype], cast: bool = False) -> None:
    """Refuses a checkpoint that does not hold the arrays that are asked for.

    Files must be there and have their sizes. Digests are compared where a conversion goes on, not
    here: that takes longer than loading does.

    Args:
      directory: the Orbax checkpoint.
      abstract: shape and dtype of every array, by its path.
      cast: lets plain floats be asked for in another float dtype.

    Raises:
      InputError: one report of all arrays that are absent, damaged, not asked for, or stored with
        another shape or dtype.
    """
    stored = describe(directory)
    wanted = {array_name(path): want for path, want in abstract.items()}
    problems = [f"missing: {name}" for name in wanted.keys() - stored.keys()]
    problems += [f"not asked for: {name}" for name in stored.keys() - wanted.keys()]
    for name in stored.keys() & wanted.keys():
        shape, dtype = stored[name]["shape"], np.dtype(stored[name]["data_type"])
        if tuple(shape) != wanted[name].shape:
            problems.append(f"misshapen: {name} is {shape}, asked for {list(wanted[name].shape)}")
        if dtype != wanted[name].dtype and not (cast and {dtype, wanted[name].dtype} <= _PLAIN):
            problems.append(f"wrong dtype: {name} is {dtype}, asked for {wanted[name].dtype}")
        problems += [
            f"damaged: {name}/{file} does not have {size} bytes"
            for file, size in _chunk_files(stored[name])
            if not (part := directory / name / file).is_file() or part.stat().st_size != size
        ]
    if not (directory / "_METADATA").is_file():
        problems.append("missing: _METADATA")
    if problems:
        raise report(directory, "against the model", sorted(problems))


def restore(
    directory: Path, abstract: Mapping[LeafPath, jax.ShapeDtypeStruct], cast: bool = False
) -> dict[LeafPath, jax.Array]:
    """Restores all arrays onto devices, on any number of them.

    Args:
      directory: the Orbax checkpoint.
      abstract: shape, dtype and sharding of every array, by its path.
      cast: lets plain floats be restored as another float dtype.

    Raises:
      InputError: what `check` finds.
    """
    check(directory, abstract, cast)
    tree: dict[str, Any] = {}
    for path, want in abstract.items():
        *parents, last = map(str, path)
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = want
    largest = max(math.prod(w.shape) * w.dtype.itemsize for w in abstract.values())
    # Orbax's own limit of 96 GB in flight would hold several layers in host memory.
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=2 + largest // 10**9)
    args = ocp.checkpoint_utils.construct_restore_args(tree)
    with ocp.Checkpointer(handler) as checkpointer:
        restored = checkpointer.restore(
            directory.absolute(), args=ocp.args.PyTreeRestore(tree, restore_args=args)
        )
    found = {}
    for path in abstract:
        node = restored
        for key in path:
            node = node[str(key)]
        found[path] = node
    return found


_PLAIN = {np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16)}


def _chunk_files(described: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yields each chunk's file and its size in bytes; the last chunk is filled up."""
    (rows, *inner) = described["chunk_grid"]["configuration"]["chunk_shape"]
    size = rows * math.prod(inner) * np.dtype(described["data_type"]).itemsize
    for file, _, _ in _chunks(described["shape"], rows):
        yield file, size


def _chunks(shape: Sequence[int], rows: int) -> Iterator[tuple[str, int, int]]:
    """Yields each chunk's file and the values of the flattened array that it holds."""
    row, inner = math.prod(shape[1:]), ".0" * (len(shape) - 1)
    for k, start in enumerate(range(0, shape[0], rows)):
        yield f"c.{k}{inner}", start * row, min(start + rows, shape[0]) * row
