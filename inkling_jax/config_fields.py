"""Reads the fields of a published `config.json` into a dataclass, every value checked by name."""

import dataclasses
import json
import math
import numbers
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from inkling_jax.errors import InputError

# Written by the reference into every config, and without a meaning for inference.
_BOOKKEEPING = {
    "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "id2label",
    "initializer_range", "is_encoder_decoder", "label2id", "layer_scale_init_value", "model_type",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
    "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; raises InputError where that cannot be done."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({e.strerror})") from e
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}: is not valid JSON ({e})") from e
    if not isinstance(raw, dict):
        raise InputError(f"{path}: holds {type(raw).__name__}, it must hold a JSON object")
    return raw


def section(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a copy of an object inside a config, empty where it is absent."""
    found = raw.get(name)
    if found is None:
        found = {}
    if not isinstance(found, Mapping):
        raise InputError(f"config: {name} must be a JSON object, not {type(found).__name__}")
    return dict(found)


def build(
    cls: type,
    values: dict[str, Any],
    where: str,
    only: Mapping[str, Any],
    aliases: Mapping[str, str],
) -> Any:
    """Makes a config dataclass of one section: aliases resolved, every value checked by name.

    Args:
      cls: the dataclass; fields that the section lacks keep their defaults.
      values: the section; changed in place.
      where: its name in errors.
      only: keys that have one supported value.
      aliases: other spellings of fields.
    """
    for key, supported in only.items():
        if (value := values.pop(key, None)) is not None and value != supported:
            raise InputError(f"config: {where}.{key} is {value!r}, only {supported!r} is supported")
    for alias, name in aliases.items():
        if (value := values.pop(alias, None)) is None:
            continue
        if values.setdefault(name, value) != value:
            raise InputError(
                f"config: {where}.{alias} is {value!r} and {name} is {values[name]!r}, "
                "two names of one value that must agree"
            )
    fields = {f.name: f for f in dataclasses.fields(cls)}
    known = {}
    for key, value in values.items():
        if key in fields:
            if value is not None:
                known[key] = typed(value, fields[key].type, f"config: {where}.{key}")
        elif key not in _BOOKKEEPING and value:
            raise InputError(f"config: {where}.{key} = {value!r} is not known to this version")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING
        if required and field.default_factory is dataclasses.MISSING and name not in known:
            raise InputError(f"config: {where}.{name} is missing")
    return cls(**known)


def typed(value: Any, kind: Any, where: str) -> Any:
    """Returns `value` as the field's type; refuses text for numbers and fractions for counts."""
    if isinstance(kind, types.UnionType):  # T | None, and None has been sorted out
        kind = typing.get_args(kind)[0]
    number = type(value) in (int, float) and math.isfinite(value)
    if kind is int and number and value == int(value):
        return int(value)
    if kind is float and number:
        return float(value)
    if kind in (bool, str) and isinstance(value, kind):
        return value
    item = {tuple[int, ...]: int, tuple[str, ...]: str, tuple[float, ...]: float}.get(kind)
    if item and isinstance(value, list | tuple) and all(type(v) is item for v in value):
        return tuple(value)
    raise InputError(
        f"{where} is {value!r}, not of the expected type {getattr(kind, '__name__', kind)}"
    )


def is_whole(value: Any) -> bool:
    """Whether this is a whole number, Python's or NumPy's; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def require(holds: bool, message: str) -> None:
    """Raises InputError with the message unless the condition holds."""
    if not holds:
        raise InputError(f"config: {message}")


def check_positive(config: Any, where: str, but: Collection[str] = ()) -> None:
    """Raises InputError where a number of a config is not positive, fields in `but` excepted."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type in (int, float) and field.name not in but:
            require(value > 0, f"{where}.{field.name} is {value}, it must be positive")
