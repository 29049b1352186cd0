"""Several processes as one: start-up with a time limit, and agreement before the first collective.

A collective waits for all processes for ever. So what can go wrong in one of them is settled by an
exchange that each of them reaches, and the others stop with a sentence that names it.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from sharding.mesh import MeshConfig, MeshError

MESH_TEXT = 80  # bytes that any mesh's text fits in
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def join_hosts(timeout: int = 120) -> None:
    """Joins the processes that the environment names, before JAX looks for devices.

    `JAX_COORDINATOR_ADDRESS` is host:port of process 0, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`
    say how many processes there are and which one this is. Without all three, and where
    `jax.distributed` is initialised already, nothing happens.

    Args:
      timeout: seconds to wait for the others.

    Raises:
      MeshError: a variable is missing or wrong, or the others do not come.
    """
    address, count, index = (os.environ.get(name, "") for name in (ADDRESS, COUNT, INDEX))
    if not (address or count or index) or jax.distributed.is_initialized():
        return
    if not address:
        raise MeshError(
            f"{COUNT} is {count!r} and {INDEX} is {index!r}, so {ADDRESS} must be host:port of "
            "process 0, but it is missing"
        )
    if not (count.isdecimal() and index.isdecimal() and int(index) < int(count)):
        raise MeshError(
            f"{ADDRESS} is set, so {COUNT} must be the number of processes and {INDEX} this one's, "
            f"from 0 on; they are {count!r} and {index!r}"
        )
    _meet(address, int(count), int(index), time.monotonic() + timeout)
    jax.distributed.initialize(
        address, int(count), int(index), cluster_detection_method="deactivate"
    )


def first_process_prints() -> None:
    """Leaves standard output to process 0 of those that the environment names, and to it alone.

    Every process comes to the same result. Descriptor 1 becomes standard error for good, as Gloo
    writes a line to it whenever processes meet, also later.
    """
    if not os.environ.get(ADDRESS):
        return
    sys.stdout.flush()
    first = os.environ.get(INDEX) == "0"
    target = os.dup(1) if first else os.open(os.devnull, os.O_WRONLY)
    sys.stdout = os.fdopen(target, "w", encoding=sys.stdout.encoding)
    os.dup2(2, 1)


def _meet(address: str, count: int, index: int, deadline: float) -> None:
    """Waits until all processes are there, by plain sockets: JAX kills those that wait in vain."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise MeshError(f"{ADDRESS} is {address!r}, it must be host:port of process 0")
    here: dict[int, socket.socket] = {}
    try:
        if index:
            _ask(host, int(port), index, deadline)
            return
        with socket.create_server(("", int(port))) as server:
            while len(here) < count - 1:
                server.settimeout(_left(deadline))
                guest, _ = server.accept()
                here[int.from_bytes(guest.recv(4))] = guest
            for guest in here.values():
                guest.sendall(b"go")
    except OSError as e:
        waiting = sorted({*range(1, count)} - here.keys()) if index == 0 else [0]
        raise MeshError(
            f"process {index} of {count} did not meet {waiting} at {address} in time ({e}); start "
            f"all of them with the same {ADDRESS} and {COUNT}"
        ) from e
    finally:
        for guest in here.values():
            guest.close()


def _ask(host: str, port: int, index: int, deadline: float) -> None:
    """Tells process 0 that this one is there, and waits for its word to begin."""
    while True:
        try:
            with socket.create_connection((host, port), _left(deadline)) as server:
                server.sendall(index.to_bytes(4))
                server.settimeout(_left(deadline))
                if server.recv(2) == b"go":
                    return
        except ConnectionError:  # not listening yet
            pass
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
        time.sleep(0.1)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def agree_on(config: MeshConfig) -> None:
    """Refuses meshes that differ between processes."""
    if jax.process_count() == 1:
        return
    text = np.frombuffer(str(config).encode().ljust(MESH_TEXT), np.uint8)
    found = multihost_utils.process_allgather(text)
    if (found != text).any():
        texts = [row.tobytes().decode().strip() for row in found]
        raise MeshError(f"the processes were given different meshes: {'; '.join(texts)}")


def same_everywhere(measured: np.ndarray) -> np.ndarray:
    """Returns what process 0 measured, in all processes."""
    if jax.process_count() == 1:
        return measured
    return np.asarray(multihost_utils.broadcast_one_to_all(measured))


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Lets all processes fail where the body failed in one of them.

    Args:
      what: names the body in the error of those in which it did not fail.
    """
    failure = None
    try:
        yield
    except Exception as e:
        failure = e
    if jax.process_count() > 1:
        failed = np.flatnonzero(multihost_utils.process_allgather(np.array(failure is not None)))
        if failed.size and failure is None:
            raise MeshError(f"{what} failed in processes {failed.tolist()}, see what they say")
    if failure is not None:
        raise failure
