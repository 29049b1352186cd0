"""Compiles the decode step of all 48 full-width layers from abstract shapes: no weights, no device.

Prints, and writes with --out, the time to lower and compile and the temporaries that the compiler
plans. `--target cuda` compiles for an H200 and needs the `cuda` extra, but no GPU.

usage: python scripts/compile_full_size.py [--target cpu|cuda] [--tokens N] [--out FILE]
"""

import argparse
import json
import os
import time
from pathlib import Path


def main() -> None:
    """Compiles and reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=1, help="tokens a call")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    report = compile_decode(args.target, args.tokens, args.context)
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def compile_decode(target: str, tokens: int, context: int) -> dict:
    """Returns the seconds it took, and the bytes of arguments and temporaries."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from inkling_jax import quant
    from inkling_jax.cache import init_cache
    from inkling_jax.config import inkling2_small
    from inkling_jax.generation import decode
    from inkling_jax.model import abstract_params

    config = inkling2_small()

    def shipped(path, variable):
        """Inkling 2 Small ships NVFP4 experts in the first 40 layers, MXFP8 in the last 8."""
        if path[-1] not in ("w13", "w2"):
            return variable
        fmt = "nvfp4" if path[1] < 40 else "mxfp8"
        return variable.replace(quant.abstract(variable.get_value().shape, fmt))

    flat = nnx.to_flat_state(abstract_params(config, jnp.bfloat16))
    params = nnx.from_flat_state([(path, shipped(path, v)) for path, v in flat])
    cache = jax.eval_shape(lambda: init_cache(config.text, 1, context, 8, jnp.bfloat16))
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def step(params, ids, cache):
        return decode(params, config, ids, cache)

    began = time.perf_counter()
    if target == "cuda":
        import sm90

        compiled = sm90.compile_h200(step, params, ids, cache, donate_argnums=(2,))
    else:
        compiled = jax.jit(step, donate_argnums=2).lower(params, ids, cache).compile()
    memory = compiled.memory_analysis()
    return {
        "target": "NVIDIA H200 (compiled without a device)" if target == "cuda" else "cpu",
        "jax": jax.__version__,
        "tokens": tokens,
        "context": context,
        "lower_and_compile_seconds": round(time.perf_counter() - began, 1),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


if __name__ == "__main__":
    main()
