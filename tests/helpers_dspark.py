"""A tiny target, a drafter that agrees with it now and then, and ways to run both."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers import tiny, tiny_params

from inkling_jax import generation, speculative
from inkling_jax.config import FULL, SLIDING
from inkling_jax.drafter import init_drafter
from inkling_jax.drafter_config import DrafterConfig
from inkling_jax.proposing import Speculator
from inkling_jax.sampling import Sampling, keys_from_seeds
from inkling_jax.sampling_params import SamplingParams

TARGET = tiny(num_hidden_layers=2, layer_types=(SLIDING, FULL))
VOCAB = TARGET.text.unpadded_vocab_size
DRAFTER = DrafterConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    block_size=8,
    mask_token_id=3,
    target_layer_ids=(-1, 0),
    num_target_layers=2,
    markov_rank=VOCAB,
    enable_confidence_head=True,
    confidence_head_with_markov=True,
    own_embedding=False,
    own_head=False,
)
GREEDY = SamplingParams(temperature=0.0)

plain = jax.jit(generation.generate, static_argnames=("config", "max_new", "alternatives"))
drafted = jax.jit(speculative.generate, static_argnames=("config", "max_new", "alternatives"))


@functools.cache
def taught_drafter(config: DrafterConfig = DRAFTER, strength: float = 6.0) -> nnx.State:
    """A random drafter whose Markov head knows what follows each token in the target's text.

    The table has a row per token, so a draft is right where the text depends on the last token.
    """
    params = init_drafter(config, jax.random.key(5))
    rows, width = 24, 40
    prompts = np.random.default_rng(1).integers(0, VOCAB, (rows, 3), dtype=np.int32)
    tokens, _ = run(plain, prompts, GREEDY, width)
    follower = np.zeros((VOCAB, VOCAB))
    for row in np.asarray(tokens.ids):
        np.add.at(follower, (row[:-1], row[1:]), 1)
    best = follower.argmax(1)
    params["markov"]["w1"] = params["markov"]["w1"].replace(strength * jnp.eye(VOCAB))
    w2 = jnp.zeros((VOCAB, VOCAB)).at[best, jnp.arange(VOCAB)].set(strength)
    params["markov"]["w2"] = params["markov"]["w2"].replace(w2)
    return params


def speculator(drafts: int, cost=None, config: DrafterConfig = DRAFTER) -> Speculator:
    """The taught drafter, verifying a fixed number of drafts or as many as pay."""
    cost = None if cost is None else jnp.asarray(cost, jnp.float32)
    return Speculator(taught_drafter(config), config, drafts, cost)


def run(generate, prompts, sampling, max_new, seeds=None, lengths=None, stop=(-1,), **options):
    """Calls `generate` for a batch; `sampling` is one setting for all rows or one per row."""
    prompts = jnp.asarray(prompts, jnp.int32)
    rows = prompts.shape[0]
    each = [sampling] * rows if isinstance(sampling, SamplingParams) else sampling
    lengths = [prompts.shape[1]] * rows if lengths is None else lengths
    return generate(
        tiny_params(TARGET),
        TARGET,
        *options.pop("drafter", ()),
        prompts,
        jnp.asarray(lengths, jnp.int32),
        Sampling.stack(each),
        keys_from_seeds(range(rows) if seeds is None else seeds),
        max_new,
        stop_ids=jnp.tile(jnp.asarray(stop, jnp.int32), (rows, 1)),
        **options,
    )


def only_width(width: int, drafts: int) -> np.ndarray:
    """A cost table under which every row verifies exactly `width` drafts."""
    return np.where(np.arange(drafts + 1) <= width, 1.0, 1e9)


def with_heads(**fields) -> DrafterConfig:
    """The tiny drafter's configuration with other fields."""
    return dataclasses.replace(DRAFTER, **fields)
