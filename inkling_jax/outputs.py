"""What generation and scoring return, and the host's record of a row in progress."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from inkling_jax.generation import NO_TOKEN, Tokens
from inkling_jax.prompts import Prompt
from inkling_jax.reply import Reply, ReplySplitter
from inkling_jax.sampling_params import SamplingParams
from inkling_jax.speculative import Rounds
from inkling_jax.streaming import StopStrings
from inkling_jax.text import Tokenizer

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A token's natural log probability under the model, and the most probable alternatives'."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class GenerationOutput:
    """A finished reply.

    Attributes:
      text: what a reader should see, without thinking, tool calls, control tokens and stop string;
        None without a tokenizer.
      token_ids: generated ids; the last one is the stop id where one ended the reply.
      logprobs, prompt_logprobs: per token, where asked for (none for the prompt's first token).
      finish_reason: "stop" after a stop id or string, "length" when the budget was used up.
      reply: thinking, text and tool calls, None without a tokenizer.
      stats: token counts, seconds, prefill buckets, the context's size, speculative rounds, and
        what decoded by a kernel (`kernel_choice.chosen`).
    """

    text: str | None
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason
    stats: dict[str, Any]
    prompt_logprobs: list[TokenLogprob] | None = None
    reply: Reply | None = None


@dataclasses.dataclass(frozen=True)
class StreamPiece:
    """Some more of a reply; `thinking` and `text` are new, `output` comes with the last piece."""

    text: str
    thinking: str
    token_ids: list[int]
    output: GenerationOutput | None = None


@dataclasses.dataclass(frozen=True)
class Score:
    """How probable a prompt is.

    Attributes:
      logprobs: float32 [T - 1], entry i is log p(token i + 1 | tokens 0 … i).
      logits: float32 [T, unpadded vocabulary], where asked for.
    """

    logprobs: np.ndarray
    logits: np.ndarray | None

    @property
    def sum(self) -> float:
        """Natural log probability of the whole prompt, its first token given."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def perplexity(self) -> float | None:
        """exp(-mean log probability), None for a prompt of one token."""
        return float(np.exp(-self.sum / len(self.logprobs))) if len(self.logprobs) else None


class Row:
    """One request while it is served: its tokens so far and the text that they make."""

    def __init__(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        stop_ids: frozenset[int],
        tokenizer: Tokenizer | None,
    ):
        self.prompt, self.sampling, self.stop_ids = prompt, sampling, stop_ids
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] | None = None
        self._splitter = None if tokenizer is None else ReplySplitter(tokenizer, prompt.ids)
        self._stops = StopStrings(sampling.stop)
        self._text = ""
        self._new_text, self._new_thinking, self._new_ids = "", "", []
        self._rounds: list[dict[str, int]] | None = None

    def take(self, tokens: Tokens, done: bool):
        """Adds a block of the row's tokens, arrays [n]; `done` says that the row ends with it."""
        if self.finish_reason:
            return
        for i, token in enumerate(tokens.ids.tolist()):
            if token == NO_TOKEN:
                break
            self.token_ids.append(token)
            self._new_ids.append(token)
            if self.sampling.logprobs is not None:
                self._logprobs.append(_logprob(tokens, i, self.sampling.logprobs))
            self._show(self._splitter.add([token]) if self._splitter else ())
            if self._stops.stopped:
                self.finish_reason = "stop"
                return
        if done:
            if self._splitter:
                self._show(self._splitter.finish())
            self._see(self._stops.finish())
            stopped = bool(self.token_ids) and self.token_ids[-1] in self.stop_ids
            self.finish_reason = "stop" if stopped else "length"

    def take_rounds(self, rounds: Rounds):
        """Adds what became of the drafts of some rounds, arrays [r]."""
        pairs = zip(rounds.proposed.tolist(), rounds.accepted.tolist(), strict=True)
        new = [{"proposed": p, "accepted": a} for p, a in pairs if p >= 0]
        self._rounds = [*(self._rounds or ()), *new]

    def take_prompt_logprobs(self, scored: Sequence[Tokens], row: int):
        """Keeps the scores of the prompt's tokens, arrays [B, n] chunk by chunk."""
        if (wanted := self.sampling.prompt_logprobs) is None:
            return
        own = [Tokens(*(a[row] for a in dataclasses.astuple(s))) for s in scored]
        every = [_logprob(chunk, i, wanted) for chunk in own for i in range(len(chunk.ids))]
        self._prompt_logprobs = every[: len(self.prompt.ids) - 1]

    def piece(self) -> StreamPiece:
        """Returns what is new since the last call."""
        piece = StreamPiece(self._new_text, self._new_thinking, self._new_ids)
        self._new_text, self._new_thinking, self._new_ids = "", "", []
        return piece

    def output(self, stats: dict[str, Any]) -> GenerationOutput:
        """Returns the finished reply."""
        assert self.finish_reason is not None
        counts: dict[str, Any] = {
            "prompt_tokens": len(self.prompt.ids),
            "image_tiles": sum(len(tiles) for tiles, _ in self.prompt.pictures),
            "generated_tokens": len(self.token_ids),
        }
        if self._rounds is not None:
            counts |= round_stats(self._rounds, len(self.token_ids))
        return GenerationOutput(
            text=None if self._splitter is None else self._text,
            token_ids=self.token_ids,
            logprobs=None if self.sampling.logprobs is None else self._logprobs,
            finish_reason=self.finish_reason,
            stats={**counts, **stats},
            prompt_logprobs=self._prompt_logprobs,
            reply=self._splitter and dataclasses.replace(self._splitter.reply, text=self._text),
        )

    def _show(self, pieces):
        for piece in pieces:
            if piece.kind == "text":
                self._see(self._stops.add(piece.text))
            elif piece.kind == "thinking":
                self._new_thinking += piece.text

    def _see(self, text: str):
        self._text += text
        self._new_text += text


def _logprob(tokens: Tokens, i: int, alternatives: int) -> TokenLogprob:
    ids, values = tokens.top_ids[i, :alternatives], tokens.top_logprobs[i, :alternatives]
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return TokenLogprob(int(tokens.ids[i]), float(tokens.logprobs[i]), tuple(pairs))


def round_stats(rounds: Sequence[dict[str, int]], tokens: int) -> dict[str, Any]:
    """Sums up speculative rounds, those behind the last of `tokens` (a stop string) left out.

    Returns `rounds` as given, `proposed` and `accepted` drafts, `acceptance_length` (tokens per
    round), `acceptance_by_position` (of the rounds that proposed so many, the share that accepted
    them) and `verified_widths` (rounds by drafts verified).
    """
    kept, left = [], tokens - 1  # the first token comes from the prompt
    for entry in rounds:
        if left <= 0:
            break
        kept.append(dict(entry))
        left -= entry["accepted"] + 1
    widest = max((entry["proposed"] for entry in kept), default=0)
    by_position = []
    for place in range(1, widest + 1):
        reached = [entry["accepted"] >= place for entry in kept if entry["proposed"] >= place]
        by_position.append(sum(reached) / len(reached))
    widths = Counter(entry["proposed"] for entry in kept)
    return {
        "rounds": kept,
        "proposed": sum(entry["proposed"] for entry in kept),
        "accepted": sum(entry["accepted"] for entry in kept),
        "acceptance_length": (tokens - 1) / len(kept) if kept else None,
        "acceptance_by_position": by_position,
        "verified_widths": [widths[width] for width in range(widest + 1)],
    }
