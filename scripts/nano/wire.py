"""Tokenizer and chat template in the family's wire format (spec: checkpoint.md, "Text")."""

from collections.abc import Iterable
from typing import Any

import jinja2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nano.recipe import MODEL_TOKENS

IMAGE, PAD, DOCUMENT = "<|image|>", "<|pad|>", "<|document|>"
MODEL, END_SAMPLING = "<|message_model|>", "<|content_model_end_sampling|>"
SPECIAL = (
    "<|message_system|>",
    "<|message_user|>",
    MODEL,
    "<|message_tool|>",
    "<|content_text|>",
    "<|content_image|>",
    "<|content_thinking|>",
    "<|content_invoke_tool_json|>",
    "<|end_message|>",
    END_SAMPLING,
    IMAGE,
    PAD,
    DOCUMENT,
)
# Words with their space, single digits, runs of punctuation, runs of white space.
_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Each part of a message is a message of its own; an image is its marker and one placeholder, which
# the caller repeats once per tile.
TEMPLATE = """\
{%- if effort is defined and effort is not none -%}
<|message_system|><|content_text|>Thinking effort level: {{ effort }}<|end_message|>
{%- endif -%}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{%- set opener = '<|message_' ~ role ~ '|>' ~ (message.name or '') -%}
{%- if role == 'model' and message.reasoning_content -%}
{{ opener }}<|content_thinking|>{{ message.reasoning_content }}<|end_message|>
{%- endif -%}
{%- if message.content is string -%}
{{ opener }}<|content_text|>{{ message.content }}<|end_message|>
{%- else -%}
{%- for part in message.content or [] -%}
{%- if part.type == 'text' -%}
{{ opener }}<|content_text|>{{ part.text }}<|end_message|>
{%- else -%}
{{ opener }}<|content_image|><|image|><|end_message|>
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{ opener }}<|content_invoke_tool_json|>{{ call | tojson }}<|end_message|>
{%- endfor -%}
{%- if role == 'model' -%}<|content_model_end_sampling|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|message_model|>{%- endif -%}
"""
_template = jinja2.Environment(autoescape=False).from_string(TEMPLATE)

Messages = list[dict[str, Any]]


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Trains byte-level BPE; the special tokens follow the ordinary ones, as in the family."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    ordinary = MODEL_TOKENS - len(SPECIAL)
    trainer = trainers.BpeTrainer(
        vocab_size=ordinary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != ordinary:
        raise SystemExit(f"tokenizer: {tokenizer.get_vocab_size()} tokens instead of {ordinary}")
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def render(messages: Messages, tiles: int = 0, effort: float | None = None, **flags: bool) -> str:
    """Returns the chat as text, with `tiles` placeholders for its image."""
    text = _template.render(messages=messages, effort=effort, **flags)
    return text.replace(IMAGE, IMAGE * tiles)


def token_bytes(tokenizer: Tokenizer) -> list[int]:
    """Returns how many bytes of text each token stands for; special tokens stand for none."""
    sizes = [0] * MODEL_TOKENS
    for token, index in tokenizer.get_vocab(with_added_tokens=False).items():
        sizes[index] = len(token)  # byte level: one character per byte
    return sizes
