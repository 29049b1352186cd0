"""What the device can do at most: its read and copy rates, and what a launch costs in the loop."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from scripts.kernel_cases.case import CALLS, Case, trivial_kernel

FLOATS = 1 << 30


def cases() -> Iterator[Case]:
    """Yields the read and the copy ceiling, then the launch."""

    def read(i, carry, x):
        for _ in range(CALLS):  # the factor makes each sum depend on the one before
            carry = jnp.sum(x * (1 + 0 * carry))
        return carry

    def copy(i, carry):
        for _ in range(CALLS):
            carry = jax.lax.optimization_barrier(carry + 1)
        return carry

    def launch(i, carry):
        for _ in range(2 * CALLS):
            carry = trivial_kernel(carry)
        return carry

    yield Case(
        "limit", "read", f"xla sum of {4 * FLOATS / 1e9:.1f} GB", read,
        lambda key: (jnp.float32(0), (jnp.ones(FLOATS, jnp.float32),)), 4 * FLOATS,
        result=lambda carry, x: jnp.sum(x), expected=lambda carry, x: jnp.float32(FLOATS),
        tolerance=1e-6,
    )  # fmt: skip
    yield Case(
        "limit", "copy", f"xla, {4 * FLOATS / 1e9:.1f} GB and back", copy,
        lambda key: (jnp.ones(FLOATS, jnp.float32), ()), 8 * FLOATS,
        result=lambda carry: carry[:8] + 1, expected=lambda carry: jnp.full(8, 2.0),
        tolerance=1e-6,
    )  # fmt: skip
    yield Case(
        "limit", "launch", "pallas, 128 floats", launch,
        lambda key: (jnp.zeros(128, jnp.float32), ()), 1024, 2 * CALLS,
        result=trivial_kernel, expected=lambda x: x + 1,
    )  # fmt: skip
