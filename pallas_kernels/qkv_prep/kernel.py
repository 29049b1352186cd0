"""What lies between the input projections and attention, as one Pallas-Triton kernel.

A program owns one head of one row for a block of new tokens: a query head with its relative
vector, or the key or the value of a KV head. Few tokens are one block and are written to the rings
in place, which have room for them beside what the convolution still needs. Many tokens are many
blocks, which only read what was before; their caller writes the rings.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.launch import launch_next

MANY = 32  # tokens of a block, where there is more than one


def qkv_prep(inputs, scales, taps, rings, start, lengths, interpret, **options):
    """Returns (q, r, *rings); `taps` of k and of v are each (static,) or (static, dynamic)."""
    operands = [*inputs, *scales, start, lengths, *taps[0], *taps[1], *rings]
    outs = [*(jax.ShapeDtypeStruct(x.shape, rings[0].dtype) for x in inputs[:2]), *rings]
    first = len(operands) - len(rings)
    aliases = {first + i: 2 + i for i in range(len(rings))}
    block = pl.next_power_of_2(inputs[0].shape[1])
    return _call("qkv_prep", operands, outs, len(taps[0]), block, aliases, interpret, options)


def qkv_prep_long(inputs, scales, taps, before, start, lengths, dtype, interpret, **options):
    """Returns (q, r, k, v) of many tokens; `before` has the inputs of k and of v before them."""
    operands = [*inputs, *scales, start, lengths, *taps[0], *taps[1], *before]
    outs = [jax.ShapeDtypeStruct(x.shape, dtype) for x in inputs]
    return _call("qkv_prep_long", operands, outs, len(taps[0]), MANY, {}, interpret, options)


def _call(name, operands, outs, kinds, block, aliases, interpret, options):
    def body(*refs):
        _body(refs[: len(operands)], refs[len(operands) :], kinds, block, interpret, **options)

    (batch, tokens, heads, _), kv_heads = operands[0].shape, operands[2].shape[2]
    return pl.pallas_call(
        body,
        grid=(heads + 2 * kv_heads, pl.cdiv(tokens, block), batch),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs],
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(num_warps=max(4, block // 4), num_stages=1),
        interpret=interpret,
        name=name,
    )(*operands)


def _body(ins, outs, kinds, block, interpret, qk_threshold, rel_threshold, eps, log_scaling):
    q_ref, r_ref, k_ref, v_ref, q_scale_ref, r_scale_ref, start_ref, length_ref, *rest = ins
    k_taps, v_taps, (k_past, v_past) = rest[:kinds], rest[kinds : 2 * kinds], rest[-2:]
    q_out, r_out, k_out, v_out, *states = outs
    _, tokens, heads, _ = q_ref.shape
    kv_heads = k_ref.shape[2]
    line, row = launch_next(pl.program_id(0), interpret), pl.program_id(2)
    start = start_ref[row]
    token = pl.program_id(1) * block + jnp.arange(block, dtype=jnp.int32)[:, None]
    valid = token < length_ref[row]

    @pl.when(line < heads)
    def _():
        tau = jnp.ones(token.shape, jnp.float32)
        if log_scaling:
            floor, alpha = log_scaling
            position = (start + token + 1).astype(jnp.float32)
            tau += alpha * jnp.log(jnp.maximum(position / floor, 1.0))
        of_q = (q_ref, q_scale_ref, q_out, qk_threshold)
        of_r = (r_ref, r_scale_ref, r_out, rel_threshold)
        for ref, scale_ref, out_ref, threshold in (of_q, of_r):
            lane = jnp.arange(ref.shape[3], dtype=jnp.int32)[None]
            at = (row, jnp.minimum(token, tokens - 1), line, lane)
            x = plt.load(ref.at[at], mask=valid, other=0)
            x = _clip(x * scale_ref[line, lane].astype(jnp.float32), threshold) * tau
            # Past the end where masked: the interpreter stores masked elements too, unchanged.
            kept = token < tokens
            at = (row, jnp.where(kept, token, tokens), line, lane)
            plt.store(out_ref.at[at], x.astype(out_ref.dtype), mask=kept)

    def write(ref, kv, x):
        if states:
            kept, place = valid, lax.rem(start + token, ref.shape[1])
        else:  # zeros where not valid
            kept, place = token < tokens, token
        lane = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        at = (row, jnp.where(kept, place, ref.shape[1]), kv, lane)
        plt.store(ref.at[at], x.astype(ref.dtype), mask=kept)

    def convolve(u_ref, taps, past_ref, kv):
        # `before` is a ring in which token 0 would come after the last slot.
        first = start if states else past_ref.shape[1]
        return _convolve(u_ref, taps, past_ref, row, kv, first, token, valid)

    @pl.when((line >= heads) & (line < heads + kv_heads))
    def _():
        kv = line - heads
        key, newest = convolve(k_ref, k_taps, k_past, kv)
        write(k_out, kv, _clip(key, qk_threshold))
        for state in states[:1]:
            write(state, kv, newest)

    @pl.when(line >= heads + kv_heads)
    def _():
        kv = line - heads - kv_heads
        value, newest = convolve(v_ref, v_taps, v_past, kv)
        square = (value * value).sum(axis=1)[:, None] / value.shape[1]
        write(v_out, kv, value * lax.rsqrt(square + eps))
        for state in states[1:]:
            write(state, kv, newest)


def _clip(x, threshold):
    norm = jnp.sqrt((x * x).sum(axis=1))[:, None]
    return x * jnp.minimum(threshold / (norm + 1e-6), 1.0)


def _convolve(u_ref, taps, past_ref, row, kv, first, token, valid):
    """Returns the convolved tokens of a head and the tokens themselves, both [tokens, d]."""
    static_ref, *dynamic_ref = taps
    tokens, slots = u_ref.shape[1], past_ref.shape[1]
    width = static_ref.shape[0] if dynamic_ref else static_ref.shape[2]
    lane = jnp.arange(u_ref.shape[3], dtype=jnp.int32)[None]

    def read(lag):
        """What entered `lag` tokens earlier: in this call, in one before, or nothing."""
        past = token - lag
        at = u_ref.at[row, jnp.clip(past, 0, tokens - 1), kv, lane]
        x = plt.load(at, mask=valid & (past >= 0), other=0)
        if lag:
            position = first + past
            old = valid & (past < 0) & (position >= 0)
            at = past_ref.at[row, lax.rem(jnp.maximum(position, 0), slots), kv, lane]
            x += plt.load(at, mask=old, other=0)
        return x

    newest = y = read(0)
    for lag in range(width):
        if dynamic_ref:
            at = dynamic_ref[0].at[row, jnp.minimum(token, tokens - 1), kv, lag]
            tap = static_ref[lag, kv, lane] + plt.load(at, mask=valid, other=0)
        else:
            tap = static_ref[kv, lane, width - 1 - lag]
        y += tap * (read(lag) if lag else newest)
    return y * (1 / math.sqrt((1 + len(dynamic_ref)) * width + 1)), newest
