"""One part, in the process that was started for it."""

import argparse
import functools
import json
import sys
import time

import jax

from scripts.sharded_parts import agreement, allreduce, decode, prefill, texts

PARTS = {
    "check": allreduce.check,
    "nano": agreement.nano,
    "slice": agreement.full_width,
    "text": functools.partial(texts.nano, dtype="bfloat16", rows=(1, 8)),
    "drafts": functools.partial(texts.nano, dtype="bfloat16", rows=(1,), drafts=texts.DRAFTS),
    "text32": functools.partial(texts.nano, dtype="float32", rows=(1, 8)),
    "layers": texts.layers,
    "latency": allreduce.latency,
    "prefill": prefill.prefill,
    "decode": decode.decode,
}


def work(options: argparse.Namespace) -> None:
    """Prepares a part, waits for its turn and measures; every row is a line of JSON.

    A part is a generator of rows, of which the first is None: then it is prepared.
    """
    began = time.monotonic()
    platform = "cpu" if options.small else "gpu"
    devices = [device for device in jax.devices() if device.platform == platform]
    if len(devices) < 2:
        print(json.dumps({"skipped": f"needs two GPUs in one process, {len(devices)} there"}))
        return
    versions = {"jax": jax.__version__, "jaxlib": jax.lib.__version__}
    head = {"device": devices[0].device_kind, "devices": len(devices), "versions": versions}
    rows = PARTS[options.worker](devices, options)
    next(rows)
    print(f"# {options.worker}: prepared in {time.monotonic() - began:.0f} s", flush=True)
    sys.stdin.readline()
    print(json.dumps(head), flush=True)
    for row in rows:
        print(json.dumps(row), flush=True)
