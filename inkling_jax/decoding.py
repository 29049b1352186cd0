"""The engine's way to decode in blocks, with a drafter or without one."""

import dataclasses
import math
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int32

from inkling_jax import generation, speculative
from inkling_jax.cache import Cache, on_mesh
from inkling_jax.config import Config
from inkling_jax.draft_layers import Context
from inkling_jax.generation import GenerateState, Requests, Tokens
from inkling_jax.proposing import Speculator
from inkling_jax.speculative import Rounds, SpecState
from sharding.partition import by_row, everywhere

State = GenerateState | SpecState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parts:
    """The arrays of a model and its drafter, taken apart once for all calls.

    A call would go through Flax's variables one by one, in Python: much beside a few short steps.
    """

    arrays: list[jax.Array]
    tree: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, params: nnx.State, speculator: Speculator | None) -> Self:
        """Takes apart what a loop decodes with."""
        return cls(*jax.tree.flatten((params, speculator)))

    def join(self) -> tuple[nnx.State, Speculator | None]:
        """Undoes `of`."""
        return jax.tree.unflatten(self.tree, self.arrays)


class Rings(NamedTuple):
    """What a batch is read into: the model's cache, and the drafter's context if there is one."""

    cache: Cache
    context: Context | None


class Seen(NamedTuple):
    """What the host looks at after a block: new tokens, which rows are sound, which have ended."""

    tokens: Tokens
    finite: Bool[Array, " B"]
    done: Bool[Array, " B"]
    rounds: Rounds | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """What a block has to say, all in one array: the host waits for one transfer, not for eight.

    words: the parts of a `Seen` side by side, floats by their bits.
    shapes, tree: static; of the parts, and what they make.
    """

    words: Int32[Array, "B w"]
    shapes: tuple[jax.ShapeDtypeStruct, ...] = dataclasses.field(metadata={"static": True})
    tree: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, seen: Seen) -> Self:
        """Puts the arrays of a batch, of bool, int32 or float32, side by side."""
        parts, tree = jax.tree.flatten(seen)
        words = [a.astype(jnp.int32) if a.dtype == bool else a.view(jnp.int32) for a in parts]
        joined = jnp.concatenate([a.reshape(a.shape[0], -1) for a in words], axis=1)
        return cls(joined, tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in parts), tree)

    def fetch(self) -> Seen:
        """Undoes `of`, on the host."""
        ends = np.cumsum([math.prod(like.shape[1:]) for like in self.shapes])
        words = np.split(np.asarray(self.words), ends[:-1], axis=1)
        parts = [
            (part.astype(bool) if like.dtype == bool else part.view(like.dtype)).reshape(like.shape)
            for part, like in zip(words, self.shapes, strict=True)
        ]
        return jax.tree.unflatten(self.tree, parts)


@jax.jit(static_argnames="alternatives", donate_argnames="cache")
def _begin(logits, cache, requests, alternatives):
    return _laid_out(*generation.begin(logits, cache, requests, alternatives))


@jax.jit(static_argnames="alternatives", donate_argnames=("cache", "context"))
def _begin_drafted(logits, cache, context, requests, alternatives):
    return _laid_out(*speculative.begin(logits, cache, context, requests, alternatives))


def _laid_out(state: State, tokens: Tokens, rounds: Rounds | None = None) -> tuple[State, Report]:
    """Fixes where results lie on a mesh: the state as the next block takes it."""
    report = Report.of(Seen(tokens, base(state).finite, base(state).done, rounds))

    def is_cache(part):
        return isinstance(part, Cache)

    def lay(part):
        return on_mesh(part) if is_cache(part) else by_row(part)

    return jax.tree.map(lay, state, is_leaf=is_cache), everywhere(report)


def begin(
    logits: jax.Array, cache: Cache, context: Context | None, requests: Requests, alternatives: int
) -> tuple[State, Report]:
    """Draws each row's first token; `context` is the drafter's, None without one."""
    if context is None:
        return _begin(logits, cache, requests, alternatives)
    return _begin_drafted(logits, cache, context, requests, alternatives)


@jax.jit(static_argnames=("config", "steps", "alternatives"), donate_argnames="state")
def advance(
    parts: Parts,
    config: Config,
    state: State,
    ended: Bool[Array, " B"] | np.ndarray,
    steps: int,
    alternatives: int,
) -> tuple[State, Report]:
    """Takes a block of steps, or of rounds; the state is used up. `ended` rows take no part."""
    params, speculator = parts.join()
    begun = dataclasses.replace(base(state), done=by_row(ended))
    if speculator is None or isinstance(state, GenerateState):
        return _laid_out(*generation.decode_block(params, config, begun, steps, alternatives))
    state = dataclasses.replace(state, base=begun)
    return _laid_out(
        *speculative.decode_block(
            params, config, speculator, state, steps, alternatives=alternatives
        )
    )


def base(state: State) -> GenerateState:
    """Returns what both kinds of state share."""
    return state if isinstance(state, GenerateState) else state.base


def rings(state: State) -> Rings:
    """Returns what the next batch may be read into."""
    return Rings(base(state).cache, None if isinstance(state, GenerateState) else state.context)
