"""`inkling-jax score`: how probable each token of a sequence is."""

import argparse
from pathlib import Path
from typing import Any

import inkling_jax as ij
from inkling_jax.commands import inputs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the sequence, its pictures, and where logits go."""
    parser.add_argument(
        "--tokens",
        required=True,
        metavar="FILE",
        help="JSON list of token ids, placeholders included",
    )
    inputs.add_images(parser)
    parser.add_argument(
        "--logits", metavar="OUT.npy", help="write the logits, float32 [T, unpadded vocabulary]"
    )
    inputs.add_model(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Returns log p(token i + 1 | tokens 0 … i) for every i, their sum, and the perplexity."""
    tokens = inputs.read_tokens(args.tokens)
    target = None if args.logits is None else _target(args.logits)
    score = inputs.load_model(args).score(tokens, images=args.image, logits=target is not None)
    if target is not None:
        _save(target, score.logits)
    if not args.json:
        print(f"{len(tokens)} tokens, log probability {score.sum:.4f}, perplexity", end=" ")
        print("none" if score.perplexity is None else f"{score.perplexity:.4f}")
    return {
        "logprobs": score.logprobs.tolist(),
        "sum": score.sum,
        "perplexity": score.perplexity,
    }


def _target(name: str) -> Path:
    """Refuses, before the model is loaded, a file that could not be written."""
    target = Path(name)
    if not target.absolute().parent.is_dir():
        raise ij.InputError(f"{name}: cannot be written, its folder does not exist")
    if target.exists() and not target.is_file():
        raise ij.InputError(f"{name!r} is no file, name one to write")
    return target


def _save(target: Path, logits: Any) -> None:
    """Writes an array as a whole, or leaves what was there."""
    import numpy as np

    partial = target.with_name(f"{target.name}.partial")
    try:
        with partial.open("wb") as file:
            np.save(file, logits)
        partial.replace(target)
    except OSError as e:
        # NumPy's own error of a short write has no errno.
        reason = e.strerror or "the disk is full"
        raise ij.InputError(f"{target}: cannot be written ({reason})") from e
    finally:
        partial.unlink(missing_ok=True)
