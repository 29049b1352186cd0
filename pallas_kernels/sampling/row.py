"""What the kernels share: rows of logits as integers of the same order, and what p asks of them."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

LOWEST = -(2**31)


def order_of(x, exists):
    """Integers in the order of floats; the lowest where there is nothing."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(exists, bits ^ (lax.shift_right_arithmetic(bits, 31) & 0x7FFFFFFF), LOWEST)


def value_of(order):
    """Undoes `order_of`."""
    bits = order ^ (lax.shift_right_arithmetic(order, 31) & 0x7FFFFFFF)
    return lax.bitcast_convert_type(bits, jnp.float32)


def load_row(ref, row, index):
    """Values of a row, -inf behind its end."""
    return plt.load(ref.at[row, index], mask=index < ref.shape[1], other=-jnp.inf)


def store_row(ref, row, index, value, mask):
    """Keeps what the mask has."""
    # Past the end where not kept: the interpreter stores masked elements too, unchanged.
    plt.store(ref.at[row, jnp.where(mask, index, ref.shape[1])], value, mask=mask)


def only_p_cuts(k, p, vocabulary):
    """Whether p cuts the row and k does not."""
    return (k >= vocabulary) & (p < 1)


def total_mass(largest_ref, sum_ref, row):
    """The largest logit, and Σ exp(logit - it)."""
    group = jnp.arange(pl.next_power_of_2(largest_ref.shape[1]), dtype=jnp.int32)
    largest = load_row(largest_ref, row, group)
    top = largest.max()
    sums = plt.load(sum_ref.at[row, group], mask=group < sum_ref.shape[1], other=0)
    return top, (sums * jnp.exp(largest - top)).sum()


def mass_to_reach(p, mass):
    """What the sum of those that are kept must reach."""
    return jnp.maximum(p, 1e-30) * mass
