"""Reads safetensors files lazily: headers at once, and later only the bytes that are asked for.

The safetensors library cannot hand float8 or packed 4-bit tensors to NumPy, and its memory maps
accept what a changed file no longer holds; one reader for all dtypes keeps one set of checks.
Every error names the file and the reason. Source: spec checkpoint.md.
"""

import dataclasses
import io
import json
import math
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from inkling_jax.errors import InputError, report

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_MAX_HEADER = 100_000_000  # the library's own limit
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

NUMPY_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F4": np.dtype(ml_dtypes.float4_e2m1fn),  # two values a byte on disk, the first in the low half
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: its file, dtype (safetensors' name), shape in values, bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_index(path: Path) -> dict[str, TensorInfo]:
    """Reads the names and places of all tensors of a checkpoint, and checks them.

    Args:
      path: a safetensors file, or a directory in the published layout. Files that its index does
        not list are ignored.

    Raises:
      InputError: a file is missing, damaged, a pickle, or contradicts the index; directories whose
        config asks for remote code are refused. All contradictions stand in one report.
    """
    if path.is_file():
        return read_header(path)
    if not path.is_dir():
        raise InputError(f"{path}: no such file or directory")
    _refuse_remote_code(path / "config.json")
    if not (path / INDEX).exists():
        if not (path / SINGLE).exists():
            _refuse_missing(path)
        return read_header(path / SINGLE)
    return _read_shards(path)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Reads the header of one safetensors file and checks that it accounts for every byte.

    Raises:
      InputError: the file cannot be read, or its header is not one that the format allows.
    """
    try:
        with file.open("rb") as f:
            size = f.seek(0, 2)
            f.seek(0)
            if size < 8:
                raise InputError(f"{file}: is cut short, {size} bytes hold no header")
            (length,) = struct.unpack("<Q", f.read(8))
            if length > min(_MAX_HEADER, size - 8):
                raise InputError(
                    f"{file}: states a header of {length} bytes, the file has {size} and the "
                    f"limit is {_MAX_HEADER}"
                )
            header = parse_json(f.read(length), file)
    except OSError as e:
        raise InputError(f"{file}: cannot be read ({e.strerror})") from e
    header.pop("__metadata__", None)
    begin = 8 + length
    tensors = {name: _tensor_info(file, name, entry, begin) for name, entry in header.items()}
    position = begin
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if info.start != position:
            fault = "overlaps the tensor before it" if info.start < position else "follows a hole"
            raise InputError(f"{file}: tensor {name} {fault} (byte {info.start}, not {position})")
        position += info.nbytes
    if position != size:
        fault = "is cut short" if position > size else "has bytes that belong to no tensor"
        raise InputError(f"{file}: {fault}, its header describes {position} bytes of {size}")
    return tensors


def read_tensor(
    info: TensorInfo,
    index: slice | tuple[slice, ...] = (),
    shape: tuple[int, ...] | None = None,
) -> np.ndarray:
    """Reads a tensor, or a slice of it, touching only the pages that hold the slice.

    Args:
      info: the tensor.
      index: what to read, one slice per axis of `shape` from the left; everything by default.
      shape: another shape of as many values to see the tensor in.

    Returns:
      A new contiguous array. Bits are kept: float8 arrives as ml_dtypes' float8, F4 unpacked to one
      float4_e2m1fn a byte.
    """
    shape = info.shape if shape is None else shape
    dtype = NUMPY_DTYPES[info.dtype]
    if info.nbytes == 0:
        return np.zeros(shape, dtype)[index]
    if info.file.stat().st_size < info.start + info.nbytes:
        raise InputError(f"{info.file}: was cut short while it was being read")
    # Mapped anew for each read, so that no page stays resident after it.
    raw = np.memmap(info.file, np.uint8, "r", info.start, (info.nbytes,))
    if info.dtype == "F4":
        raw = np.stack([raw & 15, raw >> 4], axis=-1)
    return np.array(raw.reshape(-1).view(dtype).reshape(shape)[index], order="C")


def read_flat(
    info: TensorInfo, file: io.FileIO, start: int, stop: int, buffer: np.ndarray
) -> np.ndarray:
    """Reads values `start` to `stop` of a flattened tensor into `buffer`, and returns them.

    Args:
      info: the tensor.
      file: its file, open.
      start, stop: counted in values.
      buffer: bytes, enough for them. Streaming a file through one small buffer takes a third of
        the time of mapping it piece by piece.
    """
    dtype = NUMPY_DTYPES[info.dtype]
    data = buffer[: (stop - start) * dtype.itemsize]
    file.seek(info.start + start * dtype.itemsize)
    if file.readinto(data.data) != data.nbytes:
        raise InputError(f"{info.file}: was cut short while it was being read")
    return data.view(dtype)


def parse_json(text: bytes, file: Path) -> dict[str, Any]:
    """Parses a JSON object that may not repeat a name; `file` is named in errors."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated = [name for name, n in Counter(name for name, _ in pairs).items() if n > 1]
        if repeated:
            raise InputError(f"{file}: names {', '.join(map(repr, repeated))} more than once")
        return dict(pairs)

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
    except InputError:
        raise
    except (ValueError, RecursionError) as e:
        raise InputError(f"{file}: its JSON cannot be parsed ({e})") from e
    if not isinstance(value, dict):
        raise InputError(f"{file}: holds a JSON {type(value).__name__}, it must hold an object")
    return value


def _tensor_info(file: Path, name: str, entry: Any, begin: int) -> TensorInfo:
    def whole(values: Any) -> bool:
        return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise InputError(f"{file}: tensor {name} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in NUMPY_DTYPES:
        raise InputError(
            f"{file}: tensor {name} has dtype {dtype!r}, known are {', '.join(NUMPY_DTYPES)}"
        )
    if not whole(shape) or not whole(offsets) or len(offsets) != 2:
        raise InputError(f"{file}: tensor {name} has shape {shape!r} and data_offsets {offsets!r}")
    bits = 4 if dtype == "F4" else 8 * NUMPY_DTYPES[dtype].itemsize
    if math.prod(shape) * bits != 8 * (offsets[1] - offsets[0]):
        raise InputError(
            f"{file}: tensor {name} states {offsets[1] - offsets[0]} bytes, its shape {shape} of "
            f"{dtype} needs {math.prod(shape) * bits / 8:g}"
        )
    return TensorInfo(file, dtype, tuple(shape), begin + offsets[0], offsets[1] - offsets[0])


def _read_shards(directory: Path) -> dict[str, TensorInfo]:
    index_file = directory / INDEX
    weight_map = parse_json(index_file.read_bytes(), index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise InputError(f"{index_file}: weight_map must map each tensor's name to its file's name")
    for shard in sorted(set(weight_map.values())):
        if "/" in shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise InputError(
                f"{index_file}: shard {shard!r} is not the name of a .safetensors file of the same "
                "directory"
            )
    present = {
        shard: read_header(directory / shard)
        for shard in sorted(set(weight_map.values()))
        if (directory / shard).is_file()
    }
    if problems := list(_contradictions(weight_map, present)):
        raise report(index_file, "against the files", problems)
    return {name: present[shard][name] for name, shard in weight_map.items()}


def _contradictions(
    weight_map: dict[str, str], present: dict[str, dict[str, TensorInfo]]
) -> Iterator[str]:
    for shard in sorted(set(weight_map.values()) - present.keys()):
        yield f"shard {shard} is listed and absent"
    for name, shard in weight_map.items():
        if shard in present and name not in present[shard]:
            yield f"tensor {name} is listed in {shard} and is not there"
    for shard, tensors in present.items():
        for name in tensors:
            if weight_map.get(name) != shard:
                yield f"tensor {name} is in {shard}, where the index does not list it"


def _refuse_remote_code(config: Path) -> None:
    if config.exists() and "auto_map" in parse_json(config.read_bytes(), config):
        raise InputError(
            f"{config}: auto_map asks for code from the checkpoint to be run, which is never done; "
            "remove it if the model is a plain inkling2"
        )


def _refuse_missing(directory: Path) -> None:
    pickles = sorted(file.name for file in directory.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise InputError(
            f"{directory}: holds pickles ({', '.join(pickles)}), which can run code and are never "
            "read; convert them to safetensors"
        )
    raise InputError(f"{directory}: holds neither {INDEX} nor {SINGLE}")
