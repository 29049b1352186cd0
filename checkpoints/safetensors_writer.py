"""Writes checkpoints in the published layout: shards with an index, or one file."""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.safetensors_reader import INDEX, NUMPY_DTYPES, SINGLE

_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}


def write_published(
    directory: Path,
    tensors: Iterable[tuple[str, Any]],
    config: Mapping[str, Any],
    shard_bytes: int = 4 << 30,
) -> None:
    """Writes `config.json` and the tensors, in shards where one file would exceed `shard_bytes`.

    Args:
      directory: made if absent; shards and index of an earlier run are replaced.
      tensors: published names and arrays (NumPy or JAX, any memory order), in the order to store
        them. They are consumed one by one: no more than one shard is in memory.
      config: what `config.json` shall hold.
      shard_bytes: a shard is closed before it grows beyond this; a larger tensor has its own.

    Raises:
      ValueError: a name comes twice, or an array has a dtype that safetensors cannot hold.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, int] = {}
    shard: dict[str, np.ndarray] = {}
    parts: list[Path] = []

    def close() -> None:
        parts.append(directory / f"part-{len(parts)}.tmp")
        write_file(parts[-1], shard)
        shard.clear()

    total = 0
    for name, tensor in tensors:
        array = np.asarray(tensor)
        if name in weight_map:
            raise ValueError(f"tensor {name} was given twice")
        if shard and sum(a.nbytes for a in shard.values()) + array.nbytes > shard_bytes:
            close()
        shard[name] = array
        weight_map[name] = len(parts)
        total += array.nbytes
    close()

    for old in [directory / INDEX, *directory.glob("model*.safetensors")]:
        old.unlink(missing_ok=True)
    names = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    if len(parts) == 1:
        names = [SINGLE]
    for part, name in zip(parts, names, strict=True):
        part.rename(directory / name)
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: names[i] for name, i in weight_map.items()},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")


def write_file(file: Path, tensors: Mapping[str, Any]) -> None:
    """Writes one safetensors file; arrays of any memory and byte order keep their elements.

    Raises:
      ValueError: an array has a dtype that safetensors cannot hold.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    arrays = []
    position = 0
    for name, tensor in tensors.items():
        array = np.asarray(tensor)
        # The NumPy writer of safetensors 0.8 stores a transposed array's memory as it lies.
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
        if (kind := _NAMES.get(array.dtype)) is None:
            raise ValueError(f"tensor {name} has dtype {array.dtype}, unknown to safetensors")
        if kind == "F4":
            array = _pack(array)
        end = position + array.nbytes
        shape = list(np.shape(tensor))
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [position, end]}
        arrays.append(array)
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for array in arrays:
            f.write(array.reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())


def _pack(values: np.ndarray) -> np.ndarray:
    """Packs float4 values two to a byte, the first in the low half."""
    codes = values.reshape(-1, 2).view(np.uint8)
    return codes[:, 0] | codes[:, 1] << 4
