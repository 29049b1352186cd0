"""Runs the inline PTX of moe_experts on arrays, so that its kernel can be interpreted on the CPU.

Registers are uint32 (or float32) arrays with one entry per lane of all warps.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def elementwise_inline_asm(asm, *, args, constraints, pack, result_shape_dtypes):
    """Stands in for `pallas.triton.elementwise_inline_asm`: one float32 result, four a thread."""
    assert pack == 4 and constraints.startswith("=&f,=&f,=&f,=&f,")
    operands = [None] * 4 + [register for arg in args for register in _registers(arg)]
    assert len(operands) == len(constraints.split(","))
    registers = {f"${i}": operand for i, operand in enumerate(operands)}
    for line in asm.strip("{}\n").split(";"):
        opcode, *rest = line.split(None, 1)[:2] or [""]
        if opcode and opcode != ".reg":
            _run(opcode, rest[0], registers)
    [result] = result_shape_dtypes
    out = jnp.stack([registers[f"${i}"] for i in range(4)], axis=-1)
    return [out.reshape(result.shape)]


def _registers(x):
    """The 32-bit registers that hold four consecutive elements of a thread."""
    x = x.reshape(-1, 4)
    if x.dtype in (jnp.int32, jnp.float32):
        kind = jnp.uint32 if x.dtype == jnp.int32 else jnp.float32
        return [lax.bitcast_convert_type(x[:, i], kind) for i in range(4)]
    bits = 8 * x.dtype.itemsize
    x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)
    x = x.reshape(-1, 4 * bits // 32, 32 // bits)
    return [sum(x[:, i, j] << (bits * j) for j in range(32 // bits)) for i in range(x.shape[1])]


def _run(opcode, operands, registers):
    def value(name):
        return registers[name] if name in registers else np.uint32(int(name, 0))

    if opcode.startswith("mma"):
        d, a, b, c = re.findall(r"\{(.*?)\}", operands)
        a, b, c = ([value(name) for name in group.split(", ")] for group in (a, b, c))
        registers.update(zip(d.split(", "), _mma(a, b, c), strict=True))
        return
    target, *names = operands.split(", ")
    x = [value(name) for name in names]
    registers[target] = {
        "shl.b32": lambda: x[0] << x[1],
        "shr.u32": lambda: x[0] >> x[1],
        "and.b32": lambda: x[0] & x[1],
        "mov.b32": lambda: x[0],
        "mad.lo.u32": lambda: x[0] * x[1] + x[2],
        "shf.r.wrap.b32": lambda: x[0] >> x[2] | x[1] << (32 - x[2]),
        "lop3.b32": lambda: _lop3(*x),
        "prmt.b32": lambda: _prmt(*x),
        "mul.rn.bf16x2": lambda: _mul_bf16x2(*x),
    }[opcode]()


def _lop3(a, b, c, table):
    table = int(table)
    out = jnp.zeros_like(a | b | c)
    for i in range(8):
        if table >> i & 1:
            terms = [v if i >> (2 - n) & 1 else ~v for n, v in enumerate((a, b, c))]
            out |= terms[0] & terms[1] & terms[2]
    return out


def _prmt(a, b, selector):
    out = jnp.zeros_like(a)
    for i in range(4):
        pick = int(selector) >> (4 * i) & 7
        out |= ((a if pick < 4 else b) >> (8 * (pick % 4)) & 255) << (8 * i)
    return out


def _mul_bf16x2(a, b):
    """By integers, since XLA flushes subnormal numbers on the CPU."""
    out = jnp.zeros_like(a)
    for half in (0, 16):
        sign, magnitude = jnp.uint32(0), []
        for bits in (a >> half & 0xFFFF, b >> half & 0xFFFF):
            exponent = (bits >> 7 & 255).astype(jnp.int32)
            mantissa = (bits & 127).astype(jnp.int32) + jnp.where(exponent > 0, 128, 0)
            magnitude.append((mantissa, jnp.maximum(exponent, 1) - 134))
            sign ^= bits >> 15
        (m, e), (n, f) = magnitude
        product = jnp.ldexp((m * n).astype(jnp.float32), e + f).astype(jnp.bfloat16)
        bits = lax.bitcast_convert_type(product, jnp.uint16).astype(jnp.uint32)
        out |= (bits | sign << 15) << half
    return out


def _mma(a, b, c):
    """m16n8k16 by the fragment layouts of the PTX manual; lane 4g + t."""

    def pair(register):  # [warps, g, t, 2]
        halves = jnp.stack([register & 0xFFFF, register >> 16], axis=-1).astype(jnp.uint16)
        return lax.bitcast_convert_type(halves, jnp.bfloat16).reshape(-1, 8, 4, 2)

    def join(low, high):  # columns 2t, 2t + 1 of the lower and of the upper eight
        return jnp.concatenate([pair(r).reshape(-1, 8, 8) for r in (low, high)], axis=2)

    left = jnp.concatenate([join(a[0], a[2]), join(a[1], a[3])], axis=1)  # rows g, g + 8
    right = join(b[0], b[1])  # [warps, n = g, k]
    product = jnp.einsum("wmk,wnk->wmn", *(v.astype(jnp.float32) for v in (left, right)))
    product = product.reshape(-1, 2, 8, 4, 2)  # warp, row half, g, t, n % 2
    return [product[:, i // 2, :, :, i % 2].reshape(-1) + c[i].astype(np.float32) for i in range(4)]


def interpreted(monkeypatch, kernel):
    """Makes `kernel`, a moe_experts kernel module, run in the interpreter."""
    monkeypatch.setattr(kernel.plt, "elementwise_inline_asm", elementwise_inline_asm)
    call = kernel.pl.pallas_call

    def interpreting(*args, **kwargs):
        return call(*args, **{**kwargs, "interpret": True})

    monkeypatch.setattr(kernel.pl, "pallas_call", interpreting)
    monkeypatch.setattr(kernel.plt, "max_contiguous", lambda x, values: x)
    monkeypatch.setattr(kernel.pl, "multiple_of", lambda x, values: x)
    jax.clear_caches()
