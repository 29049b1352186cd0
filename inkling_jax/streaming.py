"""Text from tokens as they come: whole characters only, and nothing of a stop string."""

from collections.abc import Iterable, Sequence
from typing import Protocol


class Decoder(Protocol):
    """What is needed of a tokenizer: `text.Tokenizer` has it."""

    def decode(self, ids: Iterable[int]) -> str: ...

    def is_control(self, token: int) -> bool: ...


class Detokenizer:
    """Decodes a growing list of ids; the pieces join to the decoding of the whole list."""

    def __init__(self, tokenizer: Decoder):
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the ids before, since some decoders look at neighbours
        self._pending: list[int] = []  # ids since the last end of a character
        self._shown = 0  # letters of the pending ids that were returned

    def add(self, ids: Iterable[int]) -> str:
        """Returns the text that is certain after these ids; the end of it may be held back."""
        self._pending += [i for i in ids if not self._tokenizer.is_control(i)]
        text = self._text()
        certain = text.rstrip("\ufffd")  # later bytes may complete the character
        piece = certain[self._shown :]
        self._shown = len(certain)
        if certain == text and self._pending:
            self._context, self._pending, self._shown = self._pending, [], 0
        return piece

    def finish(self) -> str:
        """Returns what was held back and starts anew."""
        piece = self._text()[self._shown :]
        self._context, self._pending, self._shown = [], [], 0
        return piece

    def _text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *self._pending])[len(before) :]


class StopStrings:
    """Ends a stream of text before the first stop string that it completes."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """Returns the text that can be shown; sets `stopped` when a stop string is complete."""
        if self.stopped:
            return ""
        self._held += piece
        # The string that is complete first, as if letters came one by one; then the longest.
        found = [(self._held.find(s) + len(s), -len(s)) for s in self._stops if s in self._held]
        if found:
            end, length = min(found)
            shown, self._held, self.stopped = self._held[: end + length], "", True
            return shown
        keep = max((self._overlap(s) for s in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """Returns what was held back because a stop string might have followed."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """The length of the longest end of the held text that begins the stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
