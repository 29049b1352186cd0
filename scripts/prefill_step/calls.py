"""Calls of the product's `prefill`: compiled side by side, loaded, and their work counted."""

import dataclasses
import functools
import os
import time
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.serialize_executable import serialize

from inkling_jax import kernel_choice
from inkling_jax.cache import Cache, init_cache
from inkling_jax.config import inkling2_small
from inkling_jax.generation import prefill
from inkling_jax.planning.floors import Shard, Work, step
from inkling_jax.planning.shapes import device_weights
from scripts.decode_step.parts import MAX_BLOCK, Part, params_shapes, text_only
from scripts.decode_step.programs import load
from sharding.mesh import MeshConfig, abstract_mesh


class Call(NamedTuple):
    """A prefill of one row: a part, "kernels" or "plain", new tokens, and the cache's room."""

    part: Part
    path: str
    tokens: int
    capacity: int

    def __str__(self):
        return f"{self.part.name}/{self.path}/{self.tokens}"


class Program(NamedTuple):
    """A compiled call.

    Attributes:
      run: (params, tokens [1, T], lengths [1], cache) -> (logits, cache); the cache is donated.
      temporaries: bytes that the compiler plans besides arguments and results.
      chosen: what `ops` chose for it.
    """

    run: Any
    temporaries: int
    chosen: dict[str, str]


def new_cache(call: Call) -> Cache:
    """Returns an empty cache."""
    return init_cache(call.part.config.text, 1, call.capacity, MAX_BLOCK, call.part.dtype)


def inputs(call: Call) -> tuple:
    """Returns the shapes of (params, tokens, lengths, cache)."""
    ids = jax.ShapeDtypeStruct((1, call.tokens), jnp.int32)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    shapes = params_shapes(call.part, call.path == "kernels")
    return shapes, ids, lengths, jax.eval_shape(functools.partial(new_cache, call))


def compile_call(call: Call) -> tuple[bytes, int, dict[str, str]]:
    """Returns what `load_call` takes; runs in a process of its own."""
    os.environ[kernel_choice.SWITCH] = str(int(call.path == "kernels"))
    begin = time.monotonic()

    def run(params, tokens, lengths, cache):
        return prefill(params, call.part.config, tokens, lengths, cache)

    lowered = jax.jit(run, donate_argnums=3).lower(*inputs(call))
    traced = time.monotonic()
    program = lowered.compile()
    took = f"{traced - begin:.0f} s of tracing, {time.monotonic() - traced:.0f} s of compiling"
    print(f"# {call}: {took}", flush=True)
    memory: Any = program.memory_analysis()
    return serialize(program)[0], memory.temp_size_in_bytes, kernel_choice.chosen()


def load_call(call: Call, compiled: Future) -> Program:
    """Loads a call."""
    binary, temporaries, chosen = compiled.result()
    args = inputs(call)
    trees = jax.tree.structure((args, {})), jax.tree.structure((0, args[3]))
    return Program(load(binary, trees), temporaries, chosen)


def work(part: Part, start: int, tokens: int) -> Work:
    """Counts, from shapes, what reading `tokens` after `start` others takes."""
    return step("prefill", alone(part), 1, start, tokens, logits=1)


def alone(part: Part) -> Shard:
    """Returns a part as all that a device without others has."""
    mesh = MeshConfig()
    weights = device_weights(params_shapes(part, packed=False), abstract_mesh(mesh))
    return Shard(part.config.text, mesh, weights)


def first_layers(part: Part, layers: int) -> Part:
    """Returns a part of which only the first layers are left."""
    text = part.config.text
    text = dataclasses.replace(
        text, num_hidden_layers=layers, layer_types=text.layer_types[:layers]
    )
    return part._replace(config=text_only(text), formats=part.formats[:layers])


def narrow(layers: int) -> Part:
    """Returns a model of Inkling 2 Small's layers but few channels, heads, experts and words."""
    text = inkling2_small().text
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    text = dataclasses.replace(
        text, hidden_size=256, moe_intermediate_size=256, n_routed_experts=8,
        num_experts_per_tok=2, vocab_size=1024, unpadded_vocab_size=1024, **heads,
        **{f"swa_{name}": n for name, n in heads.items()},
    )  # fmt: skip
    formats = ("nvfp4",) * text.num_hidden_layers
    return first_layers(Part("long", text_only(text), formats, jnp.bfloat16), layers)
