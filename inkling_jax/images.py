"""Pictures to the tiles that the image tower reads (spec: inkling2.md, "preprocessing").

Nothing is resized: a picture is padded at the bottom and the right, and every tile is one token.
"""

import base64
import binascii
import io
import os
import urllib.parse
import warnings
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Shaped, UInt8
from PIL import Image, ImageOps

from inkling_jax.errors import InputError

MAX_PIXELS = 1 << 26  # 8192 x 8192: 41,943 tokens; Pillow itself warns from 89 million

Source = str | os.PathLike | bytes | Image.Image | np.ndarray


def tiles(
    image: Source, tile: int, max_pixels: int = MAX_PIXELS
) -> tuple[Float32[np.ndarray, "N t t 3"], tuple[int, int]]:
    """Cuts a picture into tiles, one per image token, in raster order.

    Args:
        image: what `decode` takes.
        tile: side of a tile in pixels, `config.vision.tile_size`.
        max_pixels: larger pictures are refused before they are decoded.

    Returns:
        Tiles with values in -1…1 (padding: the -1 of the scale 0…255), and (rows, columns).

    Raises:
        InputError: the picture is missing, unreadable, empty or too large.
    """
    rgb = decode(image, max_pixels)
    height, width = rgb.shape[:2]
    rows, columns = -(-height // tile), -(-width // tile)
    padded = np.full((rows * tile, columns * tile, 3), -1, np.float32)
    padded[:height, :width] = rgb
    padded = (padded / 255 - 0.5) / 0.5
    grid = padded.reshape(rows, tile, columns, tile, 3).transpose(0, 2, 1, 3, 4)
    return grid.reshape(-1, tile, tile, 3), (rows, columns)


def decode(source: Source, max_pixels: int = MAX_PIXELS) -> UInt8[np.ndarray, "H W 3"]:
    """Reads a picture of any kind as RGB, turned upright and laid on a checkerboard if transparent.

    Args:
        source: a path, a `data:` URL, the bytes of a file, a PIL image, or an array [H, W] or
            [H, W, 1 | 3 | 4] of uint8 or uint16.
        max_pixels: larger pictures are refused before they are decoded.

    Raises:
        InputError: the picture is missing, unreadable, empty or too large.
    """
    if isinstance(source, np.ndarray) or hasattr(source, "__array__"):  # such as JAX's
        source = _from_array(np.asarray(source))
    if isinstance(source, Image.Image):
        return _decode(source, max_pixels, "the given picture")
    data, name = _read(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our limit is lower
            image = Image.open(data)
    except Image.DecompressionBombError as error:
        raise InputError(f"{name} has more than {max_pixels} pixels, use a smaller one") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(f"{name} cannot be read as a picture, use PNG, JPEG or WebP") from error
    with image:
        return _decode(image, max_pixels, name)


def _read(source: str | os.PathLike | bytes) -> tuple[io.BytesIO, str]:
    if isinstance(source, bytes):
        return io.BytesIO(source), f"a picture of {len(source)} bytes"
    if not isinstance(source, str | os.PathLike) or not os.fspath(source):
        raise InputError(
            f"an image is {source!r:.40}, it must be a path, a data: URL, bytes, a PIL image or an "
            "array"
        )
    path = os.fspath(source)
    if path[:5].lower() == "data:":
        return io.BytesIO(_from_data_url(path)), "the picture of a data: URL"
    if "://" in path[:10]:
        raise InputError(f"{path[:60]} is a link, pass a file or a data: URL instead")
    try:
        return io.BytesIO(Path(path).read_bytes()), path
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"image {path[:200]}: {reason}, pass a readable picture") from error


def _from_data_url(url: str) -> bytes:
    head, comma, body = url.partition(",")
    body = urllib.parse.unquote_to_bytes(body)
    try:
        if not comma or not head.lower().endswith(";base64"):
            raise ValueError
        return base64.b64decode(b"".join(body.split()), validate=True)
    except (ValueError, binascii.Error) as error:
        raise InputError(f"{url[:40]}…: write data:image/png;base64,… with valid base64") from error


def _check_size(size: tuple[int, ...], max_pixels: int, name: str):
    width, height = size
    if not 0 < width * height <= max_pixels:
        raise InputError(
            f"{name} has {width} x {height} pixels, use one of 1 to {max_pixels} pixels"
        )


def _decode(image: Image.Image, max_pixels: int, name: str) -> UInt8[np.ndarray, "H W 3"]:
    _check_size(image.size, max_pixels, name)
    try:
        image = ImageOps.exif_transpose(image)  # a copy, so the caller's picture stays as it is
        return _flatten(_to_eight_bits(image))
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise InputError(f"{name} is damaged or incomplete: {error}") from error


def _from_array(array: Shaped[np.ndarray, "..."]) -> Image.Image:
    """Takes the axes as (height, width, channel), whatever their sizes."""
    if array.ndim == 2:
        array = array[..., None]
    fits = array.ndim == 3 and array.size and array.shape[2] in (1, 3, 4)
    if not fits or array.dtype not in (np.uint8, np.uint16):
        raise InputError(
            f"an image array has shape {array.shape} of {array.dtype}, it must be [height, width, "
            "1, 3 or 4 channels] of uint8 or uint16"
        )
    if array.dtype == np.uint16:
        array = _scaled(array)
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Scales 16-bit greys, which Pillow would clip at 255; transparency by key colour is kept."""
    if image.mode == "La":
        return image.convert("LA")
    # Mode I has 32 bits: it holds 16-bit greys of older formats, but also converted 8-bit ones.
    wide = image.mode.startswith("I;16") or (image.mode == "I" and np.asarray(image).max() > 255)
    if not wide:
        return image
    values = np.asarray(image).astype(np.int64).clip(0, 65535)
    grey = Image.fromarray(_scaled(values))
    if (key := image.info.get("transparency")) is not None:
        grey.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    return grey


def _scaled(values: Shaped[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    """Rounds 0…65535 to 0…255."""
    return ((values.astype(np.int64) + 128) // 257).astype(np.uint8)


def _flatten(image: Image.Image) -> UInt8[np.ndarray, "H W 3"]:
    if not image.has_transparency_data:
        return np.asarray(image.convert("RGB"))
    rgba = np.asarray(image.convert("RGBA")).astype(np.int32)
    rows, columns = np.ogrid[: rgba.shape[0], : rgba.shape[1]]
    squares = np.where((rows // 8 + columns // 8) % 2 == 0, 204, 153)[..., None]
    alpha = rgba[..., 3:]
    return ((rgba[..., :3] * alpha + squares * (255 - alpha) + 127) // 255).astype(np.uint8)
