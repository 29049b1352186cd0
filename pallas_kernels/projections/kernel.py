"""Thin products as Pallas-Triton `dot`s with the weights as the operand of many rows.

The programs of all products form one grid; each finds the product it belongs to.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.projections.tiles import ROWS, columns, programs


def project(inputs, weights, stages, interpret):
    """[T, K] and [N, K] -> float32 [T, N], for every pair of them."""
    tokens = inputs[0].shape[0]
    return pl.pallas_call(
        _body,
        grid=(sum(programs(w.shape[0]) for w in weights),),
        out_shape=[jax.ShapeDtypeStruct((tokens, w.shape[0]), jnp.float32) for w in weights],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=stages),
        interpret=interpret,
        name="project",
    )(*inputs, *weights)


def _body(*refs):
    program, begin = pl.program_id(0), 0
    products = len(refs) // 3
    for x_ref, weight_ref, out_ref in (refs[i::products] for i in range(products)):
        end = begin + programs(weight_ref.shape[0])
        run = functools.partial(_product, program - begin, x_ref, weight_ref, out_ref)
        pl.when((begin <= program) & (program < end))(run)
        begin = end


def _product(tile, x_ref, weight_ref, out_ref):
    tokens, total = x_ref.shape
    width = columns(total)
    row = tile * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    real = row < weight_ref.shape[0]
    safe = jnp.minimum(row, weight_ref.shape[0] - 1)[:, None]
    token = jnp.arange(max(16, pl.next_power_of_2(tokens)), dtype=jnp.int32)
    line = jnp.minimum(token, tokens - 1)[None, :]

    def step(i, acc):
        column = i * width + jnp.arange(width, dtype=jnp.int32)
        w = weight_ref[safe, column[None, :]]
        # Masked, not repeated: all programs read the same lines of L2 at about the same time.
        x = plt.load(x_ref.at[line, column[:, None]], mask=(token < tokens)[None, :], other=0)
        return acc + plt.dot(w, x)

    acc = jnp.zeros((ROWS, token.shape[0]), jnp.float32)
    acc = lax.fori_loop(0, total // width, step, acc)
    keep = real[:, None] & (token < tokens)[None, :]
    # Past the end where not kept: the interpreter stores masked elements too, unchanged.
    plt.store(out_ref.at[jnp.where(keep, token[None, :], tokens), safe], acc, mask=keep)
