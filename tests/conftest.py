"""What every test runs under: 8 simulated CPU devices, strict promotion, checked shapes."""

import datetime
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import jaxtyping
import pytest

# JAX reads all of these when it is first imported. Workers inherit them, so that what one
# compiled in this run serves the others; JAX_PLATFORMS=cuda,cpu is how the GPU tests are run.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# NVLink multicast stays off: a fault in it can take down the GPUs of a host.
os.environ["NCCL_NVLS_ENABLE"] = "0"
if os.environ["JAX_PLATFORMS"] == "cpu":
    # The plugin for CUDA only compiles then, and must not ask for a driver.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    # Tests compile more than they compute: without optimization a program compiles twice as fast.
    # Not on a GPU, where the kernels' own code would be left unoptimized too.
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
_own_cache = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if _own_cache:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="inkling-jax-tests-")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

jaxtyping.install_import_hook(
    ["inkling_jax", "pallas_kernels", "sharding", "checkpoints"], "shape_checks.check"
)


def pytest_addoption(parser):
    parser.addoption("--summary", metavar="FILE", help="write a summary of the run as JSON")


def pytest_collection_modifyitems(items):
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import jax

    if jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason="needs a CUDA device and JAX_PLATFORMS=cuda,cpu")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter, config):
    path = config.getoption("--summary")
    if path and not hasattr(config, "workerinput"):  # a worker of xdist knows its own tests only
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(run_summary(terminalreporter.stats), indent=1) + "\n")


def run_summary(stats):
    """Returns what a committed result states of a test run: counts, device, commit, date."""
    import jax

    count = {name: len(stats.get(name, ())) for name in ("passed", "skipped", "failed", "error")}
    return {
        "run": count["passed"] + count["failed"] + count["error"],
        "passed": count["passed"],
        "skipped": count["skipped"],
        "failed": count["failed"] + count["error"],
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "commit": os.environ.get("COMMIT") or _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _commit():
    """Returns the checkout's commit; a copy without .git is told it by $COMMIT."""
    if not shutil.which("git"):
        return None
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return git.stdout.strip() or None


def pytest_unconfigure():
    if _own_cache:  # a worker finds the variable set, so only the first process removes it
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
