"""What the device can do at most: read, copy, multiply; and what a launch costs in the loop."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from scripts.kernel_cases.case import IN_TURN, SHORT_CALLS, Case, trivial_kernel

FLOATS = 1 << 30
SIDE = 8192  # of the matrices


def cases() -> Iterator[Case]:
    """Yields the ceilings of reading, copying and multiplying, then the launch."""

    def read(call, carry, x):
        return jnp.sum(x * (1 + 0 * carry))  # the factor makes each sum depend on the one before

    def copy(call, carry):
        return carry + 1

    def multiply(call, x, y):
        return x @ y

    def matrices(key):
        x, y = jax.random.normal(key, (2, SIDE, SIDE), jnp.bfloat16)
        return x, (y / SIDE**0.5,)

    def launch(call, carry):
        return trivial_kernel(carry)

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
        "limit", "product", f"xla, {SIDE}^3 bf16", multiply, matrices, 6 * SIDE**2, IN_TURN,
        result=jnp.matmul, expected=lambda x, y: x.astype(jnp.float32) @ y.astype(jnp.float32),
        tolerance=5e-3, flops=2 * SIDE**3,
    )  # fmt: skip
    yield Case(
        "limit", "launch", "pallas, 128 floats", launch,
        lambda key: (jnp.zeros(128, jnp.float32), ()), 1024, SHORT_CALLS,
        result=trivial_kernel, expected=lambda x: x + 1,
    )  # fmt: skip
