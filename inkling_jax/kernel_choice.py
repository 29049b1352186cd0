"""Whether kernels run: the device, the switch that turns them off, and what was chosen so far.

A choice is made while a function is traced and is logged once: as a warning where a GPU has the
kernel and the kernel refuses.
"""

import functools
import logging
import os

import jax

from inkling_jax.errors import InputError

KERNEL = "kernel"
SWITCH = "INKLING_JAX_KERNELS"  # 0 turns the kernels off
CAPABILITY = 9.0  # Hopper, where they are tested

_log = logging.getLogger(__name__)
_chosen: dict[str, str] = {}


def chosen() -> dict[str, str]:
    """Returns what decodes with each operation traced so far: "kernel", or why it does not."""
    return dict(_chosen)


def device_refusal() -> str | None:
    """Says why no kernel can run on the device that functions are traced for, or None."""
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1"):
        raise InputError(f"{SWITCH} is {switch!r}, it must be 0 or 1")
    device, target = _default_device(), jax.sharding.get_abstract_mesh().abstract_device
    platform = getattr(device, "platform", device)
    capability = getattr(device, "compute_capability", None)
    if target and target.platform != platform:  # a build for another machine
        platform, capability = target.platform, None
    if platform not in ("gpu", "cuda"):
        return f"the platform is {platform}"
    if capability is not None and float(capability) < CAPABILITY:
        return f"the compute capability is {capability}, kernels need {CAPABILITY}"
    if switch == "0":
        return f"{SWITCH}=0 turns kernels off"
    return None


def hopper_refusal() -> str | None:
    """Says why kernels around Hopper's `wgmma` cannot run on a device that others run on."""
    capability = getattr(_default_device(), "compute_capability", None)
    if capability is not None and int(float(capability)) != int(CAPABILITY):
        return f"the compute capability is {capability}, many tokens need {CAPABILITY}"
    return None


def _default_device():
    return jax.config.jax_default_device or jax.devices()[0]  # pyright: ignore[reportAttributeAccessIssue]


def choose(op: str, refusal: str | None) -> bool:
    """Tells whether the kernel runs; remembers the choice and logs it."""
    device, mesh = device_refusal(), jax.sharding.get_abstract_mesh()
    if mesh.size > 1 and not mesh.are_all_axes_manual:
        refusal = f"the model is spread over {mesh.size} devices"
    choice = device or refusal or KERNEL
    _chosen[op] = choice
    _announce(op, choice, logging.INFO if device or not refusal else logging.WARNING)
    return choice == KERNEL


@functools.cache
def _announce(op: str, choice: str, level: int) -> None:
    """Logs a choice the first time that it is made."""
    _log.log(level, "%s: %s", op, choice if choice == KERNEL else f"plain JAX, {choice}")
