"""What lies between the input projections and attention, as one Pallas-Triton kernel.

A program owns one head of one row for all new tokens: a query head with its relative vector, or
the key or the value of a KV head. A ring has room for the new inputs beside those that the
convolution still needs, so that both can be read and written in place.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


def qkv_prep(inputs, scales, taps, rings, start, lengths, qk_threshold, rel_threshold, eps,
             log_scaling, interpret):  # fmt: skip
    """Returns (q, r, *rings); `taps` of k and of v are each (static,) or (static, dynamic)."""
    q, r, k, _ = inputs
    batch, _, heads, _ = q.shape
    operands = [*inputs, *scales, start, lengths, *taps[0], *taps[1], *rings]
    outs = [*(jax.ShapeDtypeStruct(x.shape, rings[0].dtype) for x in (q, r)), *rings]
    first = len(operands) - len(rings)
    body = functools.partial(_body, len(taps[0]), qk_threshold, rel_threshold, eps, log_scaling)
    return pl.pallas_call(
        body,
        grid=(heads + 2 * k.shape[2], batch),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs],
        input_output_aliases={first + i: 2 + i for i in range(len(rings))},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="qkv_prep",
    )(*operands)


def _body(kinds, qk_threshold, rel_threshold, eps, log_scaling, q_ref, r_ref, k_ref, v_ref,
          q_scale_ref, r_scale_ref, start_ref, length_ref, *rest):  # fmt: skip
    k_taps, v_taps, rest = rest[:kinds], rest[kinds : 2 * kinds], rest[2 * kinds :]
    _, _, k_state, v_state, q_out, r_out, k_cache, v_cache, new_k_state, new_v_state = rest
    _, tokens, heads, _ = q_ref.shape
    kv_heads = k_ref.shape[2]
    line, row = pl.program_id(0), pl.program_id(1)
    start = start_ref[row]
    token = jnp.arange(pl.next_power_of_2(tokens), dtype=jnp.int32)[:, None]
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

    def write(ring_ref, kv, x):
        slots = ring_ref.shape[1]
        slot = jnp.where(valid, lax.rem(start + token, slots), slots)
        lane = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        plt.store(ring_ref.at[row, slot, kv, lane], x.astype(ring_ref.dtype), mask=valid)

    @pl.when((line >= heads) & (line < heads + kv_heads))
    def _():
        kv = line - heads
        key, newest = _convolve(k_ref, k_taps, k_state, row, kv, start, token, valid)
        write(k_cache, kv, _clip(key, qk_threshold))
        write(new_k_state, kv, newest)

    @pl.when(line >= heads + kv_heads)
    def _():
        kv = line - heads - kv_heads
        value, newest = _convolve(v_ref, v_taps, v_state, row, kv, start, token, valid)
        square = (value * value).sum(axis=1)[:, None] / value.shape[1]
        write(v_cache, kv, value * lax.rsqrt(square + eps))
        write(new_v_state, kv, newest)


def _clip(x, threshold):
    norm = jnp.sqrt((x * x).sum(axis=1))[:, None]
    return x * jnp.minimum(threshold / (norm + 1e-6), 1.0)


def _convolve(u_ref, taps, state_ref, row, kv, start, token, valid):
    """Returns the convolved tokens of a head and the tokens themselves, both [tokens, d]."""
    static_ref, *dynamic_ref = taps
    tokens, slots = u_ref.shape[1], state_ref.shape[1]
    width = static_ref.shape[0] if dynamic_ref else static_ref.shape[2]
    lane = jnp.arange(u_ref.shape[3], dtype=jnp.int32)[None]

    def read(lag):
        """What entered `lag` tokens earlier: in this call, in one before, or nothing."""
        past = token - lag
        at = u_ref.at[row, jnp.clip(past, 0, tokens - 1), kv, lane]
        x = plt.load(at, mask=valid & (past >= 0), other=0)
        if lag:
            position = start + past
            old = valid & (past < 0) & (position >= 0)
            at = state_ref.at[row, lax.rem(jnp.maximum(position, 0), slots), kv, lane]
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
