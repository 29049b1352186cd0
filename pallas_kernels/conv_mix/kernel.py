"""conv_mix as one Mosaic GPU kernel: a cluster of programs per token, its row in registers.

A program owns a slice of the row from the convolution to the last norm, and reads its slice of
everything at once. Twice it needs inner products over the whole row, for which the cluster
exchanges sums: of sources and queries, with the running sum's rms, and for the rms of the mixes.

With `peers` each program first adds up the summands where they lie on the devices of a group
(one-shot peer reads), in the order of the ranks, so that every device gets the same bits. When it
has read them it tells every peer, and it ends when every peer has told it: until then no one may
write over what is being read. `allreduce_conv_mix/protocol.py` is this protocol, with the barrier
that XLA puts in front of a kernel with peers.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.conv_mix import cluster

THREADS = 128  # of a program
PROGRAMS = 8  # of a cluster, at most


class Operands(NamedTuple):
    """What `conv_mix` reads, u as [B, T, n, D], weight as [c, D]; in the kernel, references."""

    start: Any
    lengths: Any
    scales: tuple[Any, ...]
    u: Any
    weight: Any
    queries: Any
    norms: tuple[Any, ...]
    blocks: tuple[Any, ...]
    partial: Any | None


def elements(width: int) -> int:
    """Returns how many elements of a row a thread has, where as many programs share it as can."""
    vectors = width // THREADS
    return vectors // max(n for n in range(1, PROGRAMS + 1) if vectors % n == 0)


def run(given: Operands, state, dtypes, eps, norm_eps, peers: tuple[str, ...], interpret):
    """Returns (z, partial, scale, state)."""
    batch, tokens, _, width = given.u.shape
    sources, queries = len(given.blocks) + 1, len(given.norms)
    programs = width // (THREADS * elements(width))
    if interpret:  # which knows no clusters
        programs = 1
    leaves, tree = jax.tree.flatten(given)
    ring = jax.new_ref(state)

    def kernel(*refs, **scratch):
        operands, (ring_ref, *out_refs) = refs[: len(leaves)], refs[len(leaves) :]
        options = {"eps": eps, "norm_eps": norm_eps, "peers": peers}
        _body(tree.unflatten(operands), ring_ref, out_refs, **options, **scratch)

    def out(dtype):
        return jax.ShapeDtypeStruct((batch, tokens, width), dtype)

    scratch: dict[str, Any] = {"done": plgpu.SemaphoreType.REGULAR} if peers else {}
    if programs > 1:
        terms = 1 + sources * queries, queries
        scratch["exchanges"] = tuple(cluster.exchange(n, programs) for n in terms)
    *z, partial, scale = plgpu.kernel(
        kernel,
        out_type=(
            *(out(dtype) for _ in given.norms for dtype in dtypes),
            out(jnp.float32),
            jax.ShapeDtypeStruct((batch, tokens), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(batch * tokens,),
        grid_names=("line",),
        cluster=(programs,),
        cluster_names=("slice",),
        kernel_name="allreduce_conv_mix" if peers else "conv_mix",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,  # a tenth of the time to lower
            unsafe_no_auto_barriers=not peers,  # a thread reads and writes its own elements only
        ),
        interpret=interpret,
    )(*leaves, ring)
    return tuple(z), partial, scale, ring[...]


def _body(given, ring_ref, out_refs, exchanges=None, done=None, *, eps, norm_eps, peers):
    *z_refs, partial_ref, scale_ref = out_refs
    _, tokens, _, width = given.u.shape
    line, size = lax.axis_index("line"), width // lax.axis_size("slice")
    row, token = lax.div(line, tokens), lax.rem(line, tokens)
    columns = pl.ds(lax.axis_index("slice") * size, size)
    at = row, token, columns
    vector = max(n for n in (1, 2, 4) if size % (n * THREADS) == 0)
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)
    load = functools.partial(plgpu.load, layout=layout)

    start, length = given.start[row], given.lengths[row]
    scales = [ref[row, token] for ref in given.scales]
    sources = [load(block.at[at]) for block in given.blocks]
    queries = [load(given.queries.at[n, columns]) for n in range(len(given.norms))]
    norms = [load(norm.at[columns]).astype(jnp.float32) for norm in given.norms]
    before = [load(given.partial.at[at])] if given.partial is not None else []
    if exchanges:  # on a GPU
        plgpu.griddepcontrol_launch_dependents()  # see pallas_kernels/launch.py
        cluster.prepare(exchanges)

    group = _group(peers)
    now, convolved = _convolve(given, ring_ref, group, at, start, length, load)
    for peer in group:
        pl.semaphore_signal(done, device_id=peer)
    value = sum(before, convolved)
    sources.append(value)
    pairs = [(value, value), *((source, query) for query in queries for source in sources)]
    if exchanges:
        cluster.meet()
    scored, normed = exchanges or (None, None)
    square, *products = _dots(pairs, scored, layout)

    # Not stored before: that would wait for the values and for `length`.
    partial_ref[at] = value

    @pl.when(token < length)
    def _():
        ring_ref[row, lax.rem(start + token, ring_ref.shape[1]), columns] = now

    scale = lax.rsqrt(square * (1 / width) + eps)
    scale_ref[row, token] = scale  # the same bits from every program
    scales.append(scale)
    mixes = []
    for scores in itertools.batched(products, len(sources)):
        scores = [x * (s / math.sqrt(width)) for x, s in zip(scores, scales, strict=True)]
        top = functools.reduce(jnp.maximum, scores)
        shares = [jnp.exp(score - top) for score in scores]
        total = sum(shares)
        weights = [share / total * s for share, s in zip(shares, scales, strict=True)]
        mixes.append(sum(x * w for x, w in zip(sources, weights, strict=True)))
    squares = _dots([(mixed, mixed) for mixed in mixes], normed, layout)
    copies = itertools.batched(z_refs, len(z_refs) // len(norms))  # of one z, by dtype
    for refs, mixed, square, norm in zip(copies, mixes, squares, norms, strict=True):
        z = mixed * lax.rsqrt(square * (1 / width) + norm_eps) * norm
        for z_ref in refs:
            z_ref[at] = z.astype(z_ref.dtype)
    if group:
        pl.semaphore_wait(done, len(group))


def _group(peers) -> list[dict[str, Any]]:
    """Where the devices of the group lie on the mesh, in the order of their ranks."""
    if not peers:
        return []
    sizes = [range(lax.axis_size(axis)) for axis in peers]
    return [dict(zip(peers, map(jnp.int32, at), strict=True)) for at in itertools.product(*sizes)]


def _convolve(given, ring_ref, group, at, start, length, load):
    """Returns a slice of the convolution's input and of its output, zeros if it is not valid."""
    (row, token, columns), taps, slots = at, given.weight.shape[0], ring_ref.shape[1]
    _, tokens, summands, _ = given.u.shape
    refs = [plgpu.remote_ref(given.u, peer) for peer in group] or [given.u]

    def new(back):  # the input of the token so many before this one, from this very call
        before = jnp.maximum(token - back, 0)
        parts = (ref.at[row, before, i, columns] for ref in refs for i in range(summands))
        return functools.reduce(jnp.add, map(load, parts))

    now = new(0)
    value = now * (load(given.weight.at[taps - 1, columns]) + 1)
    for back in range(1, taps):
        position = start + token - back
        past = load(ring_ref.at[row, lax.rem(jnp.maximum(position, 0), slots), columns])
        past = _select(position >= 0, past, jnp.zeros_like(past))
        if back < tokens:
            past = _select(token >= back, new(back), past)
        value += load(given.weight.at[taps - 1 - back, columns]) * past
    value *= 1 / math.sqrt(taps + 1)
    return now, _select(token < length, value, jnp.zeros_like(value))


def _dots(pairs, exchange, layout):
    return cluster.dots(pairs, exchange, layout) if exchange else [jnp.sum(x * y) for x, y in pairs]


def _select(condition, x, y):
    """`jnp.where` for a scalar condition, which Mosaic does not broadcast."""
    return jnp.where(jnp.broadcast_to(condition, x.shape), x, y)
