"""Thin products as Pallas-Triton `dot`s with the weights as the operand of many rows.

The programs of all products form one grid; each finds the product it belongs to.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.launch import launch_next
from pallas_kernels.projections import tiles


def project(inputs, weights, interpret):
    """[T, K] and [N, K] -> float32 [T, N], for every pair of them."""
    tokens, totals = inputs[0].shape[0], [w.shape[0] for w in weights]
    rows = tiles.rows(totals)
    programs = tiles.programs(totals, rows)
    return pl.pallas_call(
        functools.partial(_body, rows, interpret),
        grid=(programs,),
        out_shape=[jax.ShapeDtypeStruct((tokens, total), jnp.float32) for total in totals],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=tiles.stages(programs)),
        interpret=interpret,
        name="project",
    )(*inputs, *weights)


def _body(rows, interpret, *refs):
    program, begin = launch_next(pl.program_id(0), interpret), 0
    products = len(refs) // 3
    for x_ref, weight_ref, out_ref in (refs[i::products] for i in range(products)):
        end = begin + tiles.programs(weight_ref.shape[:1], rows)
        run = functools.partial(_product, rows, program - begin, x_ref, weight_ref, out_ref)
        pl.when((begin <= program) & (program < end))(run)
        begin = end


def _product(rows, share, x_ref, weight_ref, out_ref):
    tokens, total = x_ref.shape
    width = tiles.columns(total)
    line = jnp.arange(tiles.ROWS, dtype=jnp.int32)
    row = share * rows + line
    real = (line < rows) & (row < weight_ref.shape[0])
    safe = jnp.minimum(row, weight_ref.shape[0] - 1)[:, None]
    token = jnp.arange(max(16, pl.next_power_of_2(tokens)), dtype=jnp.int32)
    given = jnp.minimum(token, tokens - 1)[None, :]

    def step(i, acc):
        column = i * width + jnp.arange(width, dtype=jnp.int32)
        w = plt.load(weight_ref.at[safe, column[None, :]], mask=real[:, None], other=0)
        # Masked, not repeated: all programs read the same lines of L2 at about the same time.
        x = plt.load(x_ref.at[given, column[:, None]], mask=(token < tokens)[None, :], other=0)
        return acc + plt.dot(w, x)

    acc = jnp.zeros((tiles.ROWS, token.shape[0]), jnp.float32)
    acc = lax.fori_loop(0, total // width, step, acc)
    keep = real[:, None] & (token < tokens)[None, :]
    # Past the end where not kept: the interpreter stores masked elements too, unchanged.
    plt.store(out_ref.at[jnp.where(keep, token[None, :], tokens), safe], acc, mask=keep)
