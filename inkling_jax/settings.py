"""What a model's directory says beside its weights: how to sample, where to stop, the tokenizer."""

import dataclasses
from pathlib import Path

from checkpoints.safetensors_reader import parse_json
from inkling_jax.config import Config
from inkling_jax.errors import InputError
from inkling_jax.sampling_params import SamplingParams
from inkling_jax.text import Tokenizer


@dataclasses.dataclass(frozen=True)
class Settings:
    """What replies of a model start from (spec: checkpoint.md).

    Attributes:
      defaults: sampling settings of `generation_config.json`.
      stop_ids: ids that end a reply.
      tokenizer: None where the directory has none.
    """

    defaults: SamplingParams
    stop_ids: tuple[int, ...]
    tokenizer: Tokenizer | None


def read_settings(directory: Path, config: Config) -> Settings:
    """Reads them; raises InputError where a file is damaged or holds what cannot be used."""
    file = directory / "generation_config.json"
    found = parse_json(file.read_bytes(), file) if file.exists() else {}
    stop = found.get("eos_token_id", config.text.eos_token_id)
    stop_ids = tuple(stop or ()) if isinstance(stop, list | tuple | None) else (stop,)
    if not all(type(i) is int and i >= 0 for i in stop_ids):
        raise InputError(f"{file}: eos_token_id is {stop!r}, it must be an id or a list of ids")
    stop_ids = tuple(i for i in stop_ids if i < config.text.unpadded_vocab_size)
    try:
        defaults = SamplingParams.from_generation_config(found)
    except InputError as e:
        raise InputError(f"{file}: {e}") from e
    tokenizer = None
    if (directory / "tokenizer.json").exists():
        tokenizer = Tokenizer.load(directory, config.image_token_id)
    return Settings(defaults, stop_ids, tokenizer)
