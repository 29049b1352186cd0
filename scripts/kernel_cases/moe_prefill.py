"""Expert rows of prefill: formats, tokens, even and uneven loads, a TP4 rank's width."""

import functools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from inkling_jax import moe
from pallas_kernels import moe_experts
from pallas_kernels.moe_experts.shapes import EXPERTS, HIDDEN, PICKS, WIDTH, WIDTH_TP4
from scripts.kernel_cases.case import Case, all_of
from scripts.kernel_cases.moe_experts import CAPS, expert_by_expert, expert_bytes, random_packed

CALLS = 4  # each with its own choice of experts
COMPARED = 32  # tokens
PLAIN_CALLS = 3  # of the plain path, which takes too long for a loop


def cases() -> Iterator[Case]:
    """Yields the rows; the last is the plain path, on the same packed experts."""
    for format in ("nvfp4", "mxfp8"):
        for inner in (WIDTH, WIDTH_TP4):
            yield _case(format, 8192, inner)
    yield _case("nvfp4", 8192, uneven=True)
    for tokens in (256, 2048):
        yield _case("nvfp4", tokens)
    yield _case("nvfp4", 8192, plain=True)


def _case(format, tokens, inner=WIDTH, uneven=False, plain=False):
    @jax.jit
    def run(x, weights, picked, w13, w2):
        if plain:
            caps = dict(zip(("gate_cap", "up_cap"), CAPS.values(), strict=True))
            swish = functools.partial(moe.swiglu, **caps)
            return moe._by_expert(x, picked, weights, w13, w2, swish)
        return moe_experts.moe_experts(x, picked, weights, w13, w2, **CAPS)

    def step(call, x, weights, picked, w13, w2):
        y = run(x, weights, picked[call], w13, w2)
        return x.at[0, 0].set(all_of(y).astype(x.dtype))

    def result(x, weights, picked, w13, w2):
        return run(x, weights, picked[0], w13, w2)[:COMPARED]

    def timed(x, weights, picked, w13, w2):
        times = []
        for _ in range(1 + PLAIN_CALLS):  # the first one compiles
            begin = time.perf_counter()
            y = jax.block_until_ready(run(x, weights, picked[0], w13, w2))
            times.append(time.perf_counter() - begin)
        return y[:COMPARED], times[1:]

    def expected(x, weights, picked, w13, w2):
        return expert_by_expert(x[:COMPARED], weights, picked[0], w13, w2)

    return Case(
        "moe_prefill", f"{format} plain" if plain else format,
        f"{tokens} tok, I {inner}" + (", uneven" if uneven else ""),
        step, _setup(format, tokens, inner, uneven), EXPERTS * expert_bytes(format, inner), CALLS,
        result=result, expected=expected, tolerance=5e-3, compared=plain,
        outside=timed if plain else None, flops=6 * HIDDEN * inner * tokens * PICKS,
    )  # fmt: skip


@functools.cache
def _setup(*shape):
    return functools.partial(_inputs, *shape)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _inputs(format, tokens, inner, uneven, key):
    keys = jax.random.split(key, 6)
    w13 = random_packed(keys[0], format, 2 * inner, HIDDEN, EXPERTS, interleaved=True)
    w2 = random_packed(keys[1], format, HIDDEN, inner, EXPERTS, interleaved=False)
    x = jax.random.normal(keys[2], (tokens, HIDDEN)).astype(jnp.bfloat16)
    weights = jax.random.uniform(keys[3], (tokens, PICKS))
    scores = jax.random.gumbel(keys[4], (CALLS, tokens, EXPERTS))
    if uneven:  # a tenth of the experts get about twice the mean, a tenth a third of it
        scores += 0.7 * jax.random.normal(keys[5], (EXPERTS,))
    picked = jax.lax.top_k(scores, PICKS)[1].astype(jnp.int32)
    return x, (weights, picked, w13, w2)
