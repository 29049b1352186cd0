"""A loaded model that takes prompts and gives text; host side, over the functions of generation.py.

A batch is padded to a power of two of rows, so that few programs are compiled.
"""

import contextlib
import dataclasses
import functools
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from inkling_jax import decoding, generation, kernel_choice
from inkling_jax.config import Config
from inkling_jax.decoding import Packed, Rings
from inkling_jax.errors import InputError
from inkling_jax.generation import Requests
from inkling_jax.outputs import GenerationOutput, Row, Score, StreamPiece
from inkling_jax.prompts import Prompt, PromptInput, as_lists, make_prompt
from inkling_jax.proposing import Speculator
from inkling_jax.reading import Scoring, padded_rows, power_of_two, prefill_chunks, read_prompts
from inkling_jax.sampling import Sampling, keys_from_seeds
from inkling_jax.sampling_params import MAX_ALTERNATIVES, SamplingParams
from inkling_jax.text import Tokenizer

SMALLEST_CAPACITY = 512  # without a fixed context, a cache holds a power of two of tokens
MAX_ROWS = 16  # rows of one batch; more prompts are served in turn
BLOCK_STEPS, STREAM_STEPS = 128, 8  # steps between two looks at the tokens
DEFAULT_MAX_TOKENS = 256
STOP_SLOTS = 16


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model ready to use: `inkling_jax.load` makes one.

    After a batch its cache stays on the device, for the next batch of the same shape; `score`, a
    batch of another shape or with pictures, and dropping the engine free it.

    Attributes:
      params: parameters on the device.
      config: the architecture.
      tokenizer: None where the checkpoint has none; prompts are then token ids.
      defaults: sampling settings of `generation_config.json`.
      stop_ids: ids that end a reply.
      context: the most tokens of prompt and reply; None grows with the requests.
      speculator: a drafter that proposes tokens; the replies follow the model alone.
      mesh: the devices that the parameters are spread over; None is one device.
    """

    params: nnx.State = dataclasses.field(repr=False)
    config: Config
    tokenizer: Tokenizer | None = None
    defaults: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    stop_ids: tuple[int, ...] = ()
    context: int | None = None
    speculator: Speculator | None = None
    mesh: Mesh | None = None

    def generate(
        self,
        prompts: Sequence[PromptInput],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        images: Sequence[Sequence[Any]] | None = None,
        raw: bool = False,
        effort: float | None = None,
    ) -> list[GenerationOutput]:
        """Continues each prompt.

        Args:
          prompts: each a text (a user's message where the checkpoint has a chat template), a list
            of chat messages, or a list of token ids.
          sampling: settings for all prompts or one per prompt.
          images: for each prompt the pictures that its image parts or placeholders stand for.
          raw: continue texts as they are.
          effort: thinking effort of chat prompts, 0 to 0.99.

        Raises:
          InputError: a prompt, picture or setting is not usable; it is named.
        """
        prompts = as_lists(prompts)
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise InputError(f"prompts is {prompts!r:.40}, it must be a list of prompts")
        made = self._prompts(prompts, images, raw, effort)
        settings = self._settings(sampling, len(made))
        outputs = []
        for at in range(0, len(made), MAX_ROWS):
            batch = slice(at, at + MAX_ROWS)
            pairs = zip(made[batch], settings[batch], strict=True)
            rows = [self._row(prompt, setting) for prompt, setting in pairs]
            stats: dict[str, Any] = {}
            for _ in self._blocks(rows, BLOCK_STEPS, stats):
                pass
            outputs += [row.output(stats) for row in rows]
        return outputs

    def stream(
        self,
        prompt: PromptInput,
        sampling: SamplingParams | None = None,
        *,
        images: Sequence[Any] = (),
        raw: bool = False,
        effort: float | None = None,
    ) -> Iterator[StreamPiece]:
        """Continues one prompt and yields the reply as it comes; the last piece has the output.

        What `generate` refuses is refused here at once.
        """
        made = self._prompts([prompt], [images], raw, effort)
        row = self._row(made[0], self._settings(sampling, 1)[0])
        stats: dict[str, Any] = {}
        return self._pieces(row, self._blocks([row], STREAM_STEPS, stats), stats)

    def _pieces(
        self, row: Row, blocks: Iterator[None], stats: dict[str, Any]
    ) -> Iterator[StreamPiece]:
        for _ in blocks:
            yield row.piece()
        yield dataclasses.replace(row.piece(), output=row.output(stats))

    def score(
        self,
        prompt: PromptInput,
        *,
        images: Sequence[Any] = (),
        raw: bool = False,
        logits: bool = False,
    ) -> Score:
        """Returns how probable each token of a prompt is, given those before it.

        Args:
          logits: also return all logits, float32 [T, unpadded vocabulary].
        """
        made = self._prompts([prompt], [images], raw, None)
        scoring = Scoring(keep_logits=logits)
        self._spare.clear()
        with on(self.mesh):
            read_prompts(self.params, self.config, made, self._capacity(made, [0]), 1, scoring)
        values = np.concatenate([chunk.logprobs[0] for chunk in scoring.chunks])
        every = np.concatenate(scoring.logits) if logits else None
        return Score(values[: len(made[0].ids) - 1], every)

    def _prompts(self, prompts, images, raw, effort) -> list[Prompt]:
        if not isinstance(raw, bool):
            raise InputError(f"raw is {raw!r:.40}, use True or False")
        images = [()] * len(prompts) if images is None else images
        if not isinstance(images, list | tuple):
            raise InputError(f"images is {images!r:.40}, it must be a list with a list per prompt")
        for each in images:
            if not isinstance(each, list | tuple):
                raise InputError(
                    f"images holds {each!r:.40}, it must hold a list of pictures per prompt"
                )
        if len(images) != len(prompts):
            raise InputError(f"images has {len(images)} lists for {len(prompts)} prompts")
        pairs = zip(prompts, images, strict=True)
        return [make_prompt(self.config, self.tokenizer, p, i, raw, effort) for p, i in pairs]

    def _settings(self, sampling, count: int) -> list[SamplingParams]:
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * count
        right = isinstance(sampling, list | tuple)
        if not right or not all(isinstance(s, SamplingParams) for s in sampling):
            raise InputError(f"sampling is {sampling!r:.40}, it must be of SamplingParams")
        if len(sampling) != count:
            raise InputError(f"sampling has {len(sampling)} settings for {count} prompts")
        return [s.over(self.defaults) for s in sampling]

    def _blocks(self, rows: Sequence[Row], steps: int, stats: dict[str, Any]) -> Iterator[None]:
        """Returns what serves a batch: after each block of steps its tokens are in the rows."""
        budgets = [self._budget(row) for row in rows]
        scored = any(row.sampling.prompt_logprobs is not None for row in rows)
        if scored and self.speculator:
            raise InputError("prompt_logprobs is not supported with a drafter, leave one out")
        capacity = self._capacity([row.prompt for row in rows], budgets)
        scoring = Scoring(MAX_ALTERNATIVES) if scored else None
        return self._serve(rows, budgets, capacity, scoring, steps, stats)

    def _serve(
        self,
        rows: Sequence[Row],
        budgets: Sequence[int],
        capacity: int,
        scoring: Scoring | None,
        steps: int,
        stats: dict[str, Any],
    ) -> Iterator[None]:
        started = time.perf_counter()
        prompts = [row.prompt for row in rows]
        alternatives = MAX_ALTERNATIVES if any(row.sampling.logprobs for row in rows) else 0
        ahead = self.speculator.drafts if self.speculator else 0  # read beyond the last token
        room = (capacity + ahead, 1 + ahead)
        with on(self.mesh):
            shape = (padded_rows(len(prompts)), *room)
            # Encoding pictures may need the memory that the last batch's rings take.
            seeing = any(prompt.pictures for prompt in prompts)
            rings = None if seeing else self._spare.pop(shape, None)
            self._spare.clear()
            logits, rings = read_prompts(
                self.params, self.config, prompts, *room, scoring, self.speculator, rings
            )
            requests = self._requests(rows, budgets, logits.shape[0])
            state, report = decoding.begin(logits, rings, requests, alternatives)
        if scoring is not None:
            for i, row in enumerate(rows):
                row.take_prompt_logprobs(scoring.chunks, i)
        self._hand_out(rows, report)
        stats["prefill_seconds"] = time.perf_counter() - started
        stats["prefill_buckets"] = prefill_chunks(max(len(p.ids) for p in prompts))
        stats["context"] = capacity
        yield
        while not all(row.finish_reason for row in rows):
            done = np.ones(requests.budget.shape, bool)
            done[: len(rows)] = [row.finish_reason is not None for row in rows]
            with on(self.mesh):
                state, report = decoding.advance(
                    self._parts, self.config, state, done, steps, alternatives
                )
            self._hand_out(rows, report)
            stats["kernels"] = kernel_choice.chosen()
            stats["decode_seconds"] = time.perf_counter() - started - stats["prefill_seconds"]
            yield
        self._spare.clear()
        self._spare[shape] = state.rings.join()

    @functools.cached_property
    def _parts(self) -> decoding.Parts[tuple[nnx.State, Speculator | None]]:
        return decoding.Parts.of((self.params, self.speculator))

    @functools.cached_property
    def _spare(self) -> dict[tuple[int, int, int], Rings]:
        """Of the last batch, by rows, capacity and longest block; the next one may be like it.

        At the same addresses a GPU's graph of the loop stays valid: to write it anew would take
        longer than many a reply.
        """
        return {}

    def _hand_out(self, rows: Sequence[Row], report: Packed):
        tokens, finite, done, rounds = decoding.fetch(report)
        for i, row in enumerate(rows):
            if rounds is not None:
                row.take_rounds(jax.tree.map(lambda a, i=i: a[i], rounds))
            if not finite[i]:
                raise InputError(
                    f"the model gave logits that are not finite after {len(row.token_ids)} tokens; "
                    "check that weights and scales of its checkpoint are finite"
                )
            row.take(jax.tree.map(lambda a, i=i: a[i], tokens), bool(done[i]))

    def _row(self, prompt: Prompt, sampling: SamplingParams) -> Row:
        own = () if sampling.ignore_eos else self.stop_ids
        if sampling.stop and self.tokenizer is None:
            raise InputError(
                "stop holds texts, which need a tokenizer.json; use stop_token_ids or leave it out"
            )
        limit = self.config.text.unpadded_vocab_size
        if outside := [i for i in sampling.stop_token_ids if i >= limit]:
            raise InputError(f"stop_token_ids holds {outside[0]}, ids go from 0 to {limit - 1}")
        stop_ids = frozenset((*own, *sampling.stop_token_ids))
        if len(stop_ids) > STOP_SLOTS:
            raise InputError(f"{len(stop_ids)} stop ids are given, at most {STOP_SLOTS} fit")
        return Row(prompt, sampling, stop_ids, self.tokenizer)

    def _budget(self, row: Row) -> int:
        limit = self.context or self.config.text.max_position_embeddings
        room = limit - len(row.prompt.ids)
        if room < 1:
            raise InputError(
                f"the prompt has {len(row.prompt.ids)} tokens, with a context of {limit} it may "
                f"have {limit - 1}"
            )
        if row.sampling.max_tokens is None:
            return min(DEFAULT_MAX_TOKENS, room)
        if row.sampling.max_tokens > room:
            raise InputError(
                f"max_tokens is {row.sampling.max_tokens}, behind a prompt of "
                f"{len(row.prompt.ids)} tokens a context of {limit} has room for {room}"
            )
        return row.sampling.max_tokens

    def _capacity(self, prompts: Sequence[Prompt], budgets: Sequence[int]) -> int:
        limit = self.config.text.max_position_embeddings
        need = max(len(p.ids) + n for p, n in zip(prompts, budgets, strict=True))
        if need > (self.context or limit):
            raise InputError(
                f"the prompt has {need} tokens, the context holds {self.context or limit}"
            )
        return self.context or min(power_of_two(need, SMALLEST_CAPACITY), limit)

    def _requests(self, rows: Sequence[Row], budgets: Sequence[int], size: int) -> Requests:
        idle = size - len(rows)
        settings = [row.sampling for row in rows] + [SamplingParams(temperature=0.0)] * idle
        seeds = [secrets.randbits(63) if s.seed is None else s.seed for s in settings]
        stop_ids = np.full((size, STOP_SLOTS), generation.NO_TOKEN, np.int32)
        for i, row in enumerate(rows):
            stop_ids[i, : len(row.stop_ids)] = sorted(row.stop_ids)
        budget = np.array([*budgets, *[0] * idle], np.int32)
        unseeded = np.array([row.sampling.seed is None for row in rows] + [False] * idle)
        chooses = self.speculator is not None and self.speculator.cost is not None
        return Requests(
            Sampling.stack(settings), keys_from_seeds(seeds), jnp.asarray(stop_ids),
            jnp.asarray(budget),
            jnp.asarray(unseeded) if chooses and unseeded.sum() > 1 else None,
        )  # fmt: skip


def on(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Lets the functions called inside run over a mesh; a generator must not yield inside."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)
