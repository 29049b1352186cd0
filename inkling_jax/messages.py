"""Chat messages in the OpenAI style, checked and brought into one form; host side only."""

import dataclasses
import json
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from inkling_jax.errors import InputError

ROLES = ("system", "user", "assistant", "tool")
_FIELDS = {"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Checked messages, whose image parts are all `{"type": "image"}`, and the pictures' sources.

    Sources are in the order of the parts and of any kind that `images.decode` takes.
    """

    messages: tuple[dict[str, Any], ...]
    images: tuple[Any, ...]


def parse_messages(messages: Any, images: Sequence[Any] = ()) -> Conversation:
    """Checks messages and collects their pictures.

    Args:
        messages: a list of `{"role", "content", ...}`; content is a string or a list of parts
            `{"type": "text", "text"}`, `{"type": "image", "image": source}` or
            `{"type": "image_url", "image_url": {"url": "data:..."}}`.
        images: pictures for the image parts that name none, in order.

    Raises:
        InputError: a message has a wrong form, or pictures and image parts do not match.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError("messages must be a list with at least one message")
    checked, sources = [], []
    for i, message in enumerate(messages):
        checked.append(_message(message, f"messages[{i}]", sources))
    empty = sum(source is None for source in sources)
    if empty != len(images):
        raise InputError(
            f"{len(images)} images are given for {empty} image parts without a source, "
            "the numbers must be equal"
        )
    rest = iter(images)
    filled = tuple(next(rest) if source is None else source for source in sources)
    return Conversation(tuple(checked), filled)


def check_effort(effort: float) -> None:
    """Raises InputError unless this is a thinking effort, 0 to 0.99."""
    if not isinstance(effort, numbers.Real) or not 0 <= effort <= 0.99:
        raise InputError(f"effort is {effort!r}, it must be a number from 0 to 0.99")


def _message(message: Any, where: str, sources: list[Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"{where} is {message!r:.40}, it must be an object with role and content")
    if unknown := sorted(map(str, message.keys() - _FIELDS)):
        raise InputError(f"{where} has the unknown field {unknown[0]}, known are {sorted(_FIELDS)}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InputError(f"{where}.role is {role!r:.40}, it must be one of {', '.join(ROLES)}")
    out = {"role": role, "content": content}
    if isinstance(content, Sequence) and not isinstance(content, str):
        out["content"] = [
            _part(part, f"{where}.content[{i}]", role, sources) for i, part in enumerate(content)
        ]
    elif content is None and role == "assistant" and message.get("tool_calls"):
        out["content"] = ""
    elif not isinstance(content, str):
        raise InputError(f"{where}.content is {content!r:.40}, it must be text or a list of parts")
    for field in ("name", "reasoning_content", "tool_call_id"):
        if (value := message.get(field)) is not None:
            if not isinstance(value, str):
                raise InputError(f"{where}.{field} is {value!r:.40}, it must be text")
            out[field] = value
    if calls := message.get("tool_calls"):
        if role != "assistant" or not isinstance(calls, Sequence):
            raise InputError(f"{where}.tool_calls must be a list in an assistant's message")
        out["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return out


def _part(part: Any, where: str, role: str, sources: list[Any]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "image_url"):
        raise InputError(f"{where} is {part!r:.40}, it must be a text, image or image_url part")
    if role != "user":
        raise InputError(f"{where} is an image of role {role}, images belong in user messages")
    source = part.get(kind)
    if isinstance(source, Mapping):
        source = source.get("url")
    sources.append(source)
    return {"type": "image"}


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"{where} must be an object with function.name and function.arguments")
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}.function.arguments is not valid JSON: {error}") from error
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise InputError(f"{where}.function.arguments must be a JSON object")
    named = {"name": function["name"], "arguments": dict(arguments)}
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", "function": named, **identity}
