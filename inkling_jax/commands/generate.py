"""`inkling-jax generate`: a prompt, a conversation or token ids in, what follows them out."""

import argparse
import dataclasses
import sys
from collections.abc import Iterable
from typing import Any

import inkling_jax as ij
from inkling_jax.commands import inputs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what to continue, with which model, and how."""
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="a user's message; - reads it from stdin")
    prompt.add_argument("--messages", metavar="FILE", help="JSON list of messages")
    prompt.add_argument("--tokens", metavar="FILE", help="JSON list of token ids")
    parser.add_argument("--raw", action="store_true", help="continue --prompt without a template")
    inputs.add_images(parser)
    inputs.add_effort(parser)
    inputs.add_model(parser)
    inputs.add_drafter(parser)
    inputs.add_sampling(parser)
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: log probabilities, N alternatives"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the text, the generated ids, why it ended, and the timings."""
    if args.logprobs is not None and not args.json:
        raise ij.InputError("--logprobs is reported as JSON only, add --json")
    prompt = _prompt(args)
    sampling = inputs.sampling_params(args, logprobs=args.logprobs)
    model = inputs.load_model(args)
    options = {"raw": args.raw, "effort": args.effort}
    if args.json:
        [output] = model.generate([prompt], sampling, images=[args.image], **options)
    else:
        output = show(model.stream(prompt, sampling, images=args.image, **options))
        print(_summary(output.stats), file=sys.stderr)
    return as_json(output)


def show(pieces: "Iterable[ij.StreamPiece]") -> "ij.GenerationOutput":
    """Prints a reply as it comes, its thinking on stderr; returns the finished output."""
    output = None
    for piece in pieces:
        print(piece.thinking, end="", file=sys.stderr, flush=True)
        print(piece.text, end="", flush=True)
        output = piece.output
    assert output is not None
    if output.text is None:  # no tokenizer
        print(*output.token_ids, end="")
    for call in output.reply.tool_calls if output.reply else ():
        print(f"\n{call.raw}", end="")
    print()
    return output


def as_json(output: "ij.GenerationOutput") -> dict[str, Any]:
    """Returns an output as `--json` prints it, without what was not asked for."""
    result = dataclasses.asdict(output)
    return {k: v for k, v in result.items() if v is not None or k == "text"}


def _prompt(args: argparse.Namespace) -> Any:
    if args.raw and args.prompt is None:
        raise ij.InputError("--raw goes with --prompt only")
    if args.tokens is not None:
        return inputs.read_tokens(args.tokens)
    if args.messages is not None:
        return inputs.read_messages(args.messages)
    return sys.stdin.read() if args.prompt == "-" else args.prompt


def _summary(stats: dict[str, Any]) -> str:
    parts = []
    for what, count, seconds in (
        ("prompt", stats["prompt_tokens"], stats.get("prefill_seconds")),
        ("reply", stats["generated_tokens"], stats.get("decode_seconds")),
    ):
        rate = f", {count / seconds:.1f} tokens/s" if seconds else ""
        parts.append(f"{what}: {count} tokens{rate}")
    return "; ".join(parts)
