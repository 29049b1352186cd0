"""`inkling-jax convert`: a published directory into an Orbax checkpoint."""

import argparse
import dataclasses
from typing import Any

from rich.filesize import decimal

import inkling_jax as ij


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds source and target."""
    parser.add_argument("source", metavar="SRC", help="published directory, or hub id")
    parser.add_argument("target", metavar="DST", help="directory to make")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--mesh", metavar="M", help="refuse a model that this mesh could not run")
    dry_run = "check all but a drafter, write nothing"
    parser.add_argument("--dry-run", action="store_true", help=dry_run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Returns how much was converted, kept from an interrupted run, and left out."""
    done = ij.convert(
        args.source,
        args.target,
        revision=args.revision,
        dry_run=args.dry_run,
        progress=not args.json,
        mesh=args.mesh,
    )
    if not args.json and done.kept == done.arrays:
        print(f"{args.target}: is complete already")
    elif not args.json:
        verb = "would write" if args.dry_run else "wrote"
        print(f"{verb} {done.arrays} arrays, {decimal(done.nbytes)}: {args.target}")
        if done.kept:
            print(f"{done.kept} of them were there from an interrupted run")
        for name, reason in done.ignored.items():
            print(f"left out {name}: {reason}")
    return dataclasses.asdict(done)
