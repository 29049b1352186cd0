"""The `inkling-jax` command."""

import argparse

import inkling_jax


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's) and returns its exit code."""
    parser = argparse.ArgumentParser(prog="inkling-jax")
    parser.add_argument("--version", action="version", version=inkling_jax.__version__)
    parser.parse_args(argv)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
