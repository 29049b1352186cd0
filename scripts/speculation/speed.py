"""Speed of one row from its first token to the end of its reply, beside plain decoding.

The loops are the engine's own; a table of costs fixes how many drafts one of them verifies, so that
two programs serve all.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from nano import batches

import inkling_jax as ij
from inkling_jax import decoding
from inkling_jax.cache import init_cache
from inkling_jax.draft_layers import init_context
from inkling_jax.drafting import NEVER
from inkling_jax.engine import BLOCK_STEPS
from inkling_jax.generation import NO_TOKEN, Requests
from inkling_jax.prompts import make_prompt
from inkling_jax.proposing import Speculator
from inkling_jax.reading import read_prompts
from inkling_jax.sampling import Sampling, keys_from_seeds
from speculation.prompts import ASKED, Prompt, middle, rates, some

PLAIN = "none"
LONGER = 6  # prompts that are also continued to a fixed length
Timed = tuple[int, int, float]  # tokens, rounds, seconds


@dataclasses.dataclass(frozen=True)
class Replies:
    """A model whose replies are timed.

    speculator: what prompts are read with.
    context: tokens of a prompt and its reply, at most; tokens: of the reply.
    spare: what the last reply's tokens lay in, for the next one, as in the engine.
    """

    engine: ij.Engine
    speculator: Speculator
    context: int
    tokens: int
    spare: dict[tuple[int, int], decoding.Rings] = dataclasses.field(default_factory=dict)

    def begin(
        self, prompt: Prompt, temperature: float, seed: int, stops: bool = True
    ) -> decoding.State:
        """Reads a prompt and draws the first token; unless it `stops` a reply has all tokens."""
        engine, made = self.engine, make_prompt(self.engine.config, self.engine.tokenizer, prompt)
        read = read_prompts(
            engine.params, engine.config, [made], *self._room, None, self.speculator,
            self.spare.pop(self._room, None),
        )  # fmt: skip
        return decoding.begin(*read, self._requests(temperature, seed, stops), 0)[0]

    def blank(self) -> decoding.State:
        """Returns a state of the shapes that `begin` gives, without reading anything."""
        config, dtype = self.engine.config.text, self.engine.params["embed"]["weight"].dtype
        cache = init_cache(config, 1, *self._room, dtype)
        context = init_context(self.speculator.config, 1, self._room[0], dtype)
        logits = jnp.zeros((1, config.unpadded_vocab_size), jnp.float32)
        read = jax.device_put((logits, cache, context), jax.devices()[0])  # as what was computed
        return decoding.begin(*read, self._requests(1.0, 0), 0)[0]

    def finish(self, state: decoding.State, speculator: Speculator | None) -> Timed:
        """Decodes to the end of the reply, using up its state."""
        context = decoding.rings(state).context
        state = jax.block_until_ready(state if speculator else decoding.base(state))
        done = np.asarray(decoding.base(state).done)
        parts = decoding.Parts.of(self.engine.params, speculator)
        start = time.perf_counter()
        end, report = decoding.advance(parts, self.engine.config, state, done, BLOCK_STEPS, 0)
        seen = report.fetch()
        seconds = time.perf_counter() - start
        rings = decoding.rings(end)
        self.spare[self._room] = rings if speculator else rings._replace(context=context)
        tokens = int((seen.tokens.ids >= 0).sum())
        return tokens, int((seen.rounds.proposed >= 0).sum()) if seen.rounds else tokens, seconds

    @property
    def _room(self) -> tuple[int, int]:
        drafts = self.speculator.drafts
        return self.context + drafts, 1 + drafts

    def _requests(self, temperature: float, seed: int, stops: bool = True) -> Requests:
        setting = ij.SamplingParams(temperature=temperature)
        stop_ids = jnp.array([self.engine.stop_ids], jnp.int32)
        stop_ids = stop_ids if stops else jnp.full_like(stop_ids, NO_TOKEN)
        budget = jnp.array([self.tokens], jnp.int32)
        return Requests(Sampling.stack([setting]), keys_from_seeds([seed]), stop_ids, budget)


def verifying(speculator: Speculator, drafts: int) -> Speculator:
    """Returns a speculator that lets costs choose, and chooses always the same."""
    cost = np.where(np.arange(speculator.drafts + 1) <= drafts, 1.0, NEVER)
    return dataclasses.replace(speculator, cost=jnp.asarray(cost, jnp.float32))


def compile_all(replies: Replies, source: batches.Source) -> None:
    """Compiles all programs, at the same time where Python lets them."""
    began, loops = time.monotonic(), {"plain": None, "speculative": replies.speculator}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = {
            pool.submit(replies.finish, replies.blank(), loops[name]): name for name in loops
        }
        for kind in ASKED:
            [prompt] = some(kind, source, 1)
            running[pool.submit(replies.begin, prompt, 1.0, 0)] = f"reading {kind}"
        for future in concurrent.futures.as_completed(running):
            future.result()
            print(f"{running[future]}: {time.monotonic() - began:.0f} s to compile", flush=True)


def compare(
    replies: Replies,
    loops: dict[str, Speculator | None],
    prompts: Sequence[Prompt],
    temperature: float,
) -> dict[str, dict[str, Any]]:
    """Returns each loop's speed on the same prompts; a few also go on behind a reply's end."""
    ended: dict[str, list[Timed]] = {name: [] for name in loops}
    longer: dict[str, list[Timed]] = {name: [] for name in loops}
    for seed, prompt in enumerate(prompts):
        for found in (ended, longer)[: 2 if seed < LONGER else 1]:
            for name, speculator in loops.items():
                state = replies.begin(prompt, temperature, seed, found is ended)
                if not decoding.base(state).done.all():
                    found[name].append(replies.finish(state, speculator))
    plain, table = np.array(ended[PLAIN]), {}
    for name in loops:
        table[name] = summary(np.array(ended[name]), np.array(longer[name]), plain)
        loop = table[name]["tokens_per_round"] / table[name]["ms_per_round"]
        table[name]["loop_times_plain"] = round(loop * table[PLAIN]["ms_per_round"], 3)
    return table


def summary(timed: np.ndarray, longer: np.ndarray, plain: np.ndarray) -> dict[str, Any]:
    """Sums up replies [n, 3] (tokens, rounds, seconds) of one loop, beside those of the plain one.

    A line through the seconds of these and of `longer` ones over their rounds parts the time of a
    round (of a token without drafts) from what a call costs once.
    """
    tokens, rounds, seconds = timed.T
    plain_tokens, _, plain_seconds = plain.T
    speed = tokens.sum() / seconds.sum()
    slope, once = np.polyfit(*np.concatenate((timed, longer))[:, 1:].T, 1)
    figures = {
        "tokens_per_second": speed,
        "tokens_per_round": tokens.sum() / rounds.sum(),
        "ms_per_round": 1e3 * slope,
        "ms_per_call": 1e3 * once,
        "times_plain": speed / (plain_tokens.sum() / plain_seconds.sum()),
    }
    ratios = rates(tokens, seconds) / rates(plain_tokens, plain_seconds)
    return {
        "prompts": len(tokens),
        "tokens": int(tokens.sum()),
        **{name: round(float(value), 4) for name, value in figures.items()},
        "times_plain_interval": middle(ratios),
    }
