"""conv_mix as one Mosaic GPU kernel: a program per token, its row in registers throughout.

The finished blocks travel to shared memory while the row is convolved and added up, with `peers`
over the devices of a group first: each program reads the summands where they lie (one-shot peer
reads) in the order of the ranks, so that every device gets the same bits. When it has read them it
tells every peer, and it ends when every peer has told it: until then no one may write over what is
being read. `allreduce_conv_mix/protocol.py` is this protocol, with the barrier that XLA puts in
front of a kernel with peers.
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

LANES = 128  # a row [D] is handled as [D / LANES, LANES], as copies take 256 elements an axis
MAX_PART = 12  # of these, at a time


class Operands(NamedTuple):
    """What `conv_mix` reads, `weight` as [c, D]; in the kernel, references to the same."""

    start: Any
    lengths: Any
    scales: tuple[Any, ...]
    u: Any
    weight: Any
    queries: Any
    norms: tuple[Any, ...]
    blocks: tuple[Any, ...]
    partial: Any | None


def run(given: Operands, state, dtype, eps, norm_eps, peers: tuple[str, ...], interpret):
    """Returns (z, partial, scale, state)."""
    batch, tokens, width = given.u.shape

    def fold(x):
        return x.reshape(*x.shape[:-1], width // LANES, LANES)

    rows = jax.tree.map(fold, given._replace(start=None, lengths=None, scales=()))
    operands = rows._replace(start=given.start, lengths=given.lengths, scales=given.scales)
    leaves, tree = jax.tree.flatten(operands)
    ring = jax.new_ref(fold(state))

    def kernel(*refs, **scratch):
        operands, (ring_ref, *out_refs) = refs[: len(leaves)], refs[len(leaves) :]
        options = {"tokens": tokens, "eps": eps, "norm_eps": norm_eps, "peers": peers}
        _body(tree.unflatten(operands), ring_ref, out_refs, **options, **scratch)

    def out(dtype):
        return jax.ShapeDtypeStruct(rows.u.shape, dtype)

    blocks = len(given.blocks)
    scratch = {
        "sources": plgpu.SMEM((blocks, *rows.u.shape[2:]), jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=blocks),
    }
    if peers:
        scratch["done"] = plgpu.SemaphoreType.REGULAR
    *z, partial, scale = plgpu.kernel(
        kernel,
        out_type=(
            *(out(dtype) for _ in given.norms),
            out(jnp.float32),
            jax.ShapeDtypeStruct((batch, tokens), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(batch * tokens,),
        grid_names=("line",),
        kernel_name="allreduce_conv_mix" if peers else "conv_mix",
        interpret=interpret,
    )(*leaves, ring)
    shape = given.u.shape
    z = tuple(x.reshape(shape) for x in z)
    return z, partial.reshape(shape), scale, ring[...].reshape(state.shape)


def _body(given, ring_ref, out_refs, sources, arrived, done=None, *, tokens, eps, norm_eps, peers):
    *z_refs, partial_ref, scale_ref = out_refs
    line = lax.axis_index("line")
    at = lax.div(line, tokens), lax.rem(line, tokens)  # row, token
    for i, block in enumerate(given.blocks):
        plgpu.copy_gmem_to_smem(block.at[at], sources.at[i], arrived)

    group, parts = _group(peers), _parts(ring_ref.shape[2])
    value = [_add(given, ring_ref, group, at, part) for part in parts]
    for peer in group:
        pl.semaphore_signal(done, device_id=peer)
    for x, part in zip(value, parts, strict=True):
        partial_ref[(*at, part)] = x
    scale = _inverse_rms(value, eps)
    scale_ref[at] = scale

    plgpu.barrier_wait(arrived)
    scales = [ref[at] for ref in given.scales] + [scale]
    root = math.sqrt(sum(x.size for x in value))

    def source(i):
        return [sources[i, part] for part in parts] if i < len(given.blocks) else value

    for n, (z_ref, norm) in enumerate(zip(z_refs, given.norms, strict=True)):
        query = [given.queries[n, part] for part in parts]
        scores = [_dot(source(i), query) * (s / root) for i, s in enumerate(scales)]
        top = functools.reduce(jnp.maximum, scores)
        shares = [jnp.exp(score - top) for score in scores]
        total = sum(shares)
        mixed = [jnp.zeros_like(x) for x in value]
        for i, (share, s) in enumerate(zip(shares, scales, strict=True)):
            factor = share / total * s
            mixed = [m + x * factor for m, x in zip(mixed, source(i), strict=True)]
        unit = _inverse_rms(mixed, norm_eps)
        for x, part in zip(mixed, parts, strict=True):
            z_ref[(*at, part)] = (x * unit * norm[part].astype(jnp.float32)).astype(z_ref.dtype)
    if group:
        pl.semaphore_wait(done, len(group))


def _group(peers) -> list[dict[str, Any]]:
    """Where the devices of the group lie on the mesh, in the order of their ranks."""
    if not peers:
        return []
    sizes = [range(lax.axis_size(axis)) for axis in peers]
    return [dict(zip(peers, map(jnp.int32, at), strict=True)) for at in itertools.product(*sizes)]


def _parts(size):
    """A row is handled in parts, so that what is loaded at a time fits the registers."""
    step = next(step for step in range(MAX_PART, 0, -1) if size % step == 0)
    return [pl.ds(first, step) for first in range(0, size, step)]


def _add(given, ring_ref, group, at, part):
    """Convolves a part of the row and adds it to the running sum; keeps its input if valid."""
    (row, token), taps, slots = at, given.weight.shape[0], ring_ref.shape[1]
    start, tokens = given.start[row], given.u.shape[1]
    refs = [plgpu.remote_ref(given.u, peer) for peer in group] or [given.u]

    def new(back):  # the input of the token so many before this one, from this very call
        before = jnp.maximum(token - back, 0)
        return functools.reduce(jnp.add, [ref[row, before, part] for ref in refs])

    now = new(0)
    value = now * (given.weight[taps - 1, part] + 1)
    for back in range(1, taps):
        position = start + token - back
        past = ring_ref[row, lax.rem(jnp.maximum(position, 0), slots), part]
        past = _select(position >= 0, past, jnp.zeros_like(past))
        if back < tokens:
            past = _select(token >= back, new(back), past)
        value += given.weight[taps - 1 - back, part] * past

    @pl.when(token < given.lengths[row])
    def _():
        ring_ref[row, lax.rem(start + token, slots), part] = now

    value *= 1 / math.sqrt(taps + 1)
    return value if given.partial is None else value + given.partial[row, token, part]


def _select(condition, x, y):
    """`jnp.where` for a scalar condition, which Mosaic does not broadcast."""
    return jnp.where(jnp.broadcast_to(condition, x.shape), x, y)


def _dot(x, y):
    """The inner product of two rows in parts."""
    return jnp.sum(sum(a * b for a, b in zip(x, y, strict=True)))


def _inverse_rms(x, eps):
    return lax.rsqrt(_dot(x, x) * (1 / sum(part.size for part in x)) + eps)
