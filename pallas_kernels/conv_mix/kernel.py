"""conv_mix as two Pallas-Triton kernels: gather what needs a whole row, then apply it.

The only facts about a whole row are inner products: of each source with each query and of the new
partial with each source. The products between finished blocks are known from their creation (the
Gram matrix), so the norm of a source and the norm of the mix both follow from products, and one
reduction over the row is enough. A kernel boundary is that reduction's barrier.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.conv_mix.tiles import SLOTS, TileConfig


def accumulate(u, partial, sources, queries, weight, state, start, lengths, count, keep,
               tiles: TileConfig, interpret):  # fmt: skip
    """Convolution and residual; returns the new partial (in `sources` if keep), state, products.

    Products: float32 [B T, D / columns, nq + 1, 16] sums over a program's columns of source times
    query and, last, source times partial; slot `count` is the partial itself.
    """
    batch, tokens, _, width = u.shape
    rows, chunks = batch * tokens, width // tiles.columns
    inputs = [u, sources, queries, weight, state, start, lengths]
    if partial is not None:
        inputs.append(partial)
    products = (rows, chunks, queries.shape[0] + 1, SLOTS)
    out_shape = [
        jax.ShapeDtypeStruct(state.shape, state.dtype),
        jax.ShapeDtypeStruct(products, jnp.float32),
        jax.ShapeDtypeStruct(sources.shape, sources.dtype)
        if keep
        else jax.ShapeDtypeStruct((batch, tokens, width), jnp.float32),
    ]
    state, products, out = pl.pallas_call(
        functools.partial(_accumulate_body, count, keep, tiles),
        grid=(chunks, rows),
        out_shape=out_shape,
        input_output_aliases={4: 0, 1: 2} if keep else {4: 0},
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="conv_mix_accumulate",
    )(*inputs)
    return out, state, products


def _accumulate_body(count, keep, tiles, u_ref, source_ref, query_ref, weight_ref, state_ref,
                     start_ref, length_ref, *rest):  # fmt: skip
    *partial_ref, new_state_ref, product_ref, out_ref = rest
    _, tokens, parts, _ = u_ref.shape
    taps, slots = weight_ref.shape[1], state_ref.shape[1]
    chunk, line = pl.program_id(0), pl.program_id(1)
    row, token = lax.div(line, tokens), lax.rem(line, tokens)
    start = start_ref[row]
    column = chunk * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)

    @pl.when(token < length_ref[row])
    def _():
        y = jnp.zeros(column.shape, jnp.float32)
        for j in range(taps):
            back = taps - 1 - j
            new = jnp.broadcast_to(token >= back, column.shape)  # an input of this very call
            at = jnp.maximum(token - back, 0)
            tap = jnp.zeros(column.shape, jnp.float32)
            for part in range(parts):
                tap += plt.load(u_ref.at[row, at, part, column], mask=new, other=0)
            if back:
                position = start + token - back
                old = ~new & (position >= 0)
                slot = lax.rem(jnp.maximum(position, 0), slots)
                tap += plt.load(state_ref.at[row, slot, column], mask=old, other=0)
            y += tap * weight_ref[column, j]
        new_state_ref[row, lax.rem(start + token, slots), column] = tap
        value = (y + tap) * (1 / math.sqrt(taps + 1))
        if partial_ref:
            value += partial_ref[0][row, token, column].astype(jnp.float32)
        if keep:
            rounded = value.astype(out_ref.dtype)
            out_ref[count, row, token, column] = rounded
            value = rounded.astype(jnp.float32)
        else:
            out_ref[row, token, column] = value
        index = jnp.arange(SLOTS, dtype=jnp.int32)
        source = _sources(source_ref, count, row, token, column, value)
        for n in range(query_ref.shape[0]):
            product_ref[line, chunk, n, index] = (source * query_ref[n, column][None]).sum(axis=1)
        product_ref[line, chunk, query_ref.shape[0], index] = (source * value[None]).sum(axis=1)


def _sources(source_ref, count, row, token, column, partial):
    """[16, columns]: the finished blocks, the partial in place `count`, zeros."""
    index = jnp.arange(SLOTS, dtype=jnp.int32)[:, None]
    at = source_ref.at[jnp.minimum(index, source_ref.shape[0] - 1), row, token, column[None]]
    blocks = plt.load(at, mask=index < count, other=0).astype(jnp.float32)
    return jnp.where(index == count, partial[None], blocks)


def apply(partial, products, sources, gram, queries, norms, lengths, count, eps, tiles, interpret):
    """Mixes and normalises: z [nq, B, T, D] and the Gram matrix with the partial's products."""
    batch, tokens, width = sources.shape[1:]
    inputs = [products, sources, gram, norms, lengths] + ([] if partial is None else [partial])
    return pl.pallas_call(
        functools.partial(_apply_body, count, eps, tiles),
        grid=(width // tiles.columns, batch * tokens),
        out_shape=[
            jax.ShapeDtypeStruct((queries.shape[0], batch, tokens, width), sources.dtype),
            jax.ShapeDtypeStruct(gram.shape, gram.dtype),
        ],
        input_output_aliases={2: 1},
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="conv_mix_apply",
    )(*inputs)


def _apply_body(count, eps, tiles, product_ref, source_ref, gram_ref, norm_ref, length_ref, *rest):
    *partial_ref, z_ref, new_gram_ref = rest
    _, _, tokens, width = source_ref.shape
    _, chunks, groups, _ = product_ref.shape
    chunk, line = pl.program_id(0), pl.program_id(1)
    row, token = lax.div(line, tokens), lax.rem(line, tokens)
    column = chunk * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)

    @pl.when(token < length_ref[row])
    def _():
        index = jnp.arange(SLOTS, dtype=jnp.int32)
        each = jnp.arange(pl.next_power_of_2(chunks), dtype=jnp.int32)[:, None]

        def total(group):
            at = product_ref.at[line, jnp.minimum(each, chunks - 1), group, index[None]]
            return plt.load(at, mask=each < chunks, other=0).sum(axis=0)

        cross = total(groups - 1)
        # Every program reads the finished blocks' entries, which the store below leaves alone.
        down, along = index[:, None], index[None]
        old = plt.load(gram_ref.at[row, token, down, along], mask=(down < count) & (along < count),
                       other=0)  # fmt: skip
        gram = jnp.where(down == count, cross[None], jnp.where(along == count, cross[:, None], old))
        edge = jnp.maximum(down, along) == count

        @pl.when(chunk == 0)
        def _():
            plt.store(new_gram_ref.at[row, token, down, along], gram, mask=edge)

        square = jnp.where(down == along, gram, 0).sum(axis=0)
        inverse = lax.rsqrt(square / width + eps)
        if partial_ref:
            partial = partial_ref[0][row, token, column].astype(jnp.float32)
        else:
            partial = source_ref[count, row, token, column].astype(jnp.float32)
        source = _sources(source_ref, count, row, token, column, partial)
        for n in range(groups - 1):
            score = total(n) * inverse * (1 / math.sqrt(width))
            score = jnp.where(index <= count, score, -jnp.inf)
            share = jnp.exp(score - score.max())
            share = share / share.sum() * inverse
            power = (gram * share[:, None] * share[None]).sum()
            mixed = (source * share[:, None]).sum(axis=0) * lax.rsqrt(power / width + eps)
            z = mixed * norm_ref[n, column].astype(jnp.float32)
            z_ref[n, row, token, column] = z.astype(z_ref.dtype)
