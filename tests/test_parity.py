"""The whole model against transformers' float32, on the cases of tests/fixtures.

They are made by scripts/reference/make_fixtures.sh: `small` has other heads, extents, kernel size
and merge size in its two kinds of layers, `packed` NVFP4 and MXFP8 experts. A third, `wide`, is
compared on a GPU: kernels take its shapes. Inputs were drawn so
that no router decision is a near tie, so float32 agrees everywhere: the bounds are rounding.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from inkling_jax import images
from inkling_jax.cache import init_cache
from inkling_jax.config import Config
from inkling_jax.generation import generate
from inkling_jax.loading import load_params
from inkling_jax.model import encode_image, forward, unembed
from inkling_jax.sampling import Sampling, keys_from_seeds
from inkling_jax.sampling_params import SamplingParams

FIXTURES = Path(__file__).parent / "fixtures"
WIDTH = 40


class Case:
    """A checkpoint, what the reference computes from it, and one compiled forward pass."""

    def __init__(self, name):
        self.folder = FIXTURES / name
        self.config = Config.from_file(self.folder / "checkpoint" / "config.json")
        self.params = load_params(self.folder / "checkpoint", self.config, jnp.float32)
        self.expected = load_file(self.folder / "expected.safetensors")

        @jax.jit
        def run(params, tokens, count, features, image_index):
            cache = init_cache(self.config.text, 1, WIDTH, 1, jnp.float32)
            taps = tuple(range(-1, self.config.text.num_hidden_layers - 1))
            args = (params, self.config, tokens, count, cache, features, image_index)
            out = forward(*args, taps=taps)
            return unembed(params, self.config, out.hidden)[0], out.hidden[0], out.taps

        self._run = run

    def __call__(self, tokens, features=None, image_index=None):
        """Returns (logits, final hidden states, outputs of embedding and layers) of the tokens."""
        n = len(tokens)
        if features is None:
            features = np.zeros((8, self.config.text.hidden_size), np.float32)
            image_index = np.full(n, -1)
        tokens = np.pad(tokens, (0, WIDTH - n))[None].astype(np.int32)
        index = np.pad(image_index, (0, WIDTH - n), constant_values=-1)[None].astype(np.int32)
        count = np.array([n], np.int32)
        logits, hidden, taps = self._run(self.params, tokens, count, features, index)
        return logits[:n], hidden[:n], [tap[0, :n] for tap in taps]


case = pytest.fixture(scope="module", params=["small", "packed"])(
    lambda request: functools.cache(Case)(request.param)
)


def lengths(expected):
    names = [name for name in expected if name.startswith("text") and name.endswith(".logits")]
    return sorted(int(name[4:].split(".")[0]) for name in names)


def test_logits(case):
    for n in lengths(case.expected):
        logits = case(case.expected[f"text{n}.tokens"])[0]
        np.testing.assert_allclose(logits, case.expected[f"text{n}.logits"], atol=2e-4)


def test_hidden_states_of_every_layer(case):  # SP-08
    _, hidden, taps = case(case.expected["text17.tokens"])
    for got, want in zip([*taps, hidden], case.expected["text17.hidden"], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def test_pictures(case):
    """Tiles exactly, features and logits of a prompt with an RGB and an RGBA picture closely."""
    config, expected = case.config, case.expected
    encode = jax.jit(functools.partial(encode_image, config=config))
    tiles, features = [], []
    for i, grid in enumerate(expected["image.grid_thw"]):
        found, size = images.tiles(case.folder / f"image{i}.png", config.vision.tile_size)
        assert [1, *size] == grid.tolist()
        padded = np.zeros((8, *found.shape[1:]), np.float32)
        padded[: len(found)] = found
        feature = encode(case.params, tiles=padded, grid=np.array(size, np.int32))
        tiles.append(found)
        features.append(np.asarray(feature)[: len(found)])
    np.testing.assert_array_equal(np.concatenate(tiles), expected["image.pixels"])
    features = np.concatenate(features)
    np.testing.assert_allclose(features, expected["image.features"], atol=1e-4)
    tokens = expected["image.tokens"]
    placeholder = tokens == config.image_token_id
    index = np.where(placeholder, np.cumsum(placeholder) - 1, -1)
    features = np.pad(features, ((0, 8 - len(features)), (0, 0)))
    logits = case(tokens, features, index)[0]
    np.testing.assert_allclose(logits, expected["image.logits"], atol=2e-4)


@pytest.mark.parametrize(
    "case", ["small", pytest.param("packed", marks=pytest.mark.long)], indirect=True
)
def test_greedy_tokens(case):
    prompt, want = case.expected["greedy.prompt"], case.expected["greedy.tokens"]
    sampling = Sampling.stack([SamplingParams(temperature=0.0)])
    run = jax.jit(
        lambda params, tokens, count: generate(
            params, case.config, tokens, count, sampling, keys_from_seeds([0]), len(want),
            stop_ids=jnp.full((1, 1), -1, jnp.int32),
        )[0].ids
    )  # fmt: skip
    ids = run(case.params, jnp.asarray(prompt)[None], jnp.array([len(prompt)], jnp.int32))
    np.testing.assert_array_equal(ids[0], want)
