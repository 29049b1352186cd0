"""A reply's ids split into thinking, text and tool calls (spec: checkpoint.md, "Text").

A reply goes on where the prompt ends, mostly behind `<|message_model|>`: what its first tokens mean
is read from the prompt. Between that marker and the kind of content stands an author's name.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from inkling_jax.streaming import Detokenizer
from inkling_jax.text import Tokenizer

Kind = Literal["thinking", "text", "tool"]

_CONTENT: dict[str, Kind] = {
    "<|content_text|>": "text",
    "<|content_thinking|>": "thinking",
    "<|content_invoke_tool_json|>": "tool",
}
_OPENER = "<|message_model|>"


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool; `arguments` is None where the model wrote no valid JSON, then see `raw`."""

    name: str
    arguments: dict[str, Any] | None
    raw: str


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a reply consists of, each kind joined in order."""

    thinking: str = ""
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some more of a reply; that of a tool call is its JSON as it comes."""

    kind: Kind
    text: str


class ReplySplitter:
    """Splits a reply as it comes; `reply` is what was complete so far."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._markers = {token: marker for marker, token in tokenizer.control.items()}
        self._detokenizer = Detokenizer(tokenizer)
        self._kind: Kind | None = "text"  # None: behind the opener, where a name may stand
        self._name = ""
        self._call = ""
        self._pieces: list[Piece] = []
        self._calls: list[ToolCall] = []
        for token in reversed(prompt):
            if token in self._markers:
                self._enter(self._markers[token])
                break

    @property
    def reply(self) -> Reply:
        """What the pieces so far join to, and the tool calls that are complete."""
        joined = {
            kind: "".join(piece.text for piece in self._pieces if piece.kind == kind)
            for kind in ("thinking", "text")
        }
        return Reply(**joined, tool_calls=tuple(self._calls))

    def add(self, ids: Iterable[int]) -> list[Piece]:
        """Returns the pieces that these ids add."""
        seen = len(self._pieces)
        for token in ids:
            if (marker := self._markers.get(token)) is None:
                self._take(self._detokenizer.add([token]))
            else:
                self._take(self._detokenizer.finish())
                self._leave(named=marker in _CONTENT)
                self._enter(marker)
        return self._pieces[seen:]

    def finish(self) -> list[Piece]:
        """Returns the pieces that were held back; an unfinished tool call counts as one."""
        seen = len(self._pieces)
        self._take(self._detokenizer.finish())
        self._leave(named=False)
        self._kind = "text"
        return self._pieces[seen:]

    def _take(self, text: str):
        if self._kind is None:
            self._name += text
            if any(letter.isspace() for letter in self._name):  # no name, but text without a kind
                self._leave(named=False)
                self._kind = "text"
        elif text:
            self._call += text if self._kind == "tool" else ""
            self._pieces.append(Piece(self._kind, text))

    def _leave(self, named: bool):
        """Ends the current content; what was no name after all is shown."""
        if self._kind == "tool":
            self._calls.append(_tool_call(self._name, self._call))
            self._call = ""
        if self._kind is None and not named and self._name:
            self._pieces.append(Piece("text", self._name))
        if not named:
            self._name = ""

    def _enter(self, marker: str):
        self._kind = None if marker == _OPENER else _CONTENT.get(marker, "text")


def _tool_call(name: str, raw: str) -> ToolCall:
    """Reads `{"name": …, "args": {…}}`; the name may also stand in front of the call."""
    try:
        call = json.loads(raw)
    except (ValueError, RecursionError):
        return ToolCall(name, None, raw)
    if not isinstance(call, dict) or not isinstance(call.get("args", {}), dict):
        return ToolCall(name, None, raw)
    written = call.get("name")
    return ToolCall(written if isinstance(written, str) else name, call.get("args", {}), raw)
