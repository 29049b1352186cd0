"""Flags and files that several commands read."""

import argparse
import json
import pathlib
from typing import Any

import inkling_jax as ij


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which model to load, and how."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", required=True, metavar="DIR", help="published or converted directory, or hub id"
    )
    group.add_argument("--revision", help="branch, tag or commit of a hub id")
    group.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="of activations and unquantized weights; auto: bfloat16 on GPU, float32, the only "
        "one there, on CPU",
    )
    group.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="most tokens of prompt and reply together",
    )
    group.add_argument(
        "--mesh",
        metavar="M",
        help="devices to use: sizes such as tp=4,cp=2, a preset such as h200-tp4, or a YAML file",
    )


def add_drafter(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for speculative decoding."""
    group = parser.add_argument_group("speculative decoding")
    group.add_argument(
        "--drafter",
        metavar="DIR|auto|none",
        default="none",
        help="DSpark drafter; auto: the one in the model's directory, if there is one",
    )
    group.add_argument(
        "--draft-tokens",
        type=_draft_tokens,
        metavar="N|auto",
        help="drafts to verify per step; auto: as many as pay",
    )


def add_images(
    parser: argparse.ArgumentParser,
    what: str = "fills the next image part or run of placeholders; repeatable",
) -> None:
    """Adds the flag for pictures."""
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help=what)


def add_effort(parser: argparse.ArgumentParser) -> None:
    """Adds the flag for how long a chat model thinks."""
    parser.add_argument("--effort", type=float, metavar="E", help="thinking effort, 0 to 0.99")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `SamplingParams`; what is left out, the checkpoint decides."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help="default: 256, if they fit")
    group.add_argument("--temp", type=float, metavar="T", help="temperature, 0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest that make up P")
    group.add_argument(
        "--min-p", type=float, metavar="P", help="keep what has P times the highest probability"
    )
    group.add_argument("--seed", type=int, metavar="N", help="a text that can be had again")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; repeatable"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on past the stop tokens")


def sampling_params(args: argparse.Namespace, **more: Any) -> Any:
    """Returns the `SamplingParams` that the flags ask for."""
    return ij.SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temp,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        **more,
    )


def load_model(args: argparse.Namespace) -> Any:
    """Returns the model that the flags name, ready to run; from here on one process prints."""
    if args.mesh is not None:
        from sharding.hosts import first_process_prints  # imports JAX, which --help can do without

        first_process_prints()
    dtype = None if args.dtype == "auto" else args.dtype
    options = {
        name: getattr(args, name) for name in ("drafter", "draft_tokens") if hasattr(args, name)
    }
    return ij.load(
        args.model,
        dtype=dtype,
        context=args.context,
        revision=args.revision,
        mesh=args.mesh,
        **options,
    )


def read_tokens(path: str) -> list[int]:
    """Reads one JSON list of token ids.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """
    tokens = _read_json(path)
    if not isinstance(tokens, list) or not tokens or any(type(t) is not int for t in tokens):
        raise ij.InputError(f"{path}: must hold a JSON list of token ids, such as [12, 7]")
    return tokens


def read_messages(path: str) -> list[dict[str, Any]]:
    """Reads a JSON list of messages, each with a role and a content.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """
    messages = _read_json(path)
    if isinstance(messages, list) and messages:
        bad = [i for i, m in enumerate(messages) if not isinstance(m, dict) or "role" not in m]
        if not bad:
            return messages
        raise ij.InputError(f'{path}: message {bad[0]} must be an object with "role" and "content"')
    raise ij.InputError(
        f'{path}: must hold a JSON list of messages, such as [{{"role": "user", "content": "Hi"}}]'
    )


def _read_json(path: str) -> Any:
    try:
        return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise ij.InputError(f"{path}: cannot be read ({e.strerror})") from e
    except (ValueError, RecursionError) as e:
        raise ij.InputError(f"{path}: is not valid JSON ({e})") from e


def _draft_tokens(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto")
    return int(text)
