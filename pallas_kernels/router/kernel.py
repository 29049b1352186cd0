"""The router as two Pallas-Triton kernels: products of all experts, then the choice by one program.

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

from pallas_kernels.launch import launch_next
from pallas_kernels.moe_experts.plan import ROWS, Plan, work_items
from pallas_kernels.router.tiles import SELECTED, TOKENS, TileConfig

LANES = 32  # of a warp
TAKEN = jnp.iinfo(jnp.int32).min


def products(z: jax.Array, gate: jax.Array, tiles: TileConfig, interpret: bool) -> jax.Array:
    """[T, D] and float32 [N, D] -> gate · z over each of S ranges of columns, float32 [S, T, N]."""
    tokens, experts = z.shape[0], gate.shape[0]
    return pl.pallas_call(
        functools.partial(_products_body, tiles, interpret),
        grid=(experts // tiles.experts, tiles.splits, pl.cdiv(tokens, TOKENS)),
        out_shape=jax.ShapeDtypeStruct((tiles.splits, tokens, experts), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="router_products",
    )(z, gate)


def _products_body(tiles, interpret, z_ref, gate_ref, sum_ref):
    tokens, width = z_ref.shape
    size, split = min(pl.next_power_of_2(tokens), TOKENS), pl.program_id(1)
    # Rows beyond the last repeat it and store it again. Gate rows of one group share its threads,
    # and with them what these load of the activations: [token, gate row, group, column].
    row = jnp.minimum(pl.program_id(2) * size + jnp.arange(size, dtype=jnp.int32), tokens - 1)
    first = launch_next(pl.program_id(0), interpret) * tiles.experts
    expert = first + jnp.arange(tiles.experts, dtype=jnp.int32)
    expert = expert.reshape(1, -1, tiles.groups, 1)
    row = jnp.broadcast_to(row[:, None, None, None], (size, 1, tiles.groups, 1))
    width //= tiles.splits
    columns = [
        (split * width + start + jnp.arange(tiles.columns, dtype=jnp.int32))[None, None, None]
        for start in range(0, width, tiles.columns)
    ]
    gates = [gate_ref[expert, column] for column in columns]
    if not interpret:
        # ptxas would move each load to its use; past a barrier, where none waits, it moves none.
        plt.debug_barrier()
    shape = (size, tiles.experts // tiles.groups, tiles.groups, tiles.columns)
    sums = jnp.zeros(shape, jnp.float32)
    for column, gate in zip(columns, gates, strict=True):
        z = z_ref[row, column].astype(jnp.float32)
        sums = _fma(jnp.broadcast_to(gate, shape), jnp.broadcast_to(z, shape), sums, interpret)
    sum_ref[split, row[..., 0], expert[..., 0]] = sums.sum(axis=3)


def _fma(x, y, z, interpret):
    """x · y + z, which Triton would leave as two instructions."""
    if interpret:
        return x * y + z
    (out,) = plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[x, y, z],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(z.shape, z.dtype)],
    )
    return out


def select(
    products: jax.Array, bias: jax.Array, real: jax.Array, k: int, scale: float, interpret: bool
) -> tuple[jax.Array, jax.Array, Plan]:
    """Products [S, T, N], bias [N], real [T] -> picks and weights [T, k], and the plan."""
    _, tokens, experts = products.shape
    slots = jax.ShapeDtypeStruct((tokens * k,), jnp.int32)
    items = jax.ShapeDtypeStruct((work_items(tokens, k, experts),), jnp.int32)
    weights = jax.ShapeDtypeStruct(slots.shape, jnp.float32)
    size = min(pl.next_power_of_2(tokens), SELECTED)
    picks, weights, *plan = pl.pallas_call(
        functools.partial(_select_body, k, scale, size, interpret),
        out_shape=[slots, weights, items, items, items, slots],
        compiler_params=plt.CompilerParams(num_warps=size, num_stages=1),
        interpret=interpret,
        name="router_select",
    )(products, bias, real)
    return picks.reshape(tokens, k), weights.reshape(tokens, k), Plan(*plan)


def _select_body(
    k, scale, size, interpret, product_ref, bias_ref, real_ref, pick_ref, weight_ref, *plan_ref
):
    splits, tokens, experts = product_ref.shape
    bits, turns = k.bit_length(), pl.cdiv(tokens, size)
    # As [experts / 32, token, 32] a warp has a token, and what it looks for needs no barrier. Or
    # instead of + hides from Triton that neighbours could be loaded together, in another layout.
    first = launch_next(jnp.int32(0), interpret)
    block = first + jnp.arange(pl.next_power_of_2(pl.cdiv(experts, LANES)), dtype=jnp.int32)
    expert = (block[:, None, None] * LANES) | jnp.arange(LANES, dtype=jnp.int32)
    expert = jnp.broadcast_to(expert, (len(block), size, LANES))
    bias = plt.load(bias_ref.at[expert], mask=expert < experts, other=0)
    rows = jnp.arange(size, dtype=jnp.int32)[None, :, None]
    place = jnp.arange(k, dtype=jnp.int32)[None, None]

    def select(turn, nth):
        token = turn * size + rows
        real = plt.load(real_ref.at[token], mask=token < tokens, other=False)
        inside = (token < tokens) & (expert < experts)
        # Of tokens that are not real as well: these loads do not wait for that one.
        score, *rest = [
            plt.load(product_ref.at[split, token, expert], mask=inside, other=0)
            for split in range(splits)
        ]
        score = jax.nn.sigmoid(sum(rest, score))
        exists = real & inside
        order = jnp.where(exists, _ordered(score + bias), TAKEN)

        def pick(i, order):
            best = order.max(axis=0).max(axis=1)[None, :, None]
            best = jnp.where(order == best, expert, experts).min(axis=0).min(axis=1)
            return jnp.where(expert == best[None, :, None], TAKEN + i, order)

        order = lax.fori_loop(0, k, pick, order)
        picked = exists & (order < TAKEN + k)
        slot = token * k + (order - TAKEN)
        total = jnp.where(picked, score, 0).sum(axis=0).sum(axis=1)[None, :, None]
        _store(pick_ref, slot, expert, picked)
        _store(weight_ref, slot, score * (scale / (total + 1e-20)), picked)
        slot = token * k + place
        idle = jnp.broadcast_to(~real & (token < tokens), slot.shape)
        _store(pick_ref, slot, jnp.full(slot.shape, experts, jnp.int32), idle)
        _store(weight_ref, slot, jnp.zeros(slot.shape, jnp.float32), idle)
        return nth | (jnp.where(picked, order - TAKEN + 1, 0) << (turn * bits))

    # Scores of all tokens would not fit the registers: rows take turns, and of each stay only bits
    # that say which of a token's picks an expert is, from 1.
    nth = lax.fori_loop(0, turns, select, jnp.zeros(expert.shape, jnp.int32))

    def taken(turn):
        pick = lax.shift_right_logical(nth, turn * bits) & (2**bits - 1)
        # One bit of each token, [experts / 32, 32]: the only sum over warps.
        return pick, ((pick > 0).astype(jnp.int32) << rows).sum(axis=1)

    def add_up(turn, count):
        return count + lax.population_count(taken(turn)[1])

    def store_order(turn, start):
        pick, users = taken(turn)
        before = lax.population_count(users[:, None] & ((1 << rows) - 1))
        slot = (turn * size + rows) * k + pick - 1
        _store(order_ref, start[:, None] + before, slot, pick > 0)
        return start + lax.population_count(users)

    *item_refs, order_ref = plan_ref
    count = lax.fori_loop(0, turns, add_up, jnp.zeros((len(block), LANES), jnp.int32))
    start = _store_items(count, expert, rows, *item_refs)
    lax.fori_loop(0, turns, store_order, start)


def _ordered(x):
    """Integers in the order of the numbers, above TAKEN + k; NaN is above all, as for `top_k`."""
    bits = lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.inf, x), jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _store_items(count, expert, rows, expert_ref, start_ref, count_ref):
    """From the number of each expert's tokens; returns where they begin in the order."""
    items = lax.div(count + (ROWS - 1), ROWS)
    # One running sum for both: neither reaches 2^16.
    both = count + (items << 16)
    before = jnp.cumsum(both.reshape(-1)).reshape(both.shape) - both
    start, item = before & 0xFFFF, before >> 16
    # A warp stores one item of each expert, in the layout of the picks.
    mine, skipped = rows < items[:, None], rows * ROWS
    item = item[:, None] + rows
    _store(expert_ref, item, expert, mine)
    _store(start_ref, item, start[:, None] + skipped, mine)
    _store(count_ref, item, jnp.minimum(count[:, None] - skipped, ROWS), mine)
    rest = jnp.arange(pl.next_power_of_2(count_ref.shape[0]), dtype=jnp.int32)
    idle = (rest >= items.sum(axis=0).sum()) & (rest < count_ref.shape[0])
    for ref, nothing in ((expert_ref, -1), (start_ref, 0), (count_ref, 0)):
        _store(ref, rest, jnp.full(rest.shape, nothing, jnp.int32), idle)
    return start


def _store(ref, index, value, mask):
    # Past the end where not kept: the interpreter stores masked elements too, unchanged.
    plt.store(ref.at[jnp.where(mask, index, ref.shape[0])], value, mask=mask)
