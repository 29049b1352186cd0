"""A model over tp against the same model on one device."""

import argparse
import concurrent.futures
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import inkling_jax as ij
from inkling_jax.cache import init_cache
from inkling_jax.config import Config
from inkling_jax.generation import decode
from inkling_jax.model import forward, unembed
from scripts.decode_step.parts import MAX_BLOCK
from scripts.sharded_parts.programs import row, side_by_side
from scripts.sharded_parts.slices import Slice, drawn_whole, few_layers, on, stored, tokens_of
from sharding.mesh import Switch

NANO = Path(__file__).parents[2] / "checkpoints/inkling-jax-nano"
SWITCHES: tuple[Switch, ...] = ("off", "on")
PROMPT, REPLY = 512, 64  # tokens of nano's text
TOKENS, FEW_TOKENS = 264, 32  # of full width, and where sizes are small
# Of log probabilities and logits in float32; of bfloat16, see `full_width`.
TOLERANCE = {"float32": 5e-4, "bfloat16": 1e-2}


def nano(devices: Sequence[Any], options: argparse.Namespace) -> Iterator[dict | None]:
    """Yields a row for each mesh: greedy text, and log probabilities of it and of its prompt."""
    yield None
    greedy = ij.SamplingParams(
        temperature=0.0, max_tokens=REPLY, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )

    def generated(mesh: str | None) -> ij.GenerationOutput:
        model = ij.load(NANO, dtype="float32", mesh=mesh)
        assert model.tokenizer is not None
        print(f"# nano: {mesh or 'one device'} is loaded", flush=True)
        [output] = model.generate([model.tokenizer.encode(json.__doc__)[:PROMPT]], greedy)
        print(f"# nano: {mesh or 'one device'} has answered", flush=True)
        return output

    def compare(mesh, one_device):
        found, expected = generated(mesh), one_device.result()
        equal = found.token_ids == expected.token_ids
        largest = float(np.max(np.abs(_logprobs(found) - _logprobs(expected))))
        return {
            "text_equal": equal,
            "generated": len(found.token_ids),
            "largest_difference": largest,
            "correct": equal and largest < TOLERANCE["float32"],
        }

    # Not all at once: programs that wait for each other must be started in one order everywhere.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        one_device = pool.submit(generated, None)
        for sp in SWITCHES:
            mesh = f"tp={len(devices)},sp={sp}"
            yield row({"mesh": mesh, "dtype": "float32"}, compare, mesh, one_device)


def _logprobs(output: ij.GenerationOutput) -> np.ndarray:
    """Of the prompt's tokens from the second on and of the generated ones."""
    tokens = [*(output.prompt_logprobs or ()), *(output.logprobs or ())]
    return np.array([token.logprob for token in tokens])


def full_width(devices: Sequence[Any], options: argparse.Namespace) -> Iterator[dict | None]:
    """Yields a row for each dtype and mesh: logits of tokens read at once and of decoded ones.

    In float32 the largest difference counts. In bfloat16, where decoding is by kernels, it is the
    median over the tokens of the relative error: one rounding can tip a token's choice of experts.
    """
    dtypes = ("float32",) if options.small else ("float32", "bfloat16")
    parts = {name: few_layers(devices, jnp.dtype(name), options.small) for name in dtypes}
    count = FEW_TOKENS if options.small else TOKENS
    programs = side_by_side({
        (name, sp): _lower(part, sp, count).compile
        for name, part in parts.items()
        for sp in (None, *SWITCHES)
    })  # fmt: skip
    yield None

    @functools.cache
    def logits(name: str, sp: Switch | None) -> np.ndarray:
        part, mesh = parts[name], parts[name].mesh(sp) if sp else None
        params = drawn_whole(part.whole, mesh)
        return np.asarray(programs[name, sp].result()(params, tokens_of(part, count)))

    def compare(name: str, sp: Switch) -> dict[str, Any]:
        largest, relative = differences(logits(name, sp), logits(name, None))
        error = relative if name == "bfloat16" else largest
        return {
            "tokens": count,
            "largest_difference": largest,
            "relative_error": relative,
            "correct": error < TOLERANCE[name],
        }

    for name in parts:
        for sp in SWITCHES:
            yield row({"mesh": f"tp={len(devices)},sp={sp}", "dtype": name}, compare, name, sp)


def differences(found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Returns the largest difference, and the median of the tokens' relative errors, of [T, V]."""
    apart = np.abs(found - expected)
    relative = np.linalg.norm(apart, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(np.max(apart)), float(np.median(relative))


def _lower(part: Slice, sp: Switch | None, count: int) -> jax.stages.Lowered:
    """On all devices with `sp`, without it on one."""
    mesh, tokens = part.mesh(sp) if sp else None, jax.ShapeDtypeStruct((1, count), jnp.int32)
    with on(mesh):
        run = jax.jit(_read, static_argnums=0)
        return run.lower(part.whole.config, stored(part.whole, mesh), tokens)


def _read(config: Config, params: nnx.State, tokens: Int[Array, "1 T"]) -> Float[Array, "T V"]:
    """Logits after each token: most are read at once, the last as a block that decodes."""
    first, last = tokens[:, :-MAX_BLOCK], tokens[:, -MAX_BLOCK:]
    dtype = params["embed"]["weight"].dtype
    cache = init_cache(config.text, *tokens.shape, MAX_BLOCK, dtype)
    out = forward(params, config, first, jnp.full(1, first.shape[1], jnp.int32), cache)
    decoded, _ = decode(params, config, last, out.cache)
    return jnp.concatenate((unembed(params, config, out.hidden), decoded), axis=1)[0]
