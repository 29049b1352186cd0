"""Measures the conversion of a generated checkpoint of over 2 GB beside a plain copy of its files.

Three times in turn: copy, then convert, in one run on one disk. Needs about 9 GB of disk: what was
converted is kept to the end, as ext4 is slow to make files where many were deleted a minute ago.

  PYTHONPATH=.:tests python scripts/measure_conversion.py --work DIR
"""

import argparse
import json
import os
import shutil
import statistics
import time
from pathlib import Path

from test_convert_large import make_large, measure

REPEATS = 3


def main() -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="an empty folder to work in")
    parser.add_argument("--out", type=Path, default=Path("scripts/results/conversion.json"))
    args = parser.parse_args()
    source, copy = args.work / "source", args.work / "copy"
    models = [args.work / f"model{i}" for i in range(REPEATS)]
    source.mkdir(parents=True)
    make_large(source)
    runs = []
    for model in models:
        os.sync()
        began = time.perf_counter()
        shutil.copytree(source, copy)
        copying = time.perf_counter() - began
        shutil.rmtree(copy)
        os.sync()
        converting = measure(source, model)
        share = copying / converting["seconds"]
        runs.append({"copy_speed_share": share, "extra_host_bytes": converting["extra"]})
    result = {
        "bytes": sum(file.stat().st_size for file in source.iterdir()),
        "largest_shard": max(file.stat().st_size for file in source.glob("*.safetensors")),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "runs": runs,
        "median_copy_speed_share": statistics.median(run["copy_speed_share"] for run in runs),
    }
    for made in (source, *models):
        shutil.rmtree(made)
    print(json.dumps(result, indent=1))
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
