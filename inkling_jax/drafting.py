"""Sets up a drafter for a model: which one, how many drafts, and what each number of them costs."""

import dataclasses
import time
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from inkling_jax import decoding, speculative
from inkling_jax.cache import init_cache
from inkling_jax.config import Config
from inkling_jax.draft_layers import init_context
from inkling_jax.errors import InputError
from inkling_jax.generation import Requests
from inkling_jax.load_drafter import find_drafter, load_drafter
from inkling_jax.proposing import Speculator
from inkling_jax.sampling import Sampling, keys_from_seeds
from inkling_jax.sampling_params import SamplingParams
from sharding.hosts import same_everywhere
from sharding.mesh import batch_parts

AUTO = "auto"
ROUNDS, REPEATS = 24, 3
CAPACITY = 512
NEVER = 1e9


def open_speculator(
    model: Path,
    config: Config,
    dtype: DTypeLike,
    drafter: str | Path | None,
    draft_tokens: int | Literal["auto"] | None,
) -> Speculator | None:
    """Loads the drafter that was asked for; the model itself is not needed yet.

    Args:
      model: the model's directory, where a drafter "auto" is looked for.
      config, dtype: the model's.
      drafter, draft_tokens: as `load` takes them. Where the number of drafts is chosen round by
        round, the costs are equal until `with_costs` has measured them.

    Raises:
      InputError: the drafter is absent, damaged, for another model, or not made for so many drafts.
    """
    if not isinstance(drafter, str | Path | None) or drafter == "":
        raise InputError(f"drafter is {drafter!r:.40}, it must be a directory, auto or none")
    directory = find_drafter(model) if drafter == AUTO else drafter
    if directory in (None, "none"):
        if draft_tokens is not None and (drafter, draft_tokens) != (AUTO, AUTO):
            raise InputError(f"draft-tokens is {draft_tokens}, but there is no drafter; name one")
        return None
    found, params = load_drafter(Path(directory), config.text, dtype)
    if draft_tokens is None:
        draft_tokens = AUTO if found.enable_confidence_head else found.block_size
    if draft_tokens == AUTO:
        cost = jnp.ones(found.block_size + 1, jnp.float32)
        return Speculator(params, found, found.block_size, cost)
    return Speculator(params, found, draft_tokens)


def with_costs(params: nnx.State, config: Config, speculator: Speculator) -> Speculator:
    """Measures the costs of a speculator that chooses how many drafts to verify."""
    if speculator.cost is None:
        return speculator
    cost = same_everywhere(measure_costs(params, config, speculator))
    return dataclasses.replace(speculator, cost=jnp.asarray(cost, jnp.float32))


def measure_costs(params: nnx.State, config: Config, speculator: Speculator) -> np.ndarray:
    """Returns the time of a round that verifies 0…drafts drafts, in plain rounds; rising.

    One row is decoded with each width in turn, by one program, and the fastest of a few runs
    counts. Costs are rounded to hundredths: a seed's text should not depend on the measurement.
    """

    @jax.jit(static_argnames="config")
    def block(params, config, speculator, state):
        begun = state.join(jnp.zeros(state.rest.words.shape[0], bool))
        return speculative.decode_block(params, config, speculator, begun, ROUNDS)

    widths = np.arange(speculator.drafts + 1)
    seconds = []
    state = _state(config, speculator, params["embed"]["weight"].dtype)
    for width in widths:
        forced = jnp.asarray(np.where(widths <= width, 1.0, NEVER), jnp.float32)
        chosen = Speculator(speculator.params, speculator.config, speculator.drafts, forced)
        runs = []
        for _ in range(REPEATS + 1):  # the first compiles
            start = time.perf_counter()
            _, _, rounds = jax.block_until_ready(block(params, config, chosen, state))
            runs.append((time.perf_counter() - start) / int((rounds.proposed[:1] >= 0).sum()))
        seconds.append(min(runs))
    return np.maximum.accumulate(np.round(np.array(seconds) / seconds[0], 2))


def _state(config: Config, speculator: Speculator, dtype):
    """A row (of each part of a batch) after one token, with room for all rounds, ends at none."""
    ahead, rows = speculator.drafts + 1, batch_parts()
    capacity = max(CAPACITY, (ROUNDS + 1) * ahead)
    cache = init_cache(config.text, rows, capacity, ahead, dtype)
    context = init_context(speculator.config, rows, capacity, dtype)
    requests = Requests(
        Sampling.stack([SamplingParams(temperature=1.0)] * rows),
        keys_from_seeds([0] * rows),
        jnp.full((rows, 1), -1, jnp.int32),
        jnp.full(rows, ROUNDS * ahead, jnp.int32),
    )
    logits = jnp.zeros((rows, config.text.unpadded_vocab_size), jnp.float32)
    return decoding.begin(logits, decoding.Rings(cache, context), requests, 0)[0]
