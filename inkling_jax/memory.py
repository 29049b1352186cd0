"""Whether arrays fit the memory that is free, asked before they are allocated."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from inkling_jax.errors import InputError


def device_bytes(specs: Iterable[jax.ShapeDtypeStruct]) -> Counter[Any]:
    """Returns what each device of this process gets of arrays, in bytes.

    Args:
      specs: shapes and dtypes, with shardings.
    """
    found: Counter[Any] = Counter()
    for spec in specs:
        assert spec.sharding is not None
        part = math.prod(spec.sharding.shard_shape(spec.shape)) * spec.dtype.itemsize
        for device in spec.sharding.addressable_devices:
            found[device] += part
    return found


def check_fits(needs: Mapping[Any, int], what: str) -> None:
    """Refuses what does not fit the memory that is free.

    Args:
      needs: bytes that are wanted of each device.
      what: names it in the error.
    """
    host = sum(need for device, need in needs.items() if device.platform == "cpu")
    for device, need in needs.items():
        free = free_memory(device)
        need = host if device.platform == "cpu" else need
        if free is not None and need > free:
            raise InputError(
                f"{what}: needs {need / 1e9:.2f} GB on {device}, {free / 1e9:.2f} GB are free; "
                "use a larger device or spread the model over several"
            )


def free_memory(device: Any) -> int | None:
    """Returns the bytes that can still be allocated on a device, None where it does not say."""
    if stats := device.memory_stats():
        return stats["bytes_limit"] - stats["bytes_in_use"]
    memory = Path("/proc/meminfo")
    if device.platform != "cpu" or not memory.exists():
        return None
    return 1024 * int(memory.read_text().split("MemAvailable:")[1].split()[0])
