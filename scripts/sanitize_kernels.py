"""Runs every kernel once, for compute-sanitizer to watch: odd sizes, inputs made on the CPU.

No reference runs beside them: GPU tests, which have one, did not end in minutes under the checker.
What is planted where asked for must be found: a checker that does not find it tells nothing.

    make sanitize-gpu
"""

import argparse
import contextlib
import functools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import test_kernel_conv_mix as mixing
import test_kernel_draft_attention as drafting
import test_kernel_moe_experts as moe
import test_kernel_projections as thin
import test_kernel_qkv_prep as preparing
import test_kernel_rel_attention_decode as attention
import test_kernel_rel_attention_prefill as prefilling
import test_kernel_router as routing
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import conv_mix, moe_experts, projections, qkv_prep, router, sampling
from pallas_kernels.draft_attention import draft_attention
from pallas_kernels.draft_attention import shapes as drafting_sizes
from pallas_kernels.rel_attention_decode import rel_attention_decode
from pallas_kernels.rel_attention_decode import shapes as attention_sizes
from pallas_kernels.rel_attention_prefill import rel_attention_prefill
from pallas_kernels.rel_attention_prefill import shapes as prefill_sizes
from scripts.time_limit import write_json

BF16 = jnp.bfloat16
BEHIND = 1 << 20  # elements, beyond what an allocation is rounded up to
START, LENGTHS = jnp.array([3, 700], jnp.int32), jnp.array([5, 3], jnp.int32)


def planted(x: jax.Array) -> jax.Array:
    """Writes behind its result."""

    def body(x_ref, o_ref):
        at = jnp.arange(128, dtype=jnp.int32)
        plt.store(o_ref.at[at + BEHIND], x_ref[at])

    return pl.pallas_call(
        body, out_shape=x, compiler_params=plt.CompilerParams(num_warps=4), name="planted"
    )(x)


def sized(module: ModuleType, sizes: ModuleType, *names: str) -> contextlib.AbstractContextManager:
    """Lets a test module make inputs of the model's sizes."""
    return mock.patch.multiple(module, **{name: getattr(sizes, name) for name in names})


def kernels() -> Iterator[tuple[str, Callable, Any]]:
    """Yields a name, a function of one argument, and the argument."""
    seed = np.random.SeedSequence().entropy % 2**31
    key = jax.random.key(seed)
    products = thin.make_products(key, 5, [(72, 256), (130, 256), (3, 256)], BF16)
    yield "projections", projections.project, products
    route = functools.partial(router.route, k=8, scale=2.0)
    yield "router", lambda given: route(*given), routing.make_inputs(seed, 5, 384, 512)

    formats = (1, "nvfp4"), (5, "nvfp4"), (5, "mxfp8"), (5, "bfloat16"), (70, "nvfp4")
    for tokens, format in formats:
        w13, w2 = (moe.random_experts(key, format, (9, *s))[1] for s in ((320, 512), (512, 160)))
        picked = jax.random.permutation(key, jnp.arange(9))[None, :8].repeat(tokens, 0)
        weights = jnp.ones((tokens, 8))
        x = jax.random.normal(key, (tokens, 512)).astype(BF16)
        given = (x, picked.astype(jnp.int32), weights, w13(True), w2(False))
        run = functools.partial(moe_experts.moe_experts, **moe.CAPS)
        yield f"moe_experts, {tokens} {format}", lambda given, run=run: run(*given), given

    logits = jax.random.normal(key, (3, 5001))
    for p in (0.9, 1.0):
        given = (logits, jnp.array([50, 4000, 1]), jnp.full(3, p))
        yield f"sampling, p {p}", lambda given: sampling.prefix_end(*given), given

    for window, slots in ((None, 900), (attention_sizes.WINDOW, attention_sizes.WINDOW + 8)):
        with sized(attention, attention_sizes, "HEADS", "KV_HEADS", "DIM", "RANKS"):
            given = attention.make_inputs(seed, 2, 5, slots, attention_sizes.EXTENT)
        given = {name: a.astype(BF16) for name, a in given.items()}
        run = functools.partial(rel_attention_decode, start=START, lengths=LENGTHS, window=window)
        yield f"rel_attention_decode, {slots}", lambda given, run=run: run(**given), given

    where = {"start": START, "lengths": LENGTHS}
    for dynamic in (False, True):
        given = preparing.make_inputs(seed, 2, 5, 32, 8, dynamic, BF16)
        run = functools.partial(qkv_prep.qkv_prep, **where, **preparing.OPTIONS)
        yield f"qkv_prep, {dynamic}", lambda given, run=run: run(**given), given
    given = preparing.make_long_inputs(seed, 2, 65, True, BF16)
    run = functools.partial(qkv_prep.qkv_prep_long, **where, **preparing.OPTIONS, dtype=BF16)
    yield "qkv_prep_long", lambda given, run=run: run(**given), given

    run = functools.partial(draft_attention, layer=1, eps=1e-6)
    with sized(drafting, drafting_sizes, "HEADS", "KV_HEADS", "DIM", "LAYERS"):
        given = drafting.make_inputs(seed, [0, 65, 600], 7, 700, BF16)
    yield "draft_attention", lambda given, run=run: run(**given), given

    given = mixing.make_inputs(seed, 2, 5, 3, 8, BF16)
    run = functools.partial(conv_mix.conv_mix, **where, dtypes=(BF16,), **mixing.EPS)
    yield "conv_mix", lambda given, run=run: run(**given), given
    before = given["state"][:, : mixing.TAPS - 1]
    given = {name: a for name, a in given.items() if name != "state"} | {"before": before}
    run = functools.partial(conv_mix.conv_mix_long, dtypes=(BF16,), **mixing.EPS)
    yield "conv_mix_long", lambda given, run=run: run(**given), given

    with sized(prefilling, prefill_sizes, "HEADS", "KV_HEADS", "DIM"):
        given = prefilling.make_inputs(seed, 2, 129, 1000, prefill_sizes.EXTENT)
    run = functools.partial(rel_attention_prefill, **where, window=None)
    yield "rel_attention_prefill", lambda given, run=run: run(**given), given


def main() -> None:
    """Runs the kernels in turn and writes which of them ran."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--planted", action="store_true", help="only what the checker must find")
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--out", type=Path, default=Path("scripts/results/sanitizer.json"))
    options = parser.parse_args()
    begin, ran = time.monotonic(), []
    if options.planted:
        jax.block_until_ready(planted(jnp.zeros(128)))
        return
    with jax.default_device(jax.devices("cpu")[0]):
        cases = list(kernels())
    git = ["git", "rev-parse", "HEAD"]
    commit = options.commit or subprocess.check_output(git, text=True).strip()
    device = jax.devices()[0]
    inputs = [jax.device_put(given, device) for _, _, given in cases]
    lowered = [jax.jit(run).lower(given) for (_, run, _), given in zip(cases, inputs, strict=True)]
    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda program: program.compile(), lowered))
    for (name, *_), program, given in zip(cases, programs, inputs, strict=True):
        jax.block_until_ready(program(given))
        ran.append(name)
        print(f"{time.monotonic() - begin:5.1f} s  {name}", flush=True)
        facts = {"device": device.device_kind, "commit": commit, "of": len(cases), "ran": ran}
        write_json(options.out, facts)


if __name__ == "__main__":
    main()
    os._exit(0)  # without what the interpreter and CUDA take apart
