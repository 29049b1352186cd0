"""Prefill by kernels is the plain prefill, and compiles once for each length of a chunk."""

import contextlib
import dataclasses
import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_ops import on_gpu

from inkling_jax import kernel_choice, ops, reading
from inkling_jax.cache import init_cache
from inkling_jax.config import SLIDING
from inkling_jax.generation import prefill
from inkling_jax.model import param_shardings
from inkling_jax.prompts import Prompt
from pallas_kernels import conv_mix, qkv_prep
from sharding.mesh import MeshConfig, make_mesh

__all__ = ["on_gpu"]
CONFIG = dataclasses.replace(
    helpers.TINY,
    text=dataclasses.replace(helpers.TEXT, hidden_size=128, swa_num_key_value_heads=2),
    vision=dataclasses.replace(helpers.VISION, text_hidden_size=128),
)
LENGTHS = ((33, 20), (33, 2), (0, 33))  # real tokens of each row, chunk by chunk


def read(params, mesh):
    """Logits after each chunk of a ragged batch, and the cache in the end."""
    run = jax.jit(prefill, static_argnums=1)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        cache, found = init_cache(CONFIG.text, 2, 128, 4, jnp.float32), []
        if mesh:
            params = jax.device_put(params, param_shardings(params, mesh))
        for lengths in LENGTHS:
            key = jax.random.key(len(found))
            tokens = jax.random.randint(key, (2, 33), 0, CONFIG.text.unpadded_vocab_size)
            out, cache = run(params, CONFIG, tokens, jnp.array(lengths, jnp.int32), cache)
            found += [np.asarray(row) for row, length in zip(out, lengths, strict=True) if length]
    return found, jax.tree.map(np.asarray, cache)


def chosen():
    """What prepares and mixes; attention and experts do not take float32."""
    return {kernel_choice.chosen()[op] for op in (ops.MIX_LONG, ops.PREPARE_LONG)}


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels of many tokens in Pallas' interpreter."""
    for module, name in ((conv_mix, "conv_mix_long"), (qkv_prep, "qkv_prep_long")):
        run = functools.partial(getattr(module, name), interpret=True)
        monkeypatch.setattr(ops, name.replace("qkv_prep", "prepare"), run)


@pytest.mark.parametrize("text", ["", pytest.param("ep=2,tp=2,sp=on", marks=pytest.mark.long)])
@pytest.mark.usefixtures("interpreted")
def test_prefill_by_kernels_is_the_plain_prefill(text, on_gpu, monkeypatch):
    """Ragged chunks, a row that ends, slices of tokens with the halo of the one before."""
    mesh = make_mesh(MeshConfig.parse(text)) if text else None
    params = helpers.tiny_params(CONFIG)
    with monkeypatch.context() as patch:
        patch.setattr(kernel_choice, "device_refusal", lambda: "it is told not to")
        plain = read(params, None)
    assert chosen() == {"it is told not to"}
    jax.clear_caches()  # what prepares and mixes was chosen while tracing
    out = read(params, mesh)
    assert chosen() == {kernel_choice.KERNEL}
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), out, plain)


def test_prompts_of_all_lengths_compile_a_program_per_bucket(monkeypatch):
    monkeypatch.setattr(reading, "PREFILL_BUCKETS", (8, 32))
    reading._prefill.clear_cache()
    config = helpers.tiny(num_hidden_layers=1, layer_types=(SLIDING,))
    for length in (1, 7, 8, 9, 31, 40, 65):
        prompt = Prompt([1] * length, [-1] * length, [])
        reading.read_prompts(helpers.tiny_params(config), config, [prompt], 128, 4)
    assert reading._prefill._cache_size() == 2
