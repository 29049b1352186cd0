"""What a request asks of the sampler, checked by name; host side only."""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from inkling_jax.config_fields import is_whole
from inkling_jax.errors import InputError

GREEDY_BELOW = 1e-5  # temperatures under it mean the most probable token
HOTTEST = 3e38  # the sampler divides in float32
MAX_ALTERNATIVES = 20

_UNSUPPORTED = (
    *("n", "best_of", "num_beams", "use_beam_search", "length_penalty", "logit_bias", "bad_words"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "typical_p"),
    *("guided_decoding", "structured_outputs", "response_format", "logits_processors"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of one request; None means the checkpoint's `generation_config.json` decides.

    Attributes:
        max_tokens: most tokens to generate; None is 256, or as many as fit.
        temperature: divides the logits after the softcap; below 1e-5 it means greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: then keep the fewest of them that hold this share of their probability.
        min_p: then keep tokens at least this probable, relative to the most probable one.
        seed: 0 to 2**63 - 1; the same seed gives the same text. None draws one.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end the text besides the checkpoint's own.
        ignore_eos: do not end at the checkpoint's own stop ids.
        logprobs: log probabilities of the tokens with this many alternatives, 0 to 20.
        prompt_logprobs: the same for the tokens of the prompt.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __new__(cls, **options: Any) -> Self:
        known = {field.name for field in dataclasses.fields(cls)}
        for name in options.keys() - known:
            if name in _UNSUPPORTED:
                raise InputError(f"sampling: {name} is not supported, leave it out")
            raise InputError(
                f"sampling: unknown option {name}, known are {', '.join(sorted(known))}"
            )
        return super().__new__(cls)

    def __post_init__(self):
        object.__setattr__(self, "stop", _as_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple(self.stop_token_ids))
        self._number("max_tokens", int, 1, math.inf)
        self._number("temperature", float, 0, HOTTEST)
        self._number("top_k", int, 0, math.inf)
        self._number("top_p", float, 0, 1)
        self._number("min_p", float, 0, 1)
        self._number("seed", int, 0, 2**63 - 1)
        self._number("logprobs", int, 0, MAX_ALTERNATIVES)
        self._number("prompt_logprobs", int, 0, MAX_ALTERNATIVES)
        if not all(isinstance(s, str) and s and _is_unicode(s) for s in self.stop):
            raise InputError(f"sampling: stop is {self.stop!r}, it must hold non-empty texts")
        if not all(is_whole(i) and i >= 0 for i in self.stop_token_ids):
            raise InputError(
                f"sampling: stop_token_ids is {self.stop_token_ids!r}, it must hold token ids"
            )
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"sampling: ignore_eos is {self.ignore_eos!r}, use true or false")

    def _number(self, name: str, kind: type, low: float, high: float):
        value = getattr(self, name)
        if value is None:
            return
        right_kind = issubclass(type(value), numbers.Integral if kind is int else numbers.Real)
        if not right_kind or isinstance(value, bool) or not low <= value <= high:
            noun = "a whole number" if kind is int else "a finite number"
            bounds = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
            raise InputError(f"sampling: {name} is {value!r}, it must be {noun} {bounds}")
        object.__setattr__(self, name, kind(value))

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> Self:
        """Reads `generation_config.json`; unless it sets `do_sample`, decoding is greedy."""
        if not config.get("do_sample", False):
            return cls(temperature=0.0)
        names = ("temperature", "top_k", "top_p", "min_p")
        return cls(**{name: config[name] for name in names if config.get(name) is not None})

    def over(self, defaults: Self) -> Self:
        """Returns these settings with the unset ones taken from the defaults."""
        names = ("temperature", "top_k", "top_p", "min_p")
        unset = {name: getattr(defaults, name) for name in names if getattr(self, name) is None}
        return dataclasses.replace(self, **unset)

    @property
    def filters(self) -> bool:
        """Whether these settings keep only a part of the distribution that is drawn from."""
        greedy = self.temperature is not None and self.temperature < GREEDY_BELOW
        top_p = 1 if self.top_p is None else self.top_p
        return not greedy and (self.top_k or 0, top_p, self.min_p or 0) != (0, 1, 0)

    def resolved(self) -> Self:
        """Returns these settings with the unset ones at values that change nothing."""
        return self.over(type(self)(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    value = value.tolist() if hasattr(value, "tolist") else value  # an array
    many = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    return tuple(value) if many else (value,)


def _is_unicode(text: str) -> bool:
    """Whether no half of a surrogate pair stands alone, as in text that was no UTF-8."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
