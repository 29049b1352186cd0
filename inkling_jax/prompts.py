"""What a user passes as a prompt, brought into token ids and picture tiles; host side."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from inkling_jax import images as pictures
from inkling_jax.config import Config
from inkling_jax.config_fields import is_whole
from inkling_jax.errors import InputError
from inkling_jax.messages import parse_messages
from inkling_jax.text import Tokenizer, image_rows

PromptInput = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt ready to be read.

    Attributes:
      ids: token ids, one placeholder per image tile.
      image_rows: for each token the row of its tile among the prompt's pictures, -1 for text.
      pictures: (tiles [n, t, t, 3], (rows, columns)) of each picture.
    """

    ids: list[int]
    image_rows: list[int]
    pictures: list[tuple[np.ndarray, tuple[int, int]]]


def make_prompt(
    config: Config,
    tokenizer: Tokenizer | None,
    prompt: PromptInput,
    images: Sequence[Any] = (),
    raw: bool = False,
    effort: float | None = None,
) -> Prompt:
    """Makes a prompt of text, chat messages or token ids.

    Args:
      prompt: text is a user's message where there is a template, unless `raw`.
      images: sources of the pictures, in order.

    Raises:
      InputError: the prompt is empty, has ids outside the vocabulary, needs a tokenizer or template
        that is missing, does not match its pictures, or is none for which `effort` means something.
    """
    prompt = as_lists(prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise InputError(
            f"a prompt is {prompt!r:.40}, it must be a text, a list of token ids or of messages"
        )
    if _is_ids(prompt):
        _refuse_effort(effort)
        ids, images = [as_lists(token) for token in prompt], tuple(images)
        tiles = [pictures.tiles(source, config.vision.tile_size) for source in images]
    elif tokenizer is None:
        raise InputError("the checkpoint has no tokenizer.json, pass token ids instead of text")
    elif isinstance(prompt, str) and (raw or not tokenizer.has_template):
        if images:
            raise InputError("a raw text has no place for images, use messages or a chat prompt")
        _refuse_effort(effort)
        ids, tiles = tokenizer.encode(prompt), []
    else:
        if isinstance(prompt, str):
            parts = [*({"type": "image"} for _ in images), {"type": "text", "text": prompt}]
            prompt = [{"role": "user", "content": parts if images else prompt}]
        conversation = parse_messages(prompt, images)
        tiles = [pictures.tiles(s, config.vision.tile_size) for s in conversation.images]
        ids = tokenizer.chat(conversation, [len(t) for t, _ in tiles], effort)
    if not ids:
        raise InputError("the prompt is empty, it must have at least one token")
    limit = config.text.unpadded_vocab_size
    for at, token in enumerate(ids):
        if not is_whole(token) or not 0 <= token < limit:
            raise InputError(
                f"token {at} of the prompt is {token!r:.40}, ids are whole numbers from 0 to "
                f"{limit - 1}"
            )
    rows = image_rows(ids, config.image_token_id, [len(t) for t, _ in tiles])
    return Prompt(ids, rows, tiles)


def _refuse_effort(effort: float | None) -> None:
    if effort is not None:
        raise InputError("effort is for chat prompts, leave it out with raw texts and token ids")


def as_lists(value: Any) -> Any:
    """Returns an array of numbers as lists of them, and anything else as it is."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    return value.tolist() if isinstance(value, np.ndarray | jax.Array) else value


def _is_ids(prompt: Any) -> TypeGuard[Sequence[int]]:
    """Whether ids are meant, which are still to be checked."""
    return not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], str | Mapping))
