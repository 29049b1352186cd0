"""Pictures of every kind become exactly the tiles of the specification."""

import base64
import io

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from inkling_jax.errors import InputError
from inkling_jax.images import decode, tiles

RNG = np.random.default_rng(5)
RGB = RNG.integers(0, 256, (26, 28, 3), np.uint8)
RGBA = RNG.integers(0, 256, (19, 20, 4), np.uint8)


def png(image: Image.Image, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", **options)
    return out.getvalue()


def expected_tile(rgb: np.ndarray, row: int, column: int, tile: int) -> np.ndarray:
    """One tile pixel by pixel, as the specification says it."""
    out = np.empty((tile, tile, 3), np.float32)
    for y in range(tile):
        for x in range(tile):
            at = row * tile + y, column * tile + x
            inside = at[0] < rgb.shape[0] and at[1] < rgb.shape[1]
            pixel = rgb[at].astype(np.float32) if inside else np.float32(-1)
            out[y, x] = (pixel / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    return out


def test_tiles_are_padded_cut_in_raster_order_and_scaled():
    got, grid = tiles(RGB, 10)
    assert grid == (3, 3) and got.shape == (9, 10, 10, 3) and got.dtype == np.float32
    for i in range(9):
        np.testing.assert_array_equal(got[i], expected_tile(RGB, *divmod(i, 3), 10))


def test_transparency_is_laid_on_a_checkerboard():
    got = decode(RGBA)
    for y, x in np.ndindex(got.shape[:2]):
        *colour, alpha = (int(v) for v in RGBA[y, x])
        square = 204 if (y // 8 + x // 8) % 2 == 0 else 153
        want = [(c * alpha + square * (255 - alpha) + 127) // 255 for c in colour]
        assert got[y, x].tolist() == want, (y, x)


def test_hidden_colours_do_not_show():  # IM-03
    row = np.uint8([[[255, 0, 0, 0]] * 8 + [[0, 0, 255, 128]]])
    got = decode(row)
    assert got[0, 0].tolist() == [204, 204, 204]  # square (0, 0)
    assert got[0, 8].tolist() == [76, 76, 204]  # square (0, 1): half of 153, half of blue
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 255, 0])
    palette.putpixel((1, 0), 1)
    keyed = png(palette, transparency=0)
    np.testing.assert_array_equal(decode(keyed)[0], [[204, 204, 204], [0, 255, 0]])
    grey = png(Image.fromarray(np.uint8([[7, 9]])), transparency=7)
    np.testing.assert_array_equal(decode(grey)[0], [[204] * 3, [9] * 3])


SIZES = [(1, 1), (39, 40), (40, 40), (41, 39), (26, 28), (1, 4000), (4000, 1), (690, 15420)]


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_sizes_give_whole_tiles(height, width):  # IM-01
    got, (rows, columns) = tiles(np.zeros((height, width, 3), np.uint8), 40)
    assert rows == max(1, -(-height // 40)) and columns == max(1, -(-width // 40))
    assert len(got) == rows * columns


def test_all_sources_give_equal_pixels(tmp_path):
    data = png(Image.fromarray(RGB))
    file = tmp_path / "ä picture.png"
    file.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    arrays = RGB, jnp.array(RGB)
    for source in (data, file, str(file), url, url.replace("=", "%3D"), Image.open(file), *arrays):
        np.testing.assert_array_equal(decode(source), RGB)


@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 5, 3), (1, 7, 3), (3, 4, 1), (4, 3, 4)])
def test_array_axes_are_height_width_channel(shape):  # IM-03
    array = RNG.integers(0, 256, shape, np.uint8)
    if shape[2] == 4:
        array[..., 3] = 255
    colours = np.broadcast_to(array, (*shape[:2], 3)) if shape[2] == 1 else array[..., :3]
    np.testing.assert_array_equal(decode(array), colours)


def test_sixteen_bit_greys_are_scaled():  # IM-03
    values = np.uint16([[0, 128, 129, 40000, 65535]])
    want = np.repeat(np.uint8([[0, 0, 1, 156, 255]])[..., None], 3, -1)
    wide = Image.fromarray(values)
    assert wide.mode == "I;16"
    big_endian = Image.frombytes("I;16B", (5, 1), values.astype(">u2").tobytes())
    for source in (values, wide, png(wide), big_endian, wide.convert("I")):
        np.testing.assert_array_equal(decode(source), want)
    keyed = Image.fromarray(values)
    keyed.info["transparency"] = 40000
    np.testing.assert_array_equal(decode(keyed)[0, 3:], [[204] * 3, [255] * 3])


GREYS = ("L", "LA", "La", "I", "F")


@pytest.mark.parametrize("mode", [*GREYS, "1", "P", "PA", "RGB", "RGBX", "RGBA", "RGBa", "CMYK",
                                  "YCbCr", "LAB", "HSV"])  # fmt: skip
def test_every_mode_is_read(mode):  # IM-03
    colour = {"1": [255] * 3, **dict.fromkeys(GREYS, [153] * 3)}.get(mode, [51, 102, 153])
    through = {"La": "LA", "RGBa": "RGBA"}.get(mode, "RGB")
    image = Image.new("RGB", (3, 2), tuple(colour)).convert(through).convert(mode)
    before = image.copy()
    got = decode(image)
    assert got.shape == (2, 3, 3)
    assert abs(got.astype(int) - colour).max() <= (4 if mode in ("YCbCr", "LAB", "HSV") else 0)
    assert image.mode == mode and image.tobytes() == before.tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_comes_first(orientation):
    turn = {
        1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1], 5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a, -1),
        7: lambda a: a[::-1, ::-1].swapaxes(0, 1), 8: lambda a: np.rot90(a),
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(decode(png(Image.fromarray(RGB), exif=exif)), turn(RGB))
    # the checkerboard starts at the corner of the upright picture
    upright = decode(np.ascontiguousarray(turn(RGBA)))
    np.testing.assert_array_equal(decode(png(Image.fromarray(RGBA), exif=exif)), upright)


def test_large_pictures_are_refused_before_decoding():
    bomb = png(Image.new("1", (20_000, 20_000)))  # 400 million pixels in a few kilobytes
    with pytest.raises(InputError, match="pixels"):
        decode(bomb)
    warned = png(Image.new("1", (10_000, 10_000)))  # Pillow only warns
    with pytest.raises(InputError, match="10000 x 10000"):
        decode(warned)
    with pytest.raises(InputError, match="1 to 99 pixels"):
        tiles(np.zeros((10, 10, 3), np.uint8), 40, max_pixels=99)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("nowhere/cat.png", "cat.png"),
        (".", "directory"),
        (b"", "0 bytes"),
        (b"not a picture", "cannot be read"),
        (png(Image.fromarray(RGB))[:-200], "damaged|cannot be read"),
        ("data:image/png;base64,@@@", "base64"),
        ("data:image/png,abc", "base64"),
        ("https://example.org/cat.png", "link"),
        ("nul\0byte.png", "nul"),
        (np.zeros((0, 3, 3), np.uint8), "array"),
        (np.zeros((2, 2, 2), np.uint8), "array"),
        (np.zeros((2, 2, 3), np.float32), "float32"),
        (np.zeros(5, np.uint8), "array"),
        (Image.new("RGB", (0, 4)), "0 x 4"),
        (None, "an image is None"),
        ("", "an image is ''"),
        (bytearray(b"ab"), "an image is bytearray"),
    ],
)
def test_bad_pictures_are_refused_in_a_sentence(source, reason):
    with pytest.raises(InputError, match=reason) as error:
        decode(source)
    assert "\n" not in str(error.value)
