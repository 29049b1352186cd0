"""The end of a measurement on a machine that is given back at a fixed time."""

import contextlib
import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

GRACE = 8.0  # seconds from the deadline, which a measurement looks at itself, to the end


@contextlib.contextmanager
def limited(minutes: float) -> Iterator[float]:
    """Yields a deadline of `time.monotonic`; soon after it the process ends, if still in here.

    What ends it is a thread that needs no interpreter lock, so it does not matter what Python, a
    compiler or a device is busy with; it prints where each thread was. The exit code is 1.
    """
    faulthandler.dump_traceback_later(60 * minutes + GRACE, exit=True)
    try:
        yield time.monotonic() + 60 * minutes
    finally:
        faulthandler.cancel_dump_traceback_later()


def leave(code: int) -> NoReturn:
    """Ends the process without waiting for threads that still compile."""
    sys.stdout.flush()
    os._exit(code)


def write_json(file: Path, result: Any) -> None:
    """Replaces a file in one step, so that an end in between leaves what was there before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(result, indent=1) + "\n")
    new.replace(file)
