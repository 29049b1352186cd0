"""A row of bench_kernels.py's table, and what all rows share."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

ROTATE = 250e6  # bytes: more than 4 x L2
# Calls a trip at least: few launches are not captured, and a trip then costs 27 us by itself.
CALLS = 8
IN_TURN = 2  # of what takes milliseconds: one alone would end in a copy to where it began
SHORT_CALLS = 40  # of kernels of few microseconds: a captured trip costs about 17 us by itself


@dataclasses.dataclass(frozen=True)
class Case:
    """What is timed, and how its result is judged.

    Attributes:
      op, variant, shape: names of the row.
      step: (call, carry, *args) -> carry, one call of the op, the `call`-th of a trip.
      setup: key -> (carry, args) on the device; cases with the same `setup` object share its
        result.
      bytes: read (and written) by one call, each weight and key once.
      calls: steps in one trip.
      result: (carry, *args) -> arrays that are defined after such a call.
      expected: the same by the plain reference in float32.
      tolerance: norm of the error over the norm of what is expected, at most.
      ceiling: the limit of which its share is told: "read", or "copy" of what also writes much.
      compared: not what the product runs, but what that is compared with.
      outside: in place of `step` and `result`, for what XLA does not run or what takes too long:
        (carry, *args) -> (what is compared, seconds per call several times); ImportError where it
        is not installed.
      flops: of one call, where these are its floor and not the bytes.
    """

    op: str
    variant: str
    shape: str
    step: Callable
    setup: Callable
    bytes: float
    calls: int = CALLS
    result: Callable | None = None
    expected: Callable | None = None
    tolerance: float = 0.0
    ceiling: str = "read"
    compared: bool = False
    outside: Callable | None = None
    flops: float = 0


def all_of(*results: jax.Array) -> jax.Array:
    """Returns a float32 number that waits for all of the arrays, whatever their shapes.

    XLA leaves out, or cuts, what nothing waits for.
    """
    results = jax.lax.optimization_barrier(results)
    return sum(x.ravel()[0].astype(jnp.float32) for x in results)


def trivial_kernel(x):
    """One block that adds 1."""

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    return pl.pallas_call(
        body, out_shape=x, compiler_params=plt.CompilerParams(num_warps=4, num_stages=1)
    )(x)
