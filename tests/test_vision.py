"""Where the patches of a picture stand, and how far each turns its queries and keys (IM-05)."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import TINY, tiny_params

from inkling_jax.model import encode_image
from inkling_jax.reading import encode_pictures, padded_tiles, picture_batches
from inkling_jax.vision import _axial_angles, _patch_positions, _rotate


def test_patches_run_tile_by_tile_and_row_by_row():
    row, col = _patch_positions(6, 1, jnp.array(3))  # 2 rows of 3 tiles
    np.testing.assert_array_equal(row, [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(col, [0, 1, 2, 0, 1, 2])
    row, col = _patch_positions(3, 2, jnp.array(3))  # one row of 3 tiles of 2 × 2 patches
    np.testing.assert_array_equal(row, [0, 0, 1, 1] * 3)
    np.testing.assert_array_equal(col, [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5])


def test_columns_turn_the_first_half_and_rows_the_second():
    index, still = jnp.arange(4), jnp.zeros(4, jnp.int32)
    half = TINY.vision.head_dim // 2
    freqs = TINY.vision.rope_theta ** -(np.arange(0, half, 2) / half)
    turned = np.repeat(np.arange(4)[:, None] * freqs, 2, axis=1)
    across = _axial_angles(still, index, TINY.vision)
    down = _axial_angles(index, still, TINY.vision)
    np.testing.assert_allclose(across, np.concatenate((turned, 0 * turned), axis=1), rtol=1e-6)
    np.testing.assert_allclose(down, np.concatenate((0 * turned, turned), axis=1), rtol=1e-6)


def test_pairs_of_neighbouring_channels_turn():
    x = jnp.array([[[1.0, 0.0, 0.0, 2.0]]])
    turned = _rotate(x, jnp.full((1, 4), np.pi / 2))
    np.testing.assert_allclose(turned, [[[0.0, 1.0, -2.0, 0.0]]], atol=1e-6)


def test_pictures_are_hardly_padded():
    padded = {n: padded_tiles(n) for n in range(1, 4097)}
    assert all(padded[n] == 4 if n <= 4 else n <= padded[n] < 1.25 * n for n in padded)
    assert len(set(padded.values())) == 4 * 10 + 1  # from 4 to 4096, four an octave


def test_like_pictures_are_encoded_together():
    calls = list(picture_batches([20, 4, 17, 3, 18, 4097, 9]))
    assert calls == [(4, [1, 3]), (10, [6]), (20, [0, 2]), (20, [4]), (5120, [5])]


def test_pictures_together_are_those_alone():
    """Beside others, and padded, a picture has the features that it has by itself."""
    params, side = tiny_params(), TINY.vision.tile_size
    grids = [(3, 3), (1, 2), (2, 5), (10, 1)]
    keys = jax.random.split(jax.random.key(0), len(grids))
    pictures = [
        (np.asarray(jax.random.normal(key, (rows * columns, side, side, 3))), (rows, columns))
        for key, (rows, columns) in zip(keys, grids, strict=True)
    ]
    together = encode_pictures(params, TINY, pictures)
    encode = jax.jit(encode_image, static_argnums=1)
    for (tiles, grid), found in zip(pictures, together, strict=True):
        alone = encode(params, TINY, jnp.asarray(tiles), jnp.array(grid))
        np.testing.assert_allclose(found, alone, atol=1e-5)
