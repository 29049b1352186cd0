"""`inkling-jax env`: what a bug report needs to say about the machine."""

import argparse
import importlib.metadata
import os
import platform
from typing import Any

import inkling_jax as ij

_PACKAGES = (
    "jax", "jaxlib", "jax-cuda13-plugin", "jax-triton", "triton", "flax", "orbax-checkpoint",
    "numpy", "ml_dtypes", "safetensors", "tokenizers", "huggingface_hub",
)  # fmt: skip
_NVIDIA_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: the command has no flags of its own."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Returns versions, devices, the kernels that would run, and advice where something lacks."""
    import jax  # here, so that --version and --help stay fast

    result = {
        "inkling_jax": ij.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "backend": jax.default_backend(),
        "devices": [_device(d) for d in jax.devices()],
        "kernels": _kernels(),
        "advice": _advice(jax.default_backend()),
    }
    if not args.json:
        _show(result)
    return result


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernels() -> str:
    from inkling_jax import kernel_choice, ops

    if refusal := kernel_choice.device_refusal():
        return f"plain JAX, {refusal}"
    return f"{', '.join(ops.OPERATIONS)} (--verbose logs each choice)"


def _device(device: Any) -> dict[str, Any]:
    stats = device.memory_stats() or {}
    return {
        "id": device.id,
        "kind": device.device_kind,
        "compute_capability": getattr(device, "compute_capability", None),
        "memory_bytes": stats.get("bytes_limit"),
    }


def _advice(backend: str) -> str | None:
    """Returns the remedy for a GPU host on which JAX, which warns of it itself, uses the CPU."""
    if backend != "cpu" or not any(map(os.path.exists, _NVIDIA_DEVICES)):
        return None
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return f"an NVIDIA GPU is present, JAX_PLATFORMS={platforms} keeps JAX off it"
    return "an NVIDIA GPU is present, to use it run: pip install 'inkling-jax[cuda]'"


def _show(result: dict[str, Any]) -> None:
    print(f"inkling-jax {result['inkling_jax']}, Python {result['python']}, {result['platform']}")
    for name, version in result["packages"].items():
        print(f"  {name:18} {version or 'not installed'}")
    print(f"backend {result['backend']}")
    for device in result["devices"]:
        memory = device["memory_bytes"]
        size = f", {memory / 2**30:.1f} GiB" if memory else ""
        print(f"  device {device['id']}: {device['kind']}{size}")
    print(f"kernels {result['kernels']}")
    if result["advice"]:
        print(f"advice: {result['advice']}")
