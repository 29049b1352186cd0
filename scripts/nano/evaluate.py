"""Held-out measures of a model: bits per byte of text and shares of exact answers."""

import functools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from inkling_jax.config import Config
from nano import batches, step, wire
from nano.batches import Batch, Sizes, Source
from nano.step import Counts

Evaluate = Callable[[nnx.State, Batch], tuple[Counts, Float[Array, "layers n"]]]


def make_evaluate(config: Config, source: Source) -> Evaluate:
    """Returns the jitted `step.evaluate` of a model."""
    sizes = jnp.array(wire.token_bytes(source.tokenizer))
    return jax.jit(lambda params, batch: step.evaluate(params, config, batch, sizes))


def measure(evaluate: Evaluate, params: nnx.State, made: Iterable[Batch]) -> dict[str, float]:
    """Returns the measures over held-out batches."""
    total = functools.reduce(
        lambda a, b: a + b, (jax.tree.map(np.asarray, evaluate(params, b)[0]) for b in made)
    )
    text = batches.TEXT
    result = {
        "bits_per_byte": total.nll[text] / total.bytes[text] / math.log(2),
        "text_tokens": total.tokens[text],
    }
    for task in (batches.RETRIEVAL, batches.PICTURE, batches.CHAT):
        name = batches.TASKS[task]
        result[name] = total.exact[task] / max(total.answers[task], 1)
        result[f"{name}_items"] = total.answers[task]
        result[f"{name}_nll"] = total.nll[task] / max(total.tokens[task], 1)
    return {name: round(float(value), 5) for name, value in result.items()}


def held_out(source: Source, count: int, sizes: Sizes) -> list[Batch]:
    """Returns the first `count` held-out batches."""
    return [batches.make_batch(source, seed, sizes) for seed in range(count)]
