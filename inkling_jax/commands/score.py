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
    if args.logits and not Path(args.logits).absolute().parent.is_dir():
        raise ij.InputError(f"{args.logits}: cannot be written, its folder does not exist")
    if args.logits and Path(args.logits).is_dir():
        raise ij.InputError(f"{args.logits}: is a folder, name a file to write")
    score = inputs.load_model(args).score(tokens, images=args.image, logits=bool(args.logits))
    if args.logits:
        import numpy as np

        with open(args.logits, "wb") as file:
            np.save(file, score.logits)
    if not args.json:
        print(f"{len(tokens)} tokens, log probability {score.sum:.4f}, perplexity", end=" ")
        print("none" if score.perplexity is None else f"{score.perplexity:.4f}")
    return {
        "logprobs": score.logprobs.tolist(),
        "sum": score.sum,
        "perplexity": score.perplexity,
    }
