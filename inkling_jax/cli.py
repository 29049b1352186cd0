"""The `inkling-jax` command: parsing, exit codes and what all commands share.

A command is a module of `inkling_jax.commands` with `add_arguments(parser)` and `run(args)`. `run`
prints for people unless `args.json`, and returns what `--json` prints.
"""

import argparse
import contextlib
import errno
import importlib
import io
import json
import logging
import os
import sys
from typing import Any, NoReturn

import inkling_jax
from inkling_jax.errors import InputError, interrupted

COMMANDS = {
    "generate": "continue a prompt, a conversation or raw token ids, with pictures",
    "chat": "hold a conversation on the terminal",
    "score": "give the log probability of every token of a sequence",
    "convert": "turn a published directory into an Orbax checkpoint",
    "inspect": "show what a model directory holds and what memory it needs",
    "plan": "tell whether a model fits a mesh of devices, and how fast it can be, without either",
    "env": "show versions, devices and the kernels that would run",
    "demo": "convert the shipped model, answer a question and describe a picture",
}

# What the machine refuses for reasons that its user can mend.
_USER_ERRNOS = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST,
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ENAMETOOLONG,
}  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; `{self.prog} --help` lists what is accepted")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    top = _Parser("inkling-jax", description="Inkling 2 Small in JAX.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=inkling_jax.__version__)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, description in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=description,
            description=f"{description[0].upper()}{description[1:]}.",
            allow_abbrev=False,
        )
        _module(name).add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print the result as JSON, alone")
        sub.add_argument("--verbose", action="store_true", help="log choices and show tracebacks")
        sub.add_argument("--profile", metavar="DIR", help="write a JAX profile of the command")
    return top


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's).

    Returns:
        0 when done, 2 after a mistake in the input, 1 after a fault of ours, 130 when interrupted,
        141 when nobody reads the output any more.
    """
    arguments = sys.argv[1:] if argv is None else argv
    verbose = "--verbose" in arguments
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
    )
    # Closed by the caller they are None: nothing to read, and nobody who reads.
    sys.stdin, sys.stdout = sys.stdin or io.StringIO(), sys.stdout or io.StringIO()
    try:
        args = _parsed(arguments)
        with _profile(args.profile):
            result = _module(args.command).run(args)
        if args.json and result is not None:
            print(json.dumps(result))
        sys.stdout.flush()
        return 0
    except InputError as e:
        return _fail(2, f"error: {e}", verbose)
    except UnicodeDecodeError as e:  # of standard input: files are read by what names them
        return _fail(2, f"error: the input is not text in UTF-8 ({e})", verbose)
    except BrokenPipeError:  # the reader has had enough; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as e:
        if e.errno not in _USER_ERRNOS:
            return _fail(1, f"internal error: {e}", verbose)
        where = f"{e.filename}: " if e.filename else ""
        return _fail(2, f"error: {where}{e.strerror}", verbose)
    except (KeyboardInterrupt, Exception) as e:
        if interrupted(e):
            return _fail(130, "interrupted", verbose)
        if mistake := _absent_platform():
            return _fail(2, f"error: {mistake}", verbose)
        return _fail(1, f"internal error: {type(e).__name__}: {e}", verbose)


def _parsed(arguments: list[str]) -> argparse.Namespace:
    args, unknown = parser().parse_known_args(arguments)
    if unknown:  # argparse itself would point to the help of all commands
        raise InputError(
            f"unrecognized arguments: {' '.join(unknown)}; `inkling-jax {args.command} --help` "
            "lists what is accepted"
        )
    return args


def _module(command: str) -> Any:
    return importlib.import_module(f"inkling_jax.commands.{command}")


def _profile(directory: str | None) -> contextlib.AbstractContextManager:
    if directory is None:
        return contextlib.nullcontext()
    try:
        os.makedirs(directory, exist_ok=True)
    except (OSError, ValueError, RecursionError) as e:
        reason = getattr(e, "strerror", None) or e
        raise InputError(
            f"--profile: {directory!r:.80} cannot be made ({reason}), name another directory"
        ) from e
    import jax

    return jax.profiler.trace(directory)


def _absent_platform() -> str | None:
    """Says that JAX has no device of the platforms that it was told to use, or None."""
    import jax

    asked = os.environ.get("JAX_PLATFORMS")
    try:
        jax.devices()
    except Exception:  # JAX has no exception of its own for it
        return asked and (
            f"JAX_PLATFORMS is {asked!r}, and JAX has no such device here; unset it, or install "
            "what it needs (inkling-jax[cuda] for NVIDIA GPUs)"
        )
    return None


def _fail(code: int, sentence: str, verbose: bool) -> int:
    if verbose:
        logging.getLogger(__name__).info("traceback", exc_info=True)
    print(f"inkling-jax: {sentence}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
