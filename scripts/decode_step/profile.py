"""Where a step's time goes, by the device's own records."""

import collections
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData


class Total(NamedTuple):
    """How often a kernel ran and how long in all."""

    count: int
    ms: float


def ms_by_kernel(run: Callable, few: int, many: int) -> dict[str, float]:
    """Milliseconds of a trip by kernel, the longest first; `run(n)` does n trips of a loop."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (_recorded(run, n, Path(folder, str(n))) for n in (few, many))
    return of_a_trip(first, second, many - few)


def _recorded(run, trips, folder):
    with jax.profiler.trace(folder):
        jax.block_until_ready(run(trips))
    [file] = folder.rglob("*.xplane.pb")
    return totals(ProfileData.from_file(str(file)))


def totals(profile: Any) -> dict[str, Total]:
    """Adds up what a `ProfileData` has on GPU streams by name, without the number XLA appends."""
    events = collections.defaultdict(list)
    for plane in profile.planes:
        for line in plane.lines:
            if plane.name.startswith("/device:GPU") and line.name.startswith("Stream"):
                for event in line.events:
                    events[re.sub(r"(_+\d+)+$", "", event.name)].append(event.duration_ns / 1e6)
    return {name: Total(len(ms), sum(ms)) for name, ms in events.items()}


def of_a_trip(few: dict[str, Total], many: dict[str, Total], trips: int) -> dict[str, float]:
    """Milliseconds that each of so many more trips adds, by kernel, the longest first.

    What runs as often with more trips is no part of the loop: copies of what the caller keeps, and
    what XLA has taken out of the loop.
    """
    none = Total(0, 0.0)
    added = {
        name: (total.ms - few.get(name, none).ms) / trips
        for name, total in many.items()
        if total.count > few.get(name, none).count
    }
    return dict(sorted(added.items(), key=lambda item: -item[1]))
