"""A thin product as a Pallas-Triton `dot` with the weight as the operand of 64 rows."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.projections.tiles import TileConfig


def project(x, weight, bounds, tiles: TileConfig, dtype, interpret):
    """[G, T, K] and [N, K] -> [T, parts, N]."""
    tokens, rows = x.shape[1], weight.shape[0]
    return pl.pallas_call(
        functools.partial(_body, bounds, tiles),
        grid=(-(-rows // tiles.rows), tiles.parts),
        out_shape=jax.ShapeDtypeStruct((tokens, tiles.parts, rows), dtype),
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="project",
    )(x, weight)


def _body(bounds, tiles, x_ref, weight_ref, out_ref):
    tokens, total = x_ref.shape[1:]
    tile, part = pl.program_id(0), pl.program_id(1)
    row = tile * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    real = row < weight_ref.shape[0]
    safe = jnp.minimum(row, weight_ref.shape[0] - 1)[:, None]
    group = sum((tile * tiles.rows >= bound).astype(jnp.int32) for bound in bounds)
    token = jnp.arange(max(16, pl.next_power_of_2(tokens)), dtype=jnp.int32)
    line = jnp.minimum(token, tokens - 1)[None, :]
    steps = total // tiles.columns // tiles.parts

    def step(i, acc):
        start = (part * steps + i) * tiles.columns
        column = start + jnp.arange(tiles.columns, dtype=jnp.int32)
        w = weight_ref[safe, column[None, :]]
        return acc + plt.dot(w, x_ref[group, line, column[:, None]])

    acc = lax.fori_loop(0, steps, step, jnp.zeros((tiles.rows, token.shape[0]), jnp.float32))
    keep = real[:, None] & (token < tokens)[None, :]
    # Past the end where not kept: the interpreter stores masked elements too, unchanged.
    at = out_ref.at[jnp.where(keep, token[None, :], tokens), part, safe]
    plt.store(at, acc.astype(out_ref.dtype), mask=keep)
