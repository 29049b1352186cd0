"""conv_mix over many tokens as one Pallas-Triton kernel, bound by bytes.

A program owns a few consecutive tokens. First it convolves all of them and adds them to the running
sum, some columns at a time, so that taps and earlier inputs are read once for several tokens. Then
it mixes token after token, the row in registers: every source is read once, while the one before it
is being weighed, and enters a running softmax (per query the greatest score so far, the sum of the
weights and what was mixed by them).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

TOKENS = 8  # of a program
LEAST = 128  # of what the hidden size is a multiple: four warps of single elements


class Operands(NamedTuple):
    """What `conv_mix_long` reads, `weight` as [c, D]; in the kernel, references to the same."""

    partial: Any | None
    u: Any
    before: Any
    blocks: tuple[Any, ...]
    scales: tuple[Any, ...]
    queries: Any
    norms: tuple[Any, ...]
    weight: Any


def run(given: Operands, dtype, eps, norm_eps, interpret):
    """Returns (z, partial, scale); `partial` is written in place."""
    batch, tokens, _ = given.u.shape
    leaves, tree = jax.tree.flatten(given)
    queries = len(given.norms)

    def body(*refs):
        operands, outs = tree.unflatten(refs[: len(leaves)]), refs[len(leaves) :]
        _add(operands, outs[queries])
        if not interpret:
            plt.debug_barrier()  # what one thread has stored others load
        _mix(operands, outs, eps, norm_eps)

    def out(dtype):
        return jax.ShapeDtypeStruct(given.u.shape, dtype)

    *z, partial, scale = pl.pallas_call(
        body,
        grid=(pl.cdiv(tokens, TOKENS), batch),
        out_shape=(
            *(out(dtype) for _ in given.norms),
            out(jnp.float32),
            jax.ShapeDtypeStruct((batch, tokens), jnp.float32),
        ),
        input_output_aliases={} if given.partial is None else {0: queries},
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="conv_mix_long",
    )(*leaves)
    return tuple(z), partial, scale


def _add(given, partial_ref):
    """Convolves the program's tokens with what lies before them and adds them to the sum."""
    (_, tokens, width), row = given.u.shape, pl.program_id(1)
    taps, step = given.weight.shape[0], width & -width
    token = pl.program_id(0) * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)[:, None]
    inside = token < tokens

    def columns(i, _):
        lane = i * step + jnp.arange(step, dtype=jnp.int32)[None]

        def load(ref, at, mask):
            return plt.load(ref.at[row, jnp.where(mask, at, 0), lane], mask=mask, other=0)

        value = load(given.u, token, inside) * (given.weight[taps - 1, lane] + 1)
        for back in range(1, taps):
            at = token - back
            earlier = load(given.u, at, inside & (at >= 0))
            earlier += load(given.before, at + taps - 1, at < 0)
            value += given.weight[taps - 1 - back, lane] * earlier
        value *= 1 / math.sqrt(taps + 1)
        if given.partial is not None:
            value += load(given.partial, token, inside)
        # Past the end where masked: the interpreter stores masked elements too.
        at = partial_ref.at[row, jnp.where(inside, token, tokens), lane]
        plt.store(at, value, mask=inside)

    lax.fori_loop(0, width // step, columns, None)


def _mix(given, out_refs, eps, norm_eps):
    """Reads what follows off the program's tokens, one after the other."""
    *z_refs, partial_ref, scale_ref = out_refs
    (_, tokens, width), row = given.u.shape, pl.program_id(1)
    first, parts, root = pl.program_id(0) * TOKENS, _parts(width), math.sqrt(width)

    def load(ref, *at):
        return [ref[(*at, part)].astype(jnp.float32) for part in parts]

    queries = [load(given.queries, n) for n in range(len(z_refs))]

    def one(i, _):
        at = (row, first + i)
        value = load(partial_ref, *at)
        sources = (load(block, *at) for block in given.blocks)
        upcoming = next(sources, [])
        scale = _inverse_rms(value, eps)
        scale_ref[at] = scale
        tops = [_dot(value, query) * (scale / root) for query in queries]
        totals = [jnp.float32(1) for _ in queries]
        mixed = [[x * scale for x in value] for _ in queries]
        for ref in given.scales:
            source, upcoming = upcoming, next(sources, [])
            scale = ref[at]
            for n, query in enumerate(queries):
                score = _dot(source, query) * (scale / root)
                top = jnp.maximum(tops[n], score)
                kept, share = jnp.exp(tops[n] - top), jnp.exp(score - top)
                tops[n], totals[n] = top, totals[n] * kept + share
                pairs = zip(mixed[n], source, strict=True)
                mixed[n] = [x * kept + y * (share * scale) for x, y in pairs]
        for x, total, z_ref, norm_ref in zip(mixed, totals, z_refs, given.norms, strict=True):
            x = [y * (1 / total) for y in x]
            unit = _inverse_rms(x, norm_eps)
            for y, norm, part in zip(x, load(norm_ref), parts, strict=True):
                z_ref[(*at, part)] = (y * unit * norm).astype(z_ref.dtype)

    lax.fori_loop(0, jnp.minimum(TOKENS, tokens - first), one, None)


def _parts(width):
    """Cuts a row into powers of two, the only sizes that Triton has: 4608 into 4096 and 512."""
    sizes = [1 << bit for bit in range(width.bit_length() - 1, -1, -1) if width >> bit & 1]
    return [pl.ds(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _dot(x, y):
    """The inner product of two rows in parts."""
    return functools.reduce(jnp.add, [jnp.sum(a * b) for a, b in zip(x, y, strict=True)])


def _inverse_rms(x, eps):
    return lax.rsqrt(_dot(x, x) * (1 / sum(part.size for part in x)) + eps)
