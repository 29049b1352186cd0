"""Processes that prepare side by side and then measure in turn; one that hangs is killed."""

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

EXIT = 5.0  # seconds that a killed process gets to leave


@dataclasses.dataclass(frozen=True)
class Worker:
    """A process, the lines that it has printed, None after the last, and who reads them."""

    process: subprocess.Popen
    lines: queue.Queue[str | None]
    reader: threading.Thread


def start(command: Sequence[str], environment: Mapping[str, str]) -> Worker:
    """Starts a process that waits for a line before it measures."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read(stream):
        with stream:
            for line in stream:
                lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
    reader.start()
    return Worker(process, lines, reader)


def turn(worker: Worker, patience: float, deadline: float) -> Iterator[dict]:
    """Lets a process measure, and yields the JSON lines that it prints; it is gone at the end.

    Args:
      patience: seconds without any line after which it is killed.
      deadline: of `time.monotonic`, when it is killed in any case.
    """
    with contextlib.suppress(BrokenPipeError):  # it has ended already
        print("go", file=worker.process.stdin, flush=True)
    try:
        while (left := min(patience, deadline - time.monotonic())) > 0:
            line = worker.lines.get(timeout=left)
            if line is None:
                if code := worker.process.wait():
                    yield {"error": f"the process ended with {code}"}
                return
            if line.startswith("{"):
                yield json.loads(line)
            else:
                print(line, end="", flush=True)
        yield {"skipped": "the time was up"}
    except queue.Empty:
        if left < patience:
            yield {"skipped": "the time was up"}
        else:
            yield {"error": f"killed: no result for {left:.0f} s"}
    finally:
        stop(worker)


def stop(worker: Worker) -> None:
    """Ends a process for good, or leaves it to the system where not even that helps."""
    worker.process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.process.wait(EXIT)
    worker.reader.join(EXIT)
    if worker.process.stdin:
        with contextlib.suppress(BrokenPipeError):
            worker.process.stdin.close()
