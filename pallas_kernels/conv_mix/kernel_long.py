"""conv_mix over many tokens as two Pallas-Triton kernels, bound by bytes.

The first convolves and adds to the running sum, elementwise: a program owns some tokens and some
columns, so that taps and earlier inputs are read once for several tokens. In the second a program
owns a token and keeps its row in registers: every source is read once, while those before it are
being weighed, and enters a running softmax (per query the greatest score so far, the sum of the
weights and what was mixed by them).
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

TOKENS, COLUMNS = 8, 512  # of a program of the first kernel, at most
AHEAD = 2  # sources that the second one reads beyond the one that it weighs
LEAST = 128  # of what the hidden size is a multiple: four warps of single elements


def add(partial, u, before, weight, interpret):
    """Returns the new running sum, which replaces `partial`; `weight` as [c, D]."""
    batch, tokens, width = u.shape
    operands = [u, before, weight, *([] if partial is None else [partial])]
    columns = min(width & -width, COLUMNS)
    return pl.pallas_call(
        functools.partial(_add, columns),
        grid=(width // columns, pl.cdiv(tokens, TOKENS), batch),
        out_shape=jax.ShapeDtypeStruct(u.shape, jnp.float32),
        input_output_aliases={} if partial is None else {3: 0},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="conv_mix_long_add",
    )(*operands)


def _add(columns, u_ref, before_ref, weight_ref, *refs):
    *partial_ref, out_ref = refs
    tokens, taps, row = u_ref.shape[1], weight_ref.shape[0], pl.program_id(2)
    token = pl.program_id(1) * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)[:, None]
    lane = pl.program_id(0) * columns + jnp.arange(columns, dtype=jnp.int32)[None]
    inside = token < tokens

    def load(ref, at, mask):
        return plt.load(ref.at[row, jnp.where(mask, at, 0), lane], mask=mask, other=0)

    value = load(u_ref, token, inside) * (weight_ref[taps - 1, lane] + 1)
    for back in range(1, taps):
        at = token - back
        earlier = load(u_ref, at, inside & (at >= 0)) + load(before_ref, at + taps - 1, at < 0)
        value += weight_ref[taps - 1 - back, lane] * earlier
    value *= 1 / math.sqrt(taps + 1)
    for ref in partial_ref:
        value += load(ref, token, inside)
    # Past the end where masked: the interpreter stores masked elements too.
    plt.store(out_ref.at[row, jnp.where(inside, token, tokens), lane], value, mask=inside)


def mix(partial, blocks, scales, queries, norms, dtypes, eps, norm_eps, interpret):
    """Returns ([z per query and dtype], 1 / rms of partial)."""
    # In float32, so that what is multiplied lies in the same lanes.
    norms = [norm.astype(jnp.float32) for norm in norms]
    leaves, tree = jax.tree.flatten(((partial, *blocks), tuple(scales), queries, norms))

    def body(*refs):
        given, outs = tree.unflatten(refs[: len(leaves)]), refs[len(leaves) :]
        _mix(given, outs, eps, norm_eps)

    batch, tokens, _ = partial.shape
    *z, scale = pl.pallas_call(
        body,
        grid=(tokens, batch),
        out_shape=(
            *(jax.ShapeDtypeStruct(partial.shape, dtype) for _ in norms for dtype in dtypes),
            jax.ShapeDtypeStruct((batch, tokens), jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=4 if len(norms) == 1 else 8, num_stages=1),
        interpret=interpret,
        name="conv_mix_long_mix",
    )(*leaves)
    return tuple(z), scale


def _mix(given, out_refs, eps, norm_eps):
    (sources, scales, queries, norms), (*z_refs, scale_ref) = given, out_refs
    at, width = (pl.program_id(1), pl.program_id(0)), queries.shape[1]
    parts, root = _parts(width), math.sqrt(width)

    def load(ref, *at):
        return [ref[(*at, part)] for part in parts]

    loading = [load(source, *at) for source in sources[: 1 + AHEAD]]
    value = loading.pop(0)
    queries = [load(queries, n) for n in range(len(norms))]
    scale = _inverse_rms(value, eps)
    scale_ref[at] = scale
    tops = [_dot(value, query) * (scale / root) for query in queries]
    totals = [jnp.float32(1) for _ in queries]
    mixed = [[x * scale for x in value] for _ in queries]
    for i, ref in enumerate(scales):
        loading += [load(source, *at) for source in sources[i + 1 + AHEAD :][:1]]
        source, scale = loading.pop(0), ref[at]
        for n, query in enumerate(queries):
            score = _dot(source, query) * (scale / root)
            top = jnp.maximum(tops[n], score)
            kept, share = jnp.exp(tops[n] - top), jnp.exp(score - top)
            tops[n], totals[n] = top, totals[n] * kept + share
            pairs = zip(mixed[n], source, strict=True)
            mixed[n] = [x * kept + y * (share * scale) for x, y in pairs]

    copies = itertools.batched(z_refs, len(z_refs) // len(norms))  # of one z, by dtype
    for refs, x, total, norm in zip(copies, mixed, totals, norms, strict=True):
        x = [y * (1 / total) for y in x]
        unit = _inverse_rms(x, norm_eps)
        for y, w, part in zip(x, load(norm), parts, strict=True):
            for z_ref in refs:
                z_ref[(*at, part)] = (y * unit * w).astype(z_ref.dtype)


def _parts(width):
    """Cuts a row into powers of two, the only sizes that Triton has: 4608 into 4096 and 512."""
    sizes = [1 << bit for bit in range(width.bit_length() - 1, -1, -1) if width >> bit & 1]
    return [pl.ds(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _dot(x, y):
    """The inner product of two rows in parts."""
    return functools.reduce(jnp.add, [jnp.sum(a * b) for a, b in zip(x, y, strict=True)])


def _inverse_rms(x, eps):
    return lax.rsqrt(_dot(x, x) * (1 / sum(part.size for part in x)) + eps)
