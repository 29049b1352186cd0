"""Where a step's time goes, by the device's own records."""

import collections
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData


def ms_by_kernel(run: Callable, trips: int) -> dict[str, float]:
    """Milliseconds of a trip by kernel, the longest first; `run` does all trips."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        [file] = Path(folder).rglob("*.xplane.pb")
        return summed(ProfileData.from_file(str(file)), trips)


def summed(profile: Any, trips: int) -> dict[str, float]:
    """Adds up what a `ProfileData` has on GPU streams by name, without the number XLA appends."""
    total = collections.Counter()
    for plane in profile.planes:
        for line in plane.lines:
            if plane.name.startswith("/device:GPU") and line.name.startswith("Stream"):
                for event in line.events:
                    total[re.sub(r"(_+\d+)+$", "", event.name)] += event.duration_ns / 1e6
    return {name: ms / trips for name, ms in total.most_common()}
