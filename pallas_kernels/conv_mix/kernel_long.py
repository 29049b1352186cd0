"""conv_mix over many rows as one Pallas-Triton kernel: a program per token, bound by bytes.

Every source is read once, while the one before it is being weighed, and enters a running softmax:
per query the greatest score so far, and what was mixed by it. Taps, queries and norms come out of
the cache that the programs of a multiprocessor share.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

LEAST = 128  # of what the row is a multiple: four warps of single elements


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


def run(given: Operands, dtype, eps, norm_eps, interpret, warps=None):
    """Returns (z, partial, scale); `partial` is written in place."""
    batch, tokens, _ = given.u.shape
    leaves, tree = jax.tree.flatten(given)
    queries = len(given.norms)

    def body(*refs):
        _body(tree.unflatten(refs[: len(leaves)]), refs[len(leaves) :], eps, norm_eps)

    def out(dtype):
        return jax.ShapeDtypeStruct(given.u.shape, dtype)

    *z, partial, scale = pl.pallas_call(
        body,
        grid=(tokens, batch),
        out_shape=(
            *(out(dtype) for _ in given.norms),
            out(jnp.float32),
            jax.ShapeDtypeStruct((batch, tokens), jnp.float32),
        ),
        input_output_aliases={} if given.partial is None else {0: queries},
        compiler_params=plt.CompilerParams(
            num_warps=warps or (4 if queries == 1 else 8), num_stages=1
        ),
        interpret=interpret,
        name="conv_mix_long",
    )(*leaves)
    return tuple(z), partial, scale


def _body(given, out_refs, eps, norm_eps):
    *z_refs, partial_ref, scale_ref = out_refs
    token, row = pl.program_id(0), pl.program_id(1)
    width = given.u.shape[2]
    parts = _parts(width)

    def load(ref, *at):
        return [ref[(*at, part)].astype(jnp.float32) for part in parts]

    sources = (load(block, row, token) for block in given.blocks)
    upcoming = next(sources, [])
    value = [_convolve(given, row, token, part) for part in parts]
    if given.partial is not None:
        value = [x + y for x, y in zip(value, load(given.partial, row, token), strict=True)]
    for x, part in zip(value, parts, strict=True):
        partial_ref[row, token, part] = x
    scale = _inverse_rms(value, eps)
    scale_ref[row, token] = scale

    root = math.sqrt(width)
    queries = [load(given.queries, n) for n in range(len(z_refs))]
    tops = [_dot(value, query) * (scale / root) for query in queries]
    totals = [jnp.float32(1) for _ in queries]
    mixed = [[x * scale for x in value] for _ in queries]
    for scale_ref in given.scales:
        source, upcoming = upcoming, next(sources, [])
        scale = scale_ref[row, token]
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
            z_ref[row, token, part] = (y * unit * norm).astype(z_ref.dtype)


def _convolve(given, row, token, part):
    """A part of the row, convolved with what lies before it in this call or in `before`."""
    taps = given.weight.shape[0]
    value = given.u[row, token, part] * (given.weight[taps - 1, part] + 1)
    for back in range(1, taps):
        inside = jnp.broadcast_to(token >= back, (part.size,))
        new = plt.load(given.u.at[row, jnp.maximum(token - back, 0), part], mask=inside, other=0)
        at = jnp.minimum(taps - 1 + token - back, taps - 2)
        past = plt.load(given.before.at[row, at, part], mask=~inside, other=0)
        value += given.weight[taps - 1 - back, part] * (new + past)
    return value * (1 / math.sqrt(taps + 1))


def _parts(width):
    """Cuts a row into powers of two, the only sizes that Triton has: 4608 into 4096 and 512."""
    sizes = [1 << bit for bit in range(width.bit_length() - 1, -1, -1) if width >> bit & 1]
    return [pl.ds(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _dot(x, y):
    """The inner product of two rows in parts."""
    return functools.reduce(jnp.add, [jnp.sum(a * b) for a, b in zip(x, y, strict=True)])


def _inverse_rms(x, eps):
    return lax.rsqrt(_dot(x, x) * (1 / sum(part.size for part in x)) + eps)
