"""What the reference rounds to bfloat16 stays rounded inside a compiled function (JX-04)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from helpers import TINY

from inkling_jax.cache import init_cache
from inkling_jax.layers import rounded
from inkling_jax.model import abstract_params, forward


def test_rounding():
    x = jnp.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-12, -3.0e38, 0.0])
    low = jax.jit(lambda x: rounded(x, jnp.bfloat16))(x)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_array_equal(low, x.astype(jnp.bfloat16))
    np.testing.assert_array_equal(rounded(x, jnp.float32), x)
    assert jax.grad(lambda x: rounded(x, jnp.bfloat16).astype(jnp.float32))(2.0) == 1.0


def test_forward_converts_nothing_there_and_back():
    """Keys and values are rounded for good; all else in bfloat16 is read by products alone."""
    tokens = jax.ShapeDtypeStruct((2, 40), jnp.int32)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    cache = jax.eval_shape(lambda: init_cache(TINY.text, 2, 64, 1, jnp.dtype(jnp.bfloat16)))
    params = abstract_params(TINY, jnp.bfloat16)
    program = jax.jit(forward, static_argnums=1).lower(params, TINY, tokens, lengths, cache)
    assert round_trips(program.as_text()) == []
    assert program.as_text().count("stablehlo.reduce_precision") == 2 * len(cache.layers)

    def bare(x):
        return x.astype(jnp.bfloat16).reshape(3, 2).astype(jnp.float32)

    assert len(round_trips(jax.jit(bare).lower(jnp.ones(6)).as_text())) == 1


def round_trips(program: str) -> list[str]:
    """Lines that convert to float32 what was converted to bfloat16 and only moved since."""
    low, exact, found = set(), set(), []
    for line in program.splitlines():
        result = re.search(r"(%\w+)(?::\d+)? = ", line)
        if "func.func" in line:
            low, exact = set(), set()
        if result is None:
            continue
        operands = set(re.findall(r"%\w+", line[result.end() :]))
        if "stablehlo.reduce_precision" in line:
            exact.add(result[1])
        elif "stablehlo.convert" in line and "f32>) -> " in line and "bf16>" in line:
            if not operands <= exact:
                low.add(result[1])
        elif operands & low:
            if "stablehlo.convert" in line:
                found.append(line)
            elif "stablehlo.dot_general" not in line:
                low.add(result[1])
    return found
