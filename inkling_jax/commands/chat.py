"""`inkling-jax chat`: a conversation on the terminal, one line of the user's at a time."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator

import inkling_jax as ij
from inkling_jax.commands import inputs
from inkling_jax.commands.generate import as_json, show
from inkling_jax.errors import interrupted
from inkling_jax.images import decode
from inkling_jax.messages import check_effort


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model, how it answers, and what it is told first."""
    parser.add_argument("--system", metavar="TEXT", help="system message at the start")
    inputs.add_images(parser, "goes with the first message; repeatable")
    inputs.add_effort(parser)
    inputs.add_model(parser)
    inputs.add_drafter(parser)
    inputs.add_sampling(parser)


def run(args: argparse.Namespace) -> None:
    """Answers each line of stdin, with `--json` by one JSON object a line."""
    sampling = inputs.sampling_params(args)
    if args.effort is not None:
        check_effort(args.effort)  # before a line of the conversation is typed
    pictures = [decode(path) for path in args.image]
    model = inputs.load_model(args)
    if model.tokenizer is None or not model.tokenizer.has_template:
        raise ij.InputError(
            f"{args.model}: has no tokenizer with a chat template, use generate --tokens"
        )
    messages = [{"role": "system", "content": args.system}] if args.system else []
    picture_parts = [{"type": "image"} for _ in pictures]
    terminal = sys.stdin.isatty()
    for line in _lines(prompt="> " if terminal and not args.json else ""):
        content = [*picture_parts, {"type": "text", "text": line}] if picture_parts else line
        messages.append({"role": "user", "content": content})
        try:
            stream = model.stream(messages, sampling, images=pictures, effort=args.effort)
            text = _answer(stream, args.json)
        except ij.InputError as e:
            if not terminal:
                raise
            print(f"inkling-jax: error: {e}", file=sys.stderr)  # the conversation goes on without
            messages.pop()
            continue
        except (KeyboardInterrupt, ValueError) as e:
            if not terminal or not interrupted(e):
                raise
            # Ends the reply alone: without it, its question is forgotten too.
            print(file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": text})
        picture_parts = []


def _answer(stream: "Iterable[ij.StreamPiece]", as_object: bool) -> str | None:
    if not as_object:
        return show(stream).text
    *_, last = stream
    assert last.output is not None
    print(json.dumps(as_json(last.output)), flush=True)
    return last.output.text


def _lines(prompt: str) -> Iterator[str]:
    while True:
        print(prompt, end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.rstrip("\n")
