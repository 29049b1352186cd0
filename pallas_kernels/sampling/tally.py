"""The threshold of p in a row that k does not cut, which may keep a tenth of all tokens.

Four bits at a time, from the highest: a launch sums what has each of the sixteen values that the
next four bits can have, chunk by chunk of the row; the next one adds up the chunks and goes on.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.sampling.row import (
    LOWEST,
    load_row,
    mass_to_reach,
    only_p_cuts,
    order_of,
    total_mass,
)
from pallas_kernels.sampling.tiles import CHUNK

BITS = 4  # of a launch


def tally(
    logits: jax.Array,
    largest: jax.Array,
    sums: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The last launch's sums [B, chunks, 16], the bits known before it [B], and the sum above [B].

    `chosen` makes of them what they say; rows that k cuts or p does not hold anything.
    """
    rows, vocabulary = logits.shape
    chunks = pl.cdiv(vocabulary, CHUNK)
    found: list[jax.Array] = []
    for shift in range(32 - BITS, -1, -BITS):
        found = pl.pallas_call(
            functools.partial(_body, shift),
            grid=(chunks, rows),
            out_shape=[
                jax.ShapeDtypeStruct((rows, chunks, 1 << BITS), jnp.float32),
                jax.ShapeDtypeStruct((rows,), jnp.int32),
                jax.ShapeDtypeStruct((rows,), jnp.float32),
            ],
            compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
            interpret=interpret,
            name="sampling_tally",
        )(logits, largest, sums, top_k, top_p, *found)
    sums, known, above = found
    return sums, known, above


def _body(shift, logit_ref, largest_ref, sum_ref, k_ref, p_ref, *refs):
    *before, sums_ref, known_ref, above_ref = refs
    chunk, row, vocabulary = pl.program_id(0), pl.program_id(1), logit_ref.shape[1]

    @pl.when(only_p_cuts(k_ref[row], p_ref[row], vocabulary))
    def _():
        top, mass = total_mass(largest_ref, sum_ref, row)
        known, above = jnp.int32(0), jnp.float32(0)
        if before:
            sums_before, known_before, above_before = before
            target = mass_to_reach(p_ref[row], mass)
            known, above = chosen(sums_before, known_before, above_before, row, target)
        known_ref[row], above_ref[row] = known, above  # all programs write the same
        token = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        value = load_row(logit_ref, row, token)
        bits = lax.shift_right_logical(order_of(value, token < vocabulary) ^ LOWEST, shift)
        begins = lax.shift_right_logical(bits, BITS) == known if before else True
        weight = jnp.where(begins, jnp.exp(value - top), 0)
        for i in range(1 << BITS):
            sums_ref[row, chunk, i] = jnp.where(bits & ((1 << BITS) - 1) == i, weight, 0).sum()


def chosen(sums_ref, known_ref, above_ref, row, target):
    """The known bits with the next ones: the largest that reach the target; and the sum above."""
    chunk = jnp.arange(pl.next_power_of_2(sums_ref.shape[1]), dtype=jnp.int32)[:, None]
    bits = (1 << BITS) - 1 - jnp.arange(1 << BITS, dtype=jnp.int32)  # falling
    at = sums_ref.at[row, chunk, bits[None]]
    sums = plt.load(at, mask=chunk < sums_ref.shape[1], other=0).sum(axis=0)
    above = above_ref[row]
    found = jnp.where(above + jnp.cumsum(sums) >= target, bits, 0).max()
    above += jnp.where(bits > found, sums, 0).sum()
    return (known_ref[row] << BITS) + found, above


def chunk_of_tie(sums_ref, row, bits, weight, nth):
    """In which chunk the nth of the tokens with these bits is, and how many are in those before."""
    chunk = jnp.arange(pl.next_power_of_2(sums_ref.shape[1]), dtype=jnp.int32)
    at = sums_ref.at[row, chunk, bits & ((1 << BITS) - 1)]
    sums = plt.load(at, mask=chunk < sums_ref.shape[1], other=0)
    count = (sums / weight + 0.5).astype(jnp.int32)
    passed = jnp.cumsum(count) < nth
    return passed.astype(jnp.int32).sum(), jnp.where(passed, count, 0).sum()
