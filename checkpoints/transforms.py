"""How published tensors become parameters: shapes, formats of experts, and checks of their codes.

A parameter keeps its published memory order. Named shape transforms say which published shape a
parameter's shape stands for, so that a slice of the parameter is a slice of the file.
"""

import dataclasses
import io
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np

from checkpoints.safetensors_reader import TensorInfo, read_flat, read_tensor
from inkling_jax.errors import InputError

Shape = tuple[int, ...]
Path = tuple[str | int, ...]

FLOATS = ("F32", "BF16", "F16")
BYTE, FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def same(shape: Shape) -> Shape:
    """Published as it is."""
    return shape


def heads_first(shape: Shape) -> Shape:
    """[H, d, …] is published as [H·d, …]."""
    return (shape[0] * shape[1], *shape[2:])


def heads_last(shape: Shape) -> Shape:
    """[…, H, d] is published as […, H·d]."""
    return (*shape[:-2], shape[-2] * shape[-1])


def taps(shape: Shape) -> Shape:
    """Static convolution [channels…, c] is published as [channels, 1, c]."""
    return (math.prod(shape[:-1]), 1, shape[-1])


def experts(shape: Shape) -> Shape:
    """[n, R, C] is published as it is, or packed: the tensors of the layer say which."""
    return shape


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the parameter tree and the published tensors that it is made of.

    Attributes:
      path: its place in the parameter tree, parts of a packed expert included.
      shape, dtype: of the array.
      finish: makes part of the array, element by element, of that part of the first tensor.
      names, sources: the published tensors.
    """

    path: Path
    shape: Shape
    dtype: np.dtype
    finish: Callable[["Leaf", np.ndarray], np.ndarray]
    names: tuple[str, ...] = ()
    sources: tuple[TensorInfo, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: slice | tuple[slice, ...]) -> np.ndarray:
        """Reads the part that slices select: `leaf[2:4]`, `leaf[:, 1:2]`, all by `leaf[()]`."""
        return self.finish(self, read_tensor(self.sources[0], index, self.shape))

    def flat(self, file: io.FileIO, start: int, stop: int, buffer: np.ndarray) -> np.ndarray:
        """Reads values of the flattened array through `buffer`, which the result may share."""
        return self.finish(self, read_flat(self.sources[0], file, start, stop, buffer))


def cast(leaf: Leaf, values: np.ndarray) -> np.ndarray:
    """A float tensor, in the leaf's dtype."""
    return values.astype(leaf.dtype, copy=False)


def bits(leaf: Leaf, codes: np.ndarray) -> np.ndarray:
    """Codes of a packed tensor, unchanged."""
    return codes.view(leaf.dtype)


def scales(leaf: Leaf, codes: np.ndarray) -> np.ndarray:
    """Block scales of a packed tensor, unchanged; a NaN among them is refused."""
    bits = codes.view(np.uint8)
    # e8m0 (kept as bytes) has one NaN, 255; e4m3 has two, 0x7f and 0xff.
    nan = bits == 255 if leaf.dtype == np.uint8 else (bits & 0x7F) == 0x7F
    if nan.any():
        raise InputError(
            f"{leaf.sources[0].file}: tensor {leaf.names[0]} has {nan.sum()} block scales that are "
            "NaN"
        )
    return codes.view(leaf.dtype)


def outer_scale(leaf: Leaf, amax: np.ndarray) -> np.ndarray:
    """NVFP4's scale per expert, amax/denominator in float32."""
    amax = amax.astype(np.float32)
    denominator = read_tensor(leaf.sources[1]).astype(np.float32)
    if not np.isfinite(amax).all() or not (np.isfinite(denominator) and denominator > 0):
        raise InputError(
            f"{leaf.sources[0].file}: tensors {' and '.join(leaf.names)} must be finite, and the "
            "denominator positive"
        )
    return amax / denominator
