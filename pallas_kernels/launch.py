"""Programmatic dependent launch: what lets a kernel's launch overlap the end of the one before."""

import jax
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int32


def launch_next(place: Int32[Array, " n"], interpret: bool) -> Int32[Array, " n"]:
    """Returns `place`; programs of the launch that follows may start from here on.

    They find nothing half-written: XLA lets each of its kernels, ours through Pallas-Triton among
    them, first wait until the one before has ended. Called early in a kernel's body, with any
    indices that it uses, as Triton drops inline PTX without a result.
    """
    if interpret:
        return place
    [place] = plt.elementwise_inline_asm(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        args=[place],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(place.shape, place.dtype)],
    )
    return place
