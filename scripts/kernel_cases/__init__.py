"""What bench_kernels.py times and checks: a module per operation, each of which yields cases."""

from collections.abc import Iterator

from scripts.kernel_cases import attention, conv_mix, limits, moe_experts, projections
from scripts.kernel_cases.case import Case

__all__ = ["Case", "cases"]


def cases() -> Iterator[Case]:
    """Yields all rows; the first is the read ceiling."""
    for module in (limits, moe_experts, attention, conv_mix, projections):
        yield from module.cases()
