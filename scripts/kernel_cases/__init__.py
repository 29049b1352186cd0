"""What bench_kernels.py times and checks: a module per operation, each of which yields cases."""

from collections.abc import Iterator

from scripts.kernel_cases import (
    attention,
    attention_prefill,
    conv_mix,
    draft_attention,
    limits,
    moe_experts,
    moe_prefill,
    projections,
    qkv_prep,
    router,
    sampling,
)
from scripts.kernel_cases.case import Case

__all__ = ["Case", "cases"]


def cases() -> Iterator[Case]:
    """Yields all rows by importance; the first are the ceilings."""
    modules = (
        limits, moe_experts, moe_prefill, attention, attention_prefill, projections, conv_mix,
        qkv_prep, router, sampling, draft_attention,
    )  # fmt: skip
    rows = [case for module in modules for case in module.cases()]
    yield from sorted(rows, key=lambda case: case.compared)
