"""The router as two Pallas-Triton kernels: scores of all experts, then the choice by one program.

The choice needs all scores of a row and the plan all rows, so the boundary is the barrier. What
tokens picked is kept as bits over experts x tokens, whose sums along either axis give everything
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

LANES = 32  # of a warp
TAKEN = jnp.iinfo(jnp.int32).min


def scores(z: jax.Array, gate: jax.Array, tiles: TileConfig, interpret: bool) -> jax.Array:
    """[T, D] and float32 [N, D] -> sigmoid(gate · z), float32 [T, N]."""
    tokens, experts = z.shape[0], gate.shape[0]
    return pl.pallas_call(
        functools.partial(_scores_body, tiles, interpret),
        grid=(experts // tiles.experts, pl.cdiv(tokens, TOKENS)),
        out_shape=jax.ShapeDtypeStruct((tokens, experts), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="router_scores",
    )(z, gate)


def _scores_body(tiles, interpret, z_ref, gate_ref, score_ref):
    tokens, width = z_ref.shape
    size = min(pl.next_power_of_2(tokens), TOKENS)
    # Rows beyond the last repeat it and store it again. Gate rows of one group share its threads,
    # and with them what these load of the activations: [token, gate row, group, column].
    row = jnp.minimum(pl.program_id(1) * size + jnp.arange(size, dtype=jnp.int32), tokens - 1)
    expert = pl.program_id(0) * tiles.experts + jnp.arange(tiles.experts, dtype=jnp.int32)
    expert = expert.reshape(1, -1, tiles.groups, 1)
    row = jnp.broadcast_to(row[:, None, None, None], (size, 1, tiles.groups, 1))
    columns = [
        (start + jnp.arange(tiles.columns, dtype=jnp.int32))[None, None, None]
        for start in range(0, width, tiles.columns)
    ]
    gates = [gate_ref[expert, column] for column in columns]
    if not interpret:
        # ptxas would move each load to its use; past a barrier, where none waits, it moves none.
        plt.debug_barrier()
    sums = jnp.zeros(
        (size, tiles.experts // tiles.groups, tiles.groups, tiles.columns), jnp.float32
    )
    for column, gate in zip(columns, gates, strict=True):
        sums += gate * z_ref[row, column].astype(jnp.float32)
    score_ref[row[..., 0], expert[..., 0]] = jax.nn.sigmoid(sums.sum(axis=3))


def select(
    scores: jax.Array, bias: jax.Array, real: jax.Array, k: int, scale: float, interpret: bool
) -> tuple[jax.Array, jax.Array, Plan]:
    """Scores [T, N], bias [N], real [T] -> picks and weights [T, k], and the plan."""
    tokens, experts = scores.shape
    slots = jax.ShapeDtypeStruct((tokens * k,), jnp.int32)
    items = jax.ShapeDtypeStruct((work_items(tokens, k, experts),), jnp.int32)
    weights = jax.ShapeDtypeStruct(slots.shape, jnp.float32)
    size = min(pl.next_power_of_2(tokens), SELECTED)
    picks, weights, *plan = pl.pallas_call(
        functools.partial(_select_body, k, scale, size),
        out_shape=[slots, weights, items, items, items, slots],
        compiler_params=plt.CompilerParams(num_warps=size, num_stages=1),
        interpret=interpret,
        name="router_select",
    )(scores, bias, real)
    return picks.reshape(tokens, k), weights.reshape(tokens, k), Plan(*plan)


def _select_body(k, scale, size, score_ref, bias_ref, real_ref, pick_ref, weight_ref, *plan_ref):
    tokens, experts = score_ref.shape
    bits, turns = k.bit_length(), pl.cdiv(tokens, size)
    # As [experts / 32, token, 32] a warp has a token, and what it looks for needs no barrier. Or
    # instead of + hides from Triton that neighbours could be loaded together, in another layout.
    block = jnp.arange(pl.next_power_of_2(pl.cdiv(experts, LANES)), dtype=jnp.int32)
    expert = (block[:, None, None] * LANES) | jnp.arange(LANES, dtype=jnp.int32)
    bias = plt.load(bias_ref.at[expert], mask=expert < experts, other=0)
    rows = jnp.arange(size, dtype=jnp.int32)[None, :, None]
    place = jnp.arange(k, dtype=jnp.int32)[None, None]

    def select(turn, carry):
        nth, count = carry
        token = turn * size + rows
        real = plt.load(real_ref.at[token], mask=token < tokens, other=False)
        exists = real & (expert < experts)
        score = plt.load(score_ref.at[token, expert], mask=exists, other=0)
        order = jnp.where(exists, _ordered(score + bias), TAKEN)

        def pick(i, order):
            best = order.max(axis=0).max(axis=1)[None, :, None]
            best = jnp.where(order == best, expert, experts).min(axis=0).min(axis=1)
            return jnp.where(expert == best[None, :, None], TAKEN + i, order)

        order = lax.fori_loop(0, k, pick, order)
        picked = exists & (order < TAKEN + k)
        slot = token * k + (order - TAKEN)
        total = jnp.where(picked, score, 0).sum(axis=0).sum(axis=1)[None, :, None]
        _store(pick_ref, slot, jnp.broadcast_to(expert, slot.shape), picked)
        _store(weight_ref, slot, score * (scale / (total + 1e-20)), picked)
        slot = token * k + place
        idle = jnp.broadcast_to(~real & (token < tokens), slot.shape)
        _store(pick_ref, slot, jnp.full(slot.shape, experts, jnp.int32), idle)
        _store(weight_ref, slot, jnp.zeros(slot.shape, jnp.float32), idle)
        nth |= jnp.where(picked, order - TAKEN + 1, 0) << (turn * bits)
        return nth, count + lax.population_count(_tokens(picked, rows))

    # Scores of all tokens would not fit the registers: rows take turns, and of each stay only bits
    # that say which of a token's picks an expert is, from 1.
    nth = jnp.zeros((len(block), size, LANES), jnp.int32)
    count = jnp.zeros((len(block), LANES), jnp.int32)
    nth, count = lax.fori_loop(0, turns, select, (nth, count))
    *item_refs, order_ref = plan_ref
    start = _store_items(count.reshape(-1), pl.cdiv(tokens, ROWS), *item_refs)

    def store_order(turn, start):
        pick = lax.shift_right_logical(nth, turn * bits) & (2**bits - 1)
        by = _tokens(pick > 0, rows)
        before = lax.population_count(by[:, None] & ((1 << rows) - 1))
        slot = (turn * size + rows) * k + pick - 1
        _store(order_ref, start[:, None] + before, slot, pick > 0)
        return start + lax.population_count(by)

    lax.fori_loop(0, turns, store_order, start.reshape(count.shape))


def _ordered(x):
    """Integers in the order of the numbers, above TAKEN + k; NaN is above all, as for `top_k`."""
    bits = lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.inf, x), jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _tokens(picked, rows):
    """[experts / 32, token, 32] -> one bit of each token, [experts / 32, 32]."""
    return (picked.astype(jnp.int32) << rows).sum(axis=1)


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
