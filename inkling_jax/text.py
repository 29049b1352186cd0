"""Text to token ids and back: tokenizer, chat template, streaming (spec: checkpoint.md, "Text").

No text of a user can become a control token. Control tokens are the tokenizer's added tokens; the
tokenizer itself runs without them, and only whole markers that the chat template wrote are mapped
to ids. To tell them from a user's copy, the template sees user text in which every marker, and
every end that could grow into one, is broken by a random seam, which is taken out again afterwards.
"""

import functools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox
import tokenizers

from inkling_jax.config_fields import read_json
from inkling_jax.errors import InputError
from inkling_jax.messages import Conversation, check_effort


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Attributes:
        control: the control tokens' ids by their text.
        image_token_id: the placeholder of one image tile.
    """

    def __init__(
        self,
        definition: Mapping[str, Any],
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        image_token_id: int | None = None,
    ):
        """Takes what the files hold; `load` reads them.

        Args:
            definition: the content of `tokenizer.json`.
            template: the chat template's source.
            variables: what the template may use besides the messages (`bos_token`, …).
            image_token_id: the placeholder of one image tile.
        """
        added = definition.get("added_tokens") or []
        bare = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        try:
            self.control: dict[str, int] = {token["content"]: token["id"] for token in added}
            self._model = tokenizers.Tokenizer.from_str(json.dumps({**definition, **bare}))
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"tokenizer.json cannot be used: {error}") from error
        self.image_token_id = image_token_id
        self._control_ids = frozenset(self.control.values())
        self._variables = dict(variables or {})
        self._template, self._knows_effort = _compile(template) if template else (None, False)
        self._whole, self._seam_at = _patterns(self.control)

    @classmethod
    def load(cls, directory: str | Path, image_token_id: int | None = None) -> "Tokenizer":
        """Reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

        Raises:
            InputError: there is no `tokenizer.json`, or a file is damaged.
        """
        directory = Path(directory)
        if not (directory / "tokenizer.json").is_file():
            raise InputError(f"{directory} has no tokenizer.json, pass token ids instead of text")
        definition = read_json(directory / "tokenizer.json")
        extra = directory / "tokenizer_config.json"
        variables = read_json(extra) if extra.is_file() else {}
        source = _read_text(directory / "chat_template.jinja")
        source = source or variables.pop("chat_template", None)
        tokens = {key: _token_text(value) for key, value in variables.items() if "_token" in key}
        template = source if isinstance(source, str) else None
        try:
            return cls(definition, template, tokens, image_token_id)
        except InputError as error:
            raise InputError(f"{directory}: {error}") from error

    @property
    def has_template(self) -> bool:
        """Whether messages can be rendered."""
        return self._template is not None

    def is_control(self, token: int) -> bool:
        """Tells whether an id is a control token's."""
        return token in self._control_ids

    def encode(self, text: str) -> list[int]:
        """Encodes text in which nothing is a control token, whatever it looks like."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InputError(f"the text is not valid Unicode at letter {e.start}, use UTF-8") from e
        ids = self._model.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return ids
        # A vocabulary that holds the markers as words: letter by letter they cannot come back.
        ids = [i for letter in text for i in self._model.encode(letter).ids]
        if not self._control_ids.isdisjoint(ids):
            raise InputError(f"the text {text!r:.40} holds a control token of the tokenizer")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids without their control tokens; bytes that are no text become U+FFFD."""
        visible = [i for i in ids if i not in self._control_ids]
        return self._model.decode(visible, skip_special_tokens=False)

    def chat(
        self,
        conversation: Conversation,
        image_tiles: Sequence[int] = (),
        effort: float | None = None,
    ) -> list[int]:
        """Renders messages as a prompt for the model's next message.

        Args:
            conversation: from `messages.parse_messages`.
            image_tiles: number of tiles of each picture, in order.
            effort: thinking effort, 0 to 0.99; None leaves it to the template.

        Returns:
            Token ids, one placeholder per image tile.

        Raises:
            InputError: there is no template, it refuses the messages, or pictures do not match.
        """
        if self._template is None:
            raise InputError(
                "the checkpoint has no chat_template.jinja, use the prompt as raw text"
            )
        messages, variables = list(conversation.messages), dict(self._variables)
        if effort is not None:
            check_effort(effort)
            if self._knows_effort:
                variables["reasoning_effort"] = effort
            else:
                others = (i for i, m in enumerate(messages) if m["role"] != "system")
                level = f"Thinking effort level: {round(effort, 2):g}"
                message = {"role": "system", "content": level}
                messages.insert(next(others, len(messages)), message)
        seam = f"_{secrets.randbits(128)}_"
        guard = functools.partial(_each_text, lambda text: self._break(text, seam))
        variables |= {"messages": guard(messages), "tools": None}  # templates ask for both
        try:
            rendered = self._template.render(**variables, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InputError(f"chat_template.jinja refuses the messages: {error}") from error
        ids: list[int] = []
        for piece in self._whole.split(rendered):
            marker = self.control.get(piece)
            ids += [marker] if marker is not None else self.encode(piece.replace(seam, ""))
        return self._place_images(ids, image_tiles)

    def _break(self, text: str, seam: str) -> str:
        core = text.strip()  # templates may trim, so the outer seams go inside the white space
        lead, _, trail = text.partition(core) if core else (text, "", "")
        return lead + self._seam_at(core, seam) + trail

    def _place_images(self, ids: list[int], image_tiles: Sequence[int]) -> list[int]:
        """Repeats each placeholder once per tile; a template may write the image marker alone."""
        marker = self.control.get("<|content_image|>")
        before: list[int] = []
        place = self.image_token_id
        if place not in ids and marker in ids:
            place, before = marker, [marker]
        found = sum(i == place for i in ids)
        if found != len(image_tiles):
            raise InputError(
                f"chat_template.jinja makes room for {found} images, the messages have "
                f"{len(image_tiles)}"
            )
        if not image_tiles:
            return ids
        if self.image_token_id is None:
            raise InputError("the tokenizer was loaded without the id of the image placeholder")
        tiles = iter(image_tiles)
        out: list[int] = []
        for i in ids:
            out += [*before, *[self.image_token_id] * next(tiles)] if i == place else [i]
        return out


def image_rows(ids: Sequence[int], image_token_id: int, image_tiles: Sequence[int]) -> list[int]:
    """Numbers the placeholders in a prompt: the row of the image features each one stands for.

    Args:
        ids: the prompt; each run of placeholders belongs to one or more whole pictures.
        image_token_id: the placeholder.
        image_tiles: number of tiles of each picture, in order.

    Returns:
        For each token its row, -1 where it is text.

    Raises:
        InputError: placeholders and pictures do not match.
    """
    total = sum(i == image_token_id for i in ids)
    if total != sum(image_tiles):
        raise InputError(
            f"the prompt has {total} image placeholders (id {image_token_id}), the "
            f"{len(image_tiles)} images have {sum(image_tiles)} tiles"
        )
    ends = {sum(image_tiles[: n + 1]) for n in range(len(image_tiles))}
    rows, row = [], 0
    for i, following in zip(ids, [*ids[1:], None], strict=True):
        rows.append(row if i == image_token_id else -1)
        row += i == image_token_id
        if i == image_token_id != following and row not in ends:
            raise InputError(
                f"a run of image placeholders ends after {row} tiles, inside an image; the images "
                f"have {', '.join(map(str, image_tiles))} tiles"
            )
    return rows


def _patterns(control: Mapping[str, int]) -> tuple[re.Pattern[str], Callable[[str, str], str]]:
    """Returns what finds whole markers, and what breaks a text that is or may become one."""
    markers = sorted(control, key=len, reverse=True)
    alternatives = "|".join(map(re.escape, markers)) or "(?!)"
    whole = re.compile(f"({alternatives})")
    starts = re.compile(f"(?=(?:{alternatives}))(?s:.)")
    heads = tuple({m[:i] for m in markers for i in range(1, len(m))})
    tails = tuple({m[i:] for m in markers for i in range(1, len(m))})

    def seam_at(text: str, seam: str) -> str:
        broken = starts.sub(lambda match: match[0] + seam, text)
        before = seam if text.startswith(tails) else ""
        after = seam if text.endswith(heads) else ""
        return before + broken + after

    return whole, seam_at


def _each_text(change: Callable[[str], str], value: Any) -> Any:
    """Changes every text in nested lists and objects, the keys of objects included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_each_text(change, k): _each_text(change, v) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [_each_text(change, item) for item in value]
    return value


def _compile(source: str) -> tuple[jinja2.Template, bool]:
    """Compiles a chat template with the helpers that published ones expect."""

    def refuse(message: str):
        raise jinja2.TemplateError(message)

    def as_json(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    try:
        names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        return environment.from_string(source), "reasoning_effort" in names
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"chat_template.jinja line {error.lineno}: {error.message}") from error


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8") if path.is_file() else None
    except ValueError as error:
        raise InputError(f"{path} is not text in UTF-8: {error}") from error


def _token_text(value: Any) -> Any:
    return value["content"] if isinstance(value, Mapping) and "content" in value else value
