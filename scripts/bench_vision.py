"""Times the image tower of Inkling 2 Small on one GPU, with random weights made there.

One large picture, many like ones and many of all sizes, through what reads the pictures of prompts
(`inkling_jax.reading.encode_pictures`), copies to and from the host included; and the tower alone
on padded batches that lie on the device, beside the same layers in PyTorch where it is installed.
FLOP are those of the pictures, so that padding shows.

    PYTHONPATH=. python3 scripts/bench_vision.py [--only 32] [--out FILE] [--smoke]
      [--commit HASH]

Writes scripts/results/vision_h200.json, or FILE.
"""

import argparse
import dataclasses
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from inkling_jax import kernel_choice
from inkling_jax.config import Config, VisionConfig, inkling2_small
from inkling_jax.model import encode_image
from inkling_jax.reading import encode_pictures, padded_tiles, picture_batches
from scripts.decode_step.parts import Part, random_params
from scripts.time_limit import write_json

# Rows and columns of tiles: 1,040², sixteen of 520², and pictures of many shapes.
PICTURES = {
    "one of 26 x 26": [(26, 26)],
    "16 of 13 x 13": [(13, 13)] * 16,
    "32 mixed": [(3 + 5 * i % 17, 4 + 7 * i % 19) for i in range(32)],
}
SMOKE = {"one of 2 x 3": [(2, 3)], "3 mixed": [(2, 2), (1, 5), (2, 2)]}


def few_words(vision: VisionConfig) -> Config:
    """Returns a configuration with hardly any decoder."""
    text = inkling2_small().text
    text = dataclasses.replace(
        text, num_hidden_layers=1, layer_types=text.layer_types[:1], n_routed_experts=8,
        moe_intermediate_size=64, vocab_size=512, unpadded_vocab_size=512,
        hidden_size=vision.text_hidden_size,
    )  # fmt: skip
    return Config(text, vision, image_token_id=0)


def flop(vision: VisionConfig, grid: tuple[int, int]) -> float:
    """Floating-point operations of a picture of grid = (rows, columns) tiles."""
    tiles, merge, h = grid[0] * grid[1], vision.spatial_merge_size**2, vision.hidden_size
    n = 1 + tiles * merge
    layer = 2 * n * h * (4 * h + 2 * vision.intermediate_size) + 4 * n * n * h
    merged = vision.projection_hidden_dim * (merge * h + vision.text_hidden_size)
    patches = n * h * 3 * vision.patch_size**2
    return vision.num_hidden_layers * layer + 2 * (tiles * merged + patches)


def seconds(run: Callable[[], Any]) -> float:
    """The median of five calls after one."""
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def draw(config: Config, grids: Sequence[tuple[int, int]]) -> list[tuple[np.ndarray, Any]]:
    """Draws pictures as `Prompt` has them."""
    rng, side = np.random.default_rng(0), config.vision.tile_size
    return [
        (rng.uniform(-1, 1, (rows * columns, side, side, 3)).astype(np.float32), (rows, columns))
        for rows, columns in grids
    ]


def on_device(pictures: list) -> tuple[jax.Array, jax.Array]:
    """Puts pictures of one size on the device, padded as they are for `encode_pictures`."""
    size = padded_tiles(len(pictures[0][0]))
    padded = np.zeros((len(pictures), size, *pictures[0][0].shape[1:]), np.float32)
    for row, (tiles, _) in zip(padded, pictures, strict=True):
        row[: len(tiles)] = tiles
    return jnp.asarray(padded), jnp.array([grid for _, grid in pictures], jnp.int32)


def measure(params: nnx.State, config: Config, name: str, grids: list) -> dict[str, Any]:
    """Times a set of pictures, read and, where all have one size, on the device alone."""
    pictures = draw(config, grids)
    batches = picture_batches([len(tiles) for tiles, _ in pictures])
    groups = [[pictures[i] for i in batch] for _, batch in batches]
    with ThreadPoolExecutor() as pool:  # compiles a program of each size, side by side
        list(pool.map(lambda group: encode_pictures(params, config, group), groups))
    total = sum(flop(config.vision, grid) for grid in grids)
    read = seconds(lambda: encode_pictures(params, config, pictures))
    row = {
        "pictures": name,
        "tiles": sum(rows * columns for rows, columns in grids),
        "padded_tiles": sum(padded_tiles(rows * columns) for rows, columns in grids),
        "flop": total,
        "read_ms": 1e3 * read,
    }
    if len(set(grids)) == 1:
        tiles, grid = on_device(pictures)
        encode = jax.jit(jax.vmap(encode_image, (None, None, 0, 0)), static_argnums=1)
        run = lambda: jax.block_until_ready(encode(params, config, tiles, grid))  # noqa: E731
        alone = seconds(run)
        row |= {"ms": 1e3 * alone, "tflops": total / alone / 1e12} | against_torch(
            params, config, pictures, np.asarray(run(), np.float32)
        )
    return row


def against_torch(params, config: Config, pictures: list, ours: np.ndarray) -> dict[str, Any]:
    """Returns the time of the same batch in PyTorch, unpadded, and how far its result is."""
    try:
        from scripts.torch_tower import TorchTower
    except ImportError as error:
        return {"torch": f"not compared: {error}"}
    rows, columns = pictures[0][1]
    tower = TorchTower(params["vision"], config.vision, rows, columns)
    tiles = tower.put(np.stack([tiles for tiles, _ in pictures]))
    found = tower.to_numpy(tower(tiles))
    error = np.linalg.norm(ours[:, : rows * columns] - found) / np.linalg.norm(found)
    took = seconds(lambda: tower.wait(tower(tiles)))
    return {"torch": tower.version, "torch_ms": 1e3 * took, "differs": float(error)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="beginning of the names of pictures")
    parser.add_argument("--smoke", action="store_true", help="a tiny tower, for a CPU")
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--out", type=Path, default=Path("scripts/results/vision_h200.json"))
    args = parser.parse_args(arguments)
    vision = inkling2_small().vision
    if args.smoke:
        vision = dataclasses.replace(
            vision, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, patch_size=4,
            projection_hidden_dim=32, text_hidden_size=128,
        )  # fmt: skip
    config = few_words(vision)
    params = random_params(Part("vision", config, ("nvfp4",), jnp.bfloat16), packed=False)
    result = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": args.commit
        or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
        "rows": [],
    }
    for name, grids in (SMOKE if args.smoke else PICTURES).items():
        if not name.startswith(args.only):
            continue
        row = measure(params, config, name, grids)
        print(row, flush=True)
        result["rows"].append(row)
        result["attention"] = kernel_choice.chosen()["image_attention"]
        write_json(args.out, result)


if __name__ == "__main__":
    main()
