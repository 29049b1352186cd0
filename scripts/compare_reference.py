"""Compares the engine with what transformers computed for reference cases, and writes the largest
differences as JSON.

A case is a folder that scripts/reference/make_case.py wrote: `checkpoint/`, `expected.safetensors`
and two pictures.

usage: python scripts/compare_reference.py CASE [CASE …] [--dtype float32] [--out FILE]
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

import inkling_jax as ij
from inkling_jax import images


def main() -> None:
    """Compares each case; exits 1 if one misses the bounds that the project sets itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", type=Path, metavar="CASE")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args()
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "dtype": args.dtype,
        "cases": {case.name: compare(case, args.dtype) for case in args.cases},
    }
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if not all(within_bounds(found) for found in report["cases"].values()):
        raise SystemExit("a case is out of bounds")


def within_bounds(found: dict) -> bool:
    """Float32: logits within 5e-4, hidden states and features within 1e-4, the rest equal."""
    return (
        max(found["logits"], found["image_logits"]) <= 5e-4
        and max(found["hidden_relative"], found["image_features"]) <= 1e-4
        and found["greedy_equal"]
        and found["tiles_equal"]
    )


def compare(case: Path, dtype: str) -> dict[str, float | bool]:
    """Returns the largest absolute differences of one case."""
    model = ij.load(case / "checkpoint", dtype=dtype, context=128)
    expected = load_file(case / "expected.safetensors")
    pictures = [case / f"image{i}.png" for i in range(2)]

    def difference(name: str, **options) -> float:
        tokens = expected[f"{name}.tokens"].tolist()
        logits = model.score(tokens, logits=True, **options).logits
        return float(np.abs(logits - expected[f"{name}.logits"]).max())

    texts = [key.split(".")[0] for key in expected if key.startswith("text") and "logits" in key]
    greedy = ij.SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    [reply] = model.generate([expected["greedy.prompt"].tolist()], greedy)
    tiles, features = _pictures(model, pictures)
    return {
        "logits": max(difference(name) for name in texts),
        "hidden_relative": _hidden(model, expected),
        "greedy_equal": reply.token_ids == expected["greedy.tokens"].tolist(),
        "tiles_equal": bool((tiles == expected["image.pixels"]).all()),
        "image_features": float(np.abs(features - expected["image.features"]).max()),
        "image_logits": difference("image", images=pictures),
    }


def _hidden(model: ij.Engine, expected: dict[str, np.ndarray]) -> float:
    """The largest difference of any layer's output, relative to its own largest value."""
    config, tokens = model.config, expected["text17.tokens"][None]
    cache = ij.init_cache(config.text, 1, 32, 1, model.params["embed"]["weight"].dtype)
    taps = tuple(range(-1, config.text.num_hidden_layers - 1))
    run = jax.jit(lambda p, t: ij.forward(p, config, t, jnp.array([17]), cache, taps=taps))
    out = run(model.params, tokens)
    pairs = zip((*out.taps, out.hidden), expected["text17.hidden"], strict=True)
    return max(float(np.abs(np.asarray(a[0]) - b).max() / np.abs(b).max()) for a, b in pairs)


def _pictures(model: ij.Engine, files: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """The pictures' tiles and their features."""
    config, tiles, features = model.config, [], []
    encode = jax.jit(lambda p, t, g: ij.encode_image(p, config, t, g))
    for file in files:
        found, grid = images.tiles(file, config.vision.tile_size)
        tiles.append(found)
        features.append(np.asarray(encode(model.params, found, jnp.array(grid))))
    return np.concatenate(tiles), np.concatenate(features)


if __name__ == "__main__":
    main()
