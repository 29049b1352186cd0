"""The engine's way to decode in blocks, with a drafter or without one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from inkling_jax import generation, speculative
from inkling_jax.cache import Cache
from inkling_jax.config import Config
from inkling_jax.drafter import Context
from inkling_jax.generation import GenerateState, Requests, Tokens
from inkling_jax.proposing import Speculator
from inkling_jax.speculative import Rounds, SpecState

State = GenerateState | SpecState

_begin = jax.jit(generation.begin, static_argnames="alternatives", donate_argnames="cache")
_begin_drafted = jax.jit(
    speculative.begin, static_argnames="alternatives", donate_argnames=("cache", "context")
)
_decode_block = jax.jit(
    generation.decode_block,
    static_argnames=("config", "steps", "alternatives"),
    donate_argnames="state",
)
_decode_rounds = jax.jit(
    speculative.decode_block,
    static_argnames=("config", "rounds", "columns", "alternatives"),
    donate_argnames="state",
)


def begin(
    logits: jax.Array, cache: Cache, context: Context | None, requests: Requests, alternatives: int
) -> tuple[State, Tokens]:
    """Draws each row's first token; `context` is the drafter's, None without one."""
    if context is None:
        return _begin(logits, cache, requests, alternatives)
    return _begin_drafted(logits, cache, context, requests, alternatives)


def advance(
    params: nnx.State,
    config: Config,
    speculator: Speculator | None,
    state: State,
    ended: np.ndarray,
    steps: int,
    alternatives: int,
) -> tuple[State, Tokens, Rounds | None]:
    """Takes a block of steps, or of rounds; the state is used up. `ended` rows take no part."""
    done = jnp.asarray(ended)
    if isinstance(state, GenerateState):
        state = dataclasses.replace(state, done=done)
        return (*_decode_block(params, config, state, steps, alternatives), None)
    state = dataclasses.replace(state, base=dataclasses.replace(state.base, done=done))
    return _decode_rounds(params, config, speculator, state, steps, alternatives=alternatives)


def base(state: State) -> GenerateState:
    """Returns what both kinds of state share."""
    return state if isinstance(state, GenerateState) else state.base
