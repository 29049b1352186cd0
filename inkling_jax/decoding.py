"""The engine's way to decode in blocks, with a drafter or without one."""

import dataclasses
import math
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from inkling_jax import generation, speculative
from inkling_jax.cache import Cache, on_mesh
from inkling_jax.config import Config
from inkling_jax.draft_layers import Context
from inkling_jax.generation import GenerateState, Requests, Tokens
from inkling_jax.proposing import Speculator
from inkling_jax.sampling import KEY_KIND
from inkling_jax.speculative import Rounds, SpecState
from sharding.partition import by_row, everywhere

KEY, KEY_WORDS = "key", 2  # one random key of KEY_KIND


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parts[Whole]:
    """The arrays of something, taken apart for many calls.

    A call would go through Flax's variables, and make each dataclass anew, in Python: much beside a
    few short steps.
    """

    arrays: list[jax.Array]
    tree: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, whole: Whole) -> Self:
        """Takes apart what a loop decodes with, or what it works on."""
        return cls(*jax.tree.flatten(whole))

    def join(self) -> Whole:
        """Undoes `of`."""
        return jax.tree.unflatten(self.tree, self.arrays)


class Rings(NamedTuple):
    """What a batch is read into: the model's cache, and the drafter's context if there is one."""

    cache: Cache
    context: Context | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Small arrays of a batch, all in one: a call pays for each array, the host for each transfer.

    words: the arrays' elements side by side, of 32 bits each, floats by their bits.
    kinds, tree: static; the arrays' shapes and the names of their dtypes, and what they make. No
      objects with an `__eq__` in Python: JAX compares these at every call, and says of an interrupt
      in one of them (Ctrl-C) that the comparison failed.
    """

    words: Int32[Array, "B w"]
    kinds: tuple[tuple[tuple[int, ...], str], ...] = dataclasses.field(metadata={"static": True})
    tree: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, small: Any) -> Self:
        """Puts arrays [B, ...] of bool, int32, float32 or random keys side by side."""
        parts, tree = jax.tree.flatten(small)
        joined = jnp.concatenate([_words(part) for part in parts], axis=1)
        names = (KEY if _is_key(part) else part.dtype.name for part in parts)
        return cls(joined, tuple(zip((part.shape for part in parts), names, strict=True)), tree)

    def unpack(self) -> Any:
        """Undoes `of`, of a traced array or of one that was fetched."""
        parts, at = [], 0
        for shape, name in self.kinds:
            size = KEY_WORDS if name == KEY else math.prod(shape[1:])
            parts.append(_part(self.words[:, at : at + size], shape, name))
            at += size
        return jax.tree.unflatten(self.tree, parts)


def _is_key(part: jax.Array) -> bool:
    return jnp.issubdtype(part.dtype, jax.dtypes.prng_key)


def _words(part: jax.Array) -> Int32[Array, "B w"]:
    if _is_key(part):
        part = jax.random.key_data(part)
        assert part.shape[1:] == (KEY_WORDS,)
    assert part.dtype == bool or part.dtype.itemsize == 4
    part = part.astype(jnp.int32) if part.dtype == bool else part.view(jnp.int32)
    return part.reshape(part.shape[0], -1)


def _part(words, shape: tuple[int, ...], name: str):
    """Undoes `_words`, of an array of this shape and dtype."""
    if name == KEY:
        return jax.random.wrap_key_data(words.view(jnp.uint32), impl=KEY_KIND)
    return (words.astype(bool) if name == "bool" else words.view(name)).reshape(shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Where a batch stands between two blocks.

    A GPU's graph of the loop works on the rings where they lie and on temporaries, into which the
    rest is unpacked: it stays valid for the next batch that is read into the same rings.

    rest: what else a `GenerateState` or `SpecState` has, but for `done`.
    """

    rings: Parts[Rings]
    rest: Packed

    @classmethod
    def of(cls, state: GenerateState | SpecState) -> Self:
        """Takes apart what the loops work on, and fixes where it lies on a mesh."""
        if isinstance(state, SpecState):
            base, context, spent = state.base, state.context, state.spent
        else:
            base, context, spent = state, None, None
        rest = (base.requests, base.token, base.count, base.finite, spent)
        rings = Rings(on_mesh(base.cache), by_row(context))
        return cls(Parts.of(rings), by_row(Packed.of(rest)))

    def join(self, done: Bool[Array, " B"]) -> GenerateState | SpecState:
        """Undoes `of`, and says which rows have ended."""
        requests, token, count, finite, spent = self.rest.unpack()
        cache, context = self.rings.join()
        base = GenerateState(requests, cache, token, count, done, finite)
        return base if context is None else SpecState(base, context, spent)


class Seen(NamedTuple):
    """What the host looks at after a block: new tokens, which rows are sound, which have ended."""

    tokens: Tokens
    finite: Bool[Array, " B"]
    done: Bool[Array, " B"]
    rounds: Rounds | None


@jax.jit(static_argnames="alternatives", donate_argnames="rings")
def begin(
    logits: Float[Array, "B V"], rings: Rings, requests: Requests, alternatives: int
) -> tuple[State, Packed]:
    """Draws each row's first token; returns the state and, packed, what there is to see."""
    cache, context = rings
    if context is None:
        return _apart(*generation.begin(logits, cache, requests, alternatives))
    return _apart(*speculative.begin(logits, cache, context, requests, alternatives))


@jax.jit(static_argnames=("config", "steps", "alternatives"), donate_argnames="state")
def advance(
    parts: Parts[tuple[nnx.State, Speculator | None]],
    config: Config,
    state: State,
    ended: Bool[Array, " B"] | np.ndarray,
    steps: int,
    alternatives: int,
) -> tuple[State, Packed]:
    """Takes a block of steps, or of rounds; the state is used up. `ended` rows take no part."""
    (params, speculator), begun = parts.join(), state.join(by_row(ended))
    if isinstance(begun, GenerateState):
        return _apart(*generation.decode_block(params, config, begun, steps, alternatives))
    assert speculator is not None
    return _apart(
        *speculative.decode_block(
            params, config, speculator, begun, steps, alternatives=alternatives
        )
    )


def fetch(report: Packed) -> Seen:
    """Waits for what a block has to say."""
    return dataclasses.replace(report, words=np.asarray(report.words)).unpack()


def _apart(
    state: GenerateState | SpecState, tokens: Tokens, rounds: Rounds | None = None
) -> tuple[State, Packed]:
    """Returns the state as the next block takes it, and the report in host memory.

    There the program itself writes it: a transfer after its end would cost as much as a round.
    """
    base = state.base if isinstance(state, SpecState) else state
    report = everywhere(Packed.of(Seen(tokens, base.finite, base.done, rounds)))
    return State.of(state), jax.device_put(report, jax.memory.Space.Host)
