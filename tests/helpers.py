"""Tiny models and what tests ask of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_jax.cache import Cache, init_cache, read_before
from inkling_jax.config import FULL, SLIDING, Config, TextConfig, VisionConfig
from inkling_jax.model import abstract_params, forward, unembed

VISION = VisionConfig(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    patch_size=2,
    posemb_grid_size=4,
    projection_hidden_dim=16,
    text_hidden_size=32,
)
TEXT = TextConfig(
    vocab_size=48,
    unpadded_vocab_size=43,
    hidden_size=32,
    num_hidden_layers=3,
    layer_types=(SLIDING, FULL, SLIDING),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=1,
    swa_head_dim=8,
    sliding_window_size=8,
    rel_extent=5,
    d_rel=4,
    log_scaling_n_floor=4,
    log_scaling_alpha=0.3,
    qk_l2_clip_threshold=2.0,
    rel_l2_clip_threshold=1.0,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_layers_per_attn_res_block=2,
    max_position_embeddings=4096,
    eos_token_id=(7,),
)
TINY = Config(TEXT, VISION, image_token_id=40)


def tiny(**text) -> Config:
    """The tiny configuration with some fields of its decoder changed."""
    return dataclasses.replace(TINY, text=dataclasses.replace(TEXT, **text))


@functools.cache
def tiny_params(config: Config = TINY, seed: int = 0) -> nnx.State:
    """Random parameters in which every tensor matters: queries, taps and biases are not zero."""
    rng = np.random.default_rng(seed)

    def draw(variable):
        spec = variable.get_value()
        spread = spec.shape[-1] ** -0.5 if variable.init == "normal" else 0.3
        value = (variable.init == "ones") + spread * rng.normal(size=spec.shape)
        return variable.replace(jnp.asarray(value, spec.dtype))

    flat = nnx.to_flat_state(abstract_params(config))
    return nnx.from_flat_state([(path, draw(variable)) for path, variable in flat])


@functools.partial(jax.jit, static_argnames="config")
def read(params, config, tokens, lengths, cache):
    """Returns (all logits, the cache) after reading tokens."""
    out = forward(params, config, tokens, lengths, cache)
    return unembed(params, config, out.hidden), out.cache


def read_in_chunks(params, config, tokens, sizes, width, max_block=4, capacity=64):
    """Reads one row in chunks of the given sizes, each padded to `width`; returns logits, cache."""
    cache = init_cache(config.text, 1, capacity, max_block, jnp.float32)
    logits, at = [], 0
    for size in sizes:
        chunk = np.zeros((1, width), np.int32)
        chunk[0, :size] = tokens[at : at + size]
        out, cache = read(params, config, chunk, jnp.array([size], jnp.int32), cache)
        logits.append(np.asarray(out[0, :size]))
        at += size
    assert at == len(tokens)
    return np.concatenate(logits), cache


def visible(cache: Cache, config: Config) -> list[np.ndarray]:
    """Everything in a cache that later tokens can see, in order of position."""
    text, n = config.text, int(cache.length.max())
    found = [np.asarray(cache.length)]
    for i, layer in enumerate(cache.layers):
        reach = (text.attention(i).window or n + 1) - 1
        for buffer in (layer.k, layer.v):
            found.append(np.asarray(read_before(buffer, cache.length, min(reach, n))))
        for state in jax.tree.leaves(layer.conv):
            found.append(np.asarray(read_before(state, cache.length, text.conv_kernel_size - 1)))
    return found


def interpret_mosaic(monkeypatch, kernel):
    """Makes `kernel`, a module with a Mosaic GPU kernel, run in the interpreter."""
    run, params = kernel.run, plgpu.InterpretGPUParams()
    monkeypatch.setattr(kernel, "run", lambda *args: run(*args[:-1], params))
    jax.clear_caches()
