"""The router as two Pallas-Triton kernels: scores of all experts, then the choice by one program.

The choice needs all scores of a row and the plan all rows, so the boundary is the barrier. What
tokens picked is kept as bits over tokens x experts, whose sums along either axis give everything
that the plan lists; nothing is sorted.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.moe_experts.plan import ROWS, Plan, work_items
from pallas_kernels.router.tiles import SELECTED, TOKENS, TileConfig


def scores(z: jax.Array, gate: jax.Array, tiles: TileConfig, interpret: bool) -> jax.Array:
    """[T, D] and float32 [N, D] -> sigmoid(gate · z), float32 [T, N]."""
    tokens, experts = z.shape[0], gate.shape[0]
    return pl.pallas_call(
        functools.partial(_scores_body, tiles),
        grid=(experts // tiles.experts, pl.cdiv(tokens, TOKENS)),
        out_shape=jax.ShapeDtypeStruct((tokens, experts), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="router_scores",
    )(z, gate)


def _scores_body(tiles, z_ref, gate_ref, score_ref):
    tokens, width = z_ref.shape
    first = pl.program_id(1) * TOKENS
    expert = pl.program_id(0) * tiles.experts + jnp.arange(tiles.experts, dtype=jnp.int32)
    # Rows beyond the last repeat it and store it again.
    rows = [jnp.minimum(first + i, tokens - 1) for i in range(min(tokens, TOKENS))]
    columns = [
        start + jnp.arange(tiles.columns, dtype=jnp.int32)
        for start in range(0, width, tiles.columns)
    ]
    gates = [gate_ref[expert[:, None], column[None]] for column in columns]  # all under way at once
    sums = [jnp.zeros((tiles.experts, tiles.columns), jnp.float32) for _ in rows]
    for column, gate in zip(columns, gates, strict=True):
        for i, row in enumerate(rows):
            # Loaded for each gate row, as the gate is: to spread one row over the threads of all
            # takes an exchange through shared memory.
            z = z_ref[jnp.full_like(expert, row)[:, None], column[None]]
            sums[i] += gate * z.astype(jnp.float32)
    for row, total in zip(rows, sums, strict=True):
        score_ref[row, expert] = jax.nn.sigmoid(total.sum(axis=1))


def select(
    scores: jax.Array, bias: jax.Array, real: jax.Array, k: int, scale: float, interpret: bool
) -> tuple[jax.Array, jax.Array, Plan]:
    """Scores [T, N], bias [N], real [T] -> picks and weights [T, k], and the plan."""
    tokens, experts = scores.shape
    items = jax.ShapeDtypeStruct((work_items(tokens, k, experts),), jnp.int32)
    out_shape = [
        jax.ShapeDtypeStruct((tokens, k), jnp.int32),
        jax.ShapeDtypeStruct((tokens, k), jnp.float32),
        *(items, items, items),
        jax.ShapeDtypeStruct((tokens * k,), jnp.int32),
    ]
    picks, weights, *plan = pl.pallas_call(
        functools.partial(_select_body, k, scale),
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=4 if tokens <= 2 else 16, num_stages=1),
        interpret=interpret,
        name="router_select",
    )(scores, bias, real)
    return picks, weights, Plan(*plan)


def _select_body(k, scale, score_ref, bias_ref, real_ref, pick_ref, weight_ref, *plan_ref):
    tokens, experts = score_ref.shape
    size, bits = min(pl.next_power_of_2(tokens), SELECTED), k.bit_length()
    turns = pl.cdiv(tokens, size)
    rows = jnp.arange(size, dtype=jnp.int32)
    expert = jnp.arange(pl.next_power_of_2(experts), dtype=jnp.int32)[None]
    bias = plt.load(bias_ref.at[expert], mask=expert < experts, other=0)
    place = jnp.arange(k, dtype=jnp.int32)[None]

    def select(turn, carry):
        nth, count = carry
        row = turn * size + rows
        token = row[:, None]
        real = plt.load(real_ref.at[row], mask=row < tokens, other=False)[:, None]
        exists = real & (expert < experts)
        biased = plt.load(score_ref.at[token, expert], mask=exists, other=0) + bias
        # As `top_k` has it, NaN is above all.
        biased = jnp.where(jnp.isnan(biased), jnp.inf, jnp.where(exists, biased, -jnp.inf))

        def pick(i, carry):
            biased, nth, picks = carry
            best = jnp.argmax(biased, axis=1).astype(jnp.int32)[:, None]
            chosen = expert == best
            return (
                jnp.where(chosen, -jnp.inf, biased),
                jnp.where(chosen & exists, nth | lax.shift_left(i + 1, turn * bits), nth),
                jnp.where(place == i, best, picks),
            )

        picks = jnp.zeros((size, k), jnp.int32)
        _, nth, picks = lax.fori_loop(0, k, pick, (biased, nth, picks))
        weights = plt.load(score_ref.at[token, picks], mask=real, other=0)
        weights = weights / (weights.sum(axis=1)[:, None] + 1e-20) * scale
        at, inside = (token, place), jnp.broadcast_to(token < tokens, picks.shape)
        plt.store(pick_ref.at[at], jnp.where(real, picks, experts), mask=inside)
        plt.store(weight_ref.at[at], jnp.where(real, weights, 0), mask=inside)
        return nth, count + (_of_turn(nth, turn, bits) > 0).astype(jnp.int32).sum(axis=0)

    # Scores of all tokens would not fit the registers: rows take turns, and of each stay only bits
    # that say which of a token's picks an expert is, from 1.
    nth = jnp.zeros((size, expert.shape[1]), jnp.int32)
    nth, count = lax.fori_loop(0, turns, select, (nth, jnp.zeros(expert.shape[1], jnp.int32)))
    *item_refs, order_ref = plan_ref
    start = _store_items(count, pl.cdiv(tokens, ROWS), *item_refs)

    def store_order(turn, start):
        pick = _of_turn(nth, turn, bits)
        picked = (pick > 0).astype(jnp.int32)
        before = start[None] + jnp.cumsum(picked, axis=0) - 1
        slot = (turn * size + rows)[:, None] * k + pick - 1
        _store(order_ref, before, slot, pick > 0)
        return start + picked.sum(axis=0)

    lax.fori_loop(0, turns, store_order, start)


def _of_turn(nth, turn, bits):
    return lax.shift_right_logical(nth, turn * bits) & (2**bits - 1)


def _store_items(count, most, expert_ref, start_ref, count_ref):
    """From the number of each expert's tokens; returns where they begin in the order."""
    items = (count + ROWS - 1) // ROWS
    # One running sum for both: neither reaches 2^16.
    until = jnp.cumsum(count + (items << 16))
    start, item = (until & 0xFFFF) - count, (until >> 16) - items
    expert = jnp.arange(count.shape[0], dtype=jnp.int32)
    for i in range(most):
        mine = i < items
        _store(expert_ref, item + i, expert, mine)
        _store(start_ref, item + i, start + i * ROWS, mine)
        _store(count_ref, item + i, jnp.minimum(count - i * ROWS, ROWS), mine)
    rest = jnp.arange(pl.next_power_of_2(count_ref.shape[0]), dtype=jnp.int32)
    idle = (rest >= items.sum()) & (rest < count_ref.shape[0])
    for ref in (expert_ref, start_ref, count_ref):
        _store(ref, rest, jnp.zeros(rest.shape, jnp.int32), idle)
    return start


def _store(ref, index, value, mask):
    # Past the end where not kept: the interpreter stores masked elements too, unchanged.
    plt.store(ref.at[jnp.where(mask, index, ref.shape[0])], value, mask=mask)
