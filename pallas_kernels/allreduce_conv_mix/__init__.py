"""conv_mix of summands that lie on several devices: all-reduce and conv_mix as one kernel."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from pallas_kernels.conv_mix import ConvMix, conv_mix

__all__ = ["MAX_RANKS", "allreduce_conv_mix", "unsupported"]

MAX_RANKS = 8  # every device reads the summands of all, which pays for few


def unsupported(sizes: Mapping[str, int], axes: Sequence[str]) -> str | None:
    """Says why devices cannot add up within the kernel, or None.

    Args:
      sizes: of the mesh's axes.
      axes: those over which to add up.
    """
    ranks = math.prod(sizes[axis] for axis in axes)
    if ranks > MAX_RANKS:
        return f"{ranks} devices add up, the kernel takes at most {MAX_RANKS}"
    if jax.process_count() > 1:
        return f"{jax.process_count()} processes, whose memory devices cannot read"
    return None


def allreduce_conv_mix(u: jax.Array, *args: Any, axes: Sequence[str], **options: Any) -> ConvMix:
    """Returns `conv_mix` of the sum of `u` over mesh axes, the same bits on every device.

    Runs under `shard_map` on all devices of the mesh at once. They read each other's memory (NVLink
    peer reads, no multicast), so their ids must be known when it is lowered, from the mesh given to
    `shard_map` or from `jax.set_mesh`, and their order on the mesh must be that of the ids.

    Args:
      u: float32 [B, T, D], this device's summand.
      *args: as `conv_mix` takes them, the same on every device of the group.
      axes: mesh axes over which to add up.
      **options: as `conv_mix` takes them; the interpreter cannot run this kernel.

    Raises:
      ValueError: as `conv_mix`, and for devices that `unsupported` names.
    """
    if reason := unsupported({axis: jax.lax.axis_size(axis) for axis in axes}, axes):
        raise ValueError(f"allreduce_conv_mix: {reason}")
    return conv_mix(u, *args, peers=axes, **options)
