"""A kernel that writes behind its array: what compute-sanitizer must find before it is believed.

Run by `make sanitize-gpu`.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

BEHIND = 1 << 20  # elements: beyond what an allocation is rounded up to


def _body(x_ref, o_ref):
    at = jnp.arange(128, dtype=jnp.int32)
    plt.store(o_ref.at[at + BEHIND], x_ref[at])


if __name__ == "__main__":
    x = jnp.zeros(128)
    planted = pl.pallas_call(
        _body, out_shape=x, compiler_params=plt.CompilerParams(num_warps=4), name="planted"
    )
    jax.block_until_ready(planted(x))
