"""Programmatic dependent launch: what lets a kernel's launch overlap the end of the one before."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int32


def launch_next(index: Int32[Array, ""], interpret: bool) -> Int32[Array, ""]:
    """Returns `index`; programs of the launch that follows may start from here on.

    They find nothing half-written: XLA lets each of its kernels, ours through Pallas-Triton among
    them, first wait until the one before has ended. To be called early in a body, with a number
    that it uses, as Triton drops inline PTX without a result; and with one number, as Triton would
    not know of a range that went through PTX that its elements follow each other, and load each.
    """
    if interpret:
        return index
    [index] = plt.elementwise_inline_asm(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        args=[jnp.full(1, index)],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)],
    )
    return index.max()
