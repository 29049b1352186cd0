"""What bench_kernels.py times and checks: a module per operation, each of which yields cases."""

from collections.abc import Iterator

from scripts.kernel_cases import (
    attention,
    conv_mix,
    limits,
    moe_experts,
    projections,
    qkv_prep,
    router,
    sampling,
)
from scripts.kernel_cases.case import Case

__all__ = ["Case", "cases"]


def cases() -> Iterator[Case]:
    """Yields all rows; the first is the read ceiling."""
    modules = limits, router, sampling, qkv_prep, conv_mix, projections, attention, moe_experts
    for module in modules:
        yield from module.cases()
