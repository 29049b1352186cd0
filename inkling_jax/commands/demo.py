"""`inkling-jax demo`: converts the shipped model, asks it a question and shows it a picture."""

import argparse
import importlib.resources
import tempfile
from pathlib import Path
from typing import Any

import inkling_jax as ij

SHIPPED = Path(str(importlib.resources.files("checkpoints"))) / "inkling-jax-nano"
QUESTION = "What is the module tarfile?"
PICTURE_QUESTION = "What is in the picture?"
SHAPES = "red circle, blue square; green triangle, yellow diamond"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds where the results go."""
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="keep the converted model and the picture here (default: remove them)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Returns both questions with their answers, and where model and picture are, if kept."""
    if args.out == "":
        raise ij.InputError("--out is empty, name a directory or leave it out")
    if args.out is not None:
        return _show(Path(args.out), args.json, kept=True)
    with tempfile.TemporaryDirectory(prefix="inkling-jax-demo-") as out:
        return _show(Path(out), args.json, kept=False)


def _show(out: Path, quiet: bool, kept: bool) -> dict[str, Any]:
    target, picture = out / "model", out / "picture.png"
    ij.convert(SHIPPED, target, progress=not quiet)
    draw(picture)
    say = (lambda *_: None) if quiet else print
    say(f"converted {SHIPPED}\n")

    model = ij.load(target)
    sampling = ij.SamplingParams(max_tokens=96, temperature=0.0)
    # One batch, so that one program is compiled for both.
    text, seen = model.generate([QUESTION, PICTURE_QUESTION], sampling, images=[[], [str(picture)]])
    say(f"question: {QUESTION}\nanswer:   {text.text}\n")
    say(f"picture:  {SHAPES}\nquestion: {PICTURE_QUESTION}\nanswer:   {seen.text}\n")
    say(f"kept {target} and {picture}" if kept else "`--out DIR` keeps the model and the picture")
    return {
        "model": str(target) if kept else None,
        "text": {"prompt": QUESTION, "text": text.text},
        "picture": {
            "path": str(picture) if kept else None,
            "prompt": PICTURE_QUESTION,
            "text": seen.text,
        },
    }


def draw(path: Path) -> None:
    """Draws `SHAPES` on a 2 × 2 grid of 40-pixel cells, one image token each."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (80, 80), (246, 246, 246))
    pen = ImageDraw.Draw(image)
    pen.ellipse((7, 7, 33, 33), fill=(220, 40, 40))
    pen.rectangle((49, 9, 71, 31), fill=(40, 80, 220))
    pen.polygon(((20, 47), (33, 71), (7, 71)), fill=(40, 160, 60))
    pen.polygon(((60, 45), (75, 60), (60, 75), (45, 60)), fill=(240, 210, 40))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
