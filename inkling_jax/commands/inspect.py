"""`inkling-jax inspect`: what a model directory holds and what memory it needs."""

import argparse
import collections
import dataclasses
from typing import Any

import inkling_jax as ij


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds which model, and for how long a text memory is counted."""
    parser.add_argument("model", metavar="DIR", help="published or converted directory, or hub id")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of the counted cache")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the architecture, parameters and bytes by format, and the memory needed."""
    found = ij.inspect(args.model, args.revision, args.context)
    if not args.json:
        _show(found)
    sums = {"parameters": found.parameters, "nbytes": found.nbytes}
    return {**dataclasses.asdict(found), **sums}


def _show(found: "ij.Inspection") -> None:
    text, vision = found.config.text, found.config.vision
    print(f"{found.directory}: {'converted' if found.converted else 'published'}")
    for kind in dict.fromkeys(text.layer_types):
        first = text.attention(text.layer_types.index(kind))
        reach = f"sliding over {first.window} tokens" if first.window else "full"
        print(
            f"  {text.layer_types.count(kind)} layers {reach}: {first.heads} query and "
            f"{first.kv_heads} key/value heads of {first.head_dim}"
        )
    print(
        f"  hidden {text.hidden_size}; {text.n_routed_experts} experts of width "
        f"{text.moe_intermediate_size}, {text.num_experts_per_tok} per token"
    )
    experts = collections.Counter(found.expert_formats)
    print("  experts:", ", ".join(f"{name} in {n} layers" for name, n in experts.items()))
    print(f"  vocabulary {text.unpadded_vocab_size}, up to {text.max_position_embeddings} tokens")
    size = f"{vision.tile_size} × {vision.tile_size}"
    print(f"  images: {vision.num_hidden_layers} layers, one token per {size} pixels")
    print(f"  tokenizer: {_yes(found.tokenizer)}, chat template: {_yes(found.template)}")
    print(f"{'format':10} {'parameters':>16} {'bytes':>16}")
    for name, share in found.formats.items():
        print(f"{name:10} {share.parameters:16,} {share.nbytes:16,}")
    print(f"{'all':10} {found.parameters:16,} {found.nbytes:16,}")
    print(
        f"memory: {found.nbytes / 1e9:.3f} GB of weights as stored, {found.cache_bytes / 1e9:.3f} "
        f"GB for each sequence of {found.context} tokens"
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"
