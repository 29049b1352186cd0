"""Runs inline PTX in NumPy, that of moe_experts above all, so that kernels can be interpreted.

Registers are uint32 (or float32) arrays with one entry per lane of all warps.
"""

import functools
import re

import jax
import ml_dtypes
import numpy as np


def elementwise_inline_asm(asm, *, args, constraints, pack, result_shape_dtypes):
    """Stands in for `pallas.triton.elementwise_inline_asm`, of the PTX that kernels here use."""
    if asm.startswith("griddepcontrol"):  # no launch follows
        return args
    if asm.startswith("fma.rn.f32"):
        x, y, z = args
        return [x * y + z]
    assert pack == 4 and constraints.startswith("=&f,=&f,=&f,=&f,")
    [result] = result_shape_dtypes
    run = functools.partial(_emulate, asm, len(constraints.split(",")))
    return [jax.pure_callback(run, result, *args)]


def _emulate(asm, operand_count, *args):
    given = [register for arg in args for register in _registers(np.asarray(arg))]
    assert 4 + len(given) == operand_count
    return np.stack(execute(asm, 4, given), axis=-1).reshape(-1)


def execute(asm, results, given, shared=None):
    """Runs a program; `shared` is the shared memory, in bytes."""
    registers = {f"${results + i}": operand for i, operand in enumerate(given)}
    registers["%tid.x"] = np.arange(given[0].size, dtype=np.uint32)
    registers["%laneid"] = registers["%tid.x"] % 32
    with np.errstate(all="ignore"):
        for line in asm.strip("{}\n").split(";"):
            opcode, *rest = line.split(None, 1)[:2] or [""]
            if opcode and opcode != ".reg":
                _run(opcode, rest[0], registers, shared)
    return [registers[f"${i}"] for i in range(results)]


def _registers(x):
    """The 32-bit registers that hold four consecutive elements of a thread."""
    kind = np.float32 if x.dtype == np.float32 else np.uint32
    return list(np.ascontiguousarray(x).reshape(-1, 4).view(kind).T)


def _run(opcode, operands, registers, shared):
    def value(name):
        if name.startswith("0f"):  # a float32 by its bits
            return np.uint32(int(name[2:], 16)).view(np.float32)
        return registers[name] if name in registers else np.uint32(int(name, 0) & 0xFFFFFFFF)

    if opcode.startswith("mma"):
        d, a, b, c = re.findall(r"\{(.*?)\}", operands)
        a, b, c = ([value(name) for name in group.split(", ")] for group in (a, b, c))
        registers.update(zip(d.split(", "), _mma(a, b, c), strict=True))
        return
    if opcode.startswith("ld.shared"):
        targets, base, offset = re.fullmatch(r"\{(.*)\}, \[(\w+) \+ (\d+)\]", operands).groups()
        words = (value(base) + np.uint32(int(offset))) // 4
        for i, target in enumerate(targets.split(", ")):
            registers[target] = shared.view(np.uint32)[words + i]
        return
    target, *names = operands.split(", ")
    x = [value(name) for name in names]
    registers[target] = {
        "shl.b32": lambda: x[0] << x[1],
        "shr.u32": lambda: x[0] >> x[1],
        "and.b32": lambda: x[0] & x[1],
        "mov.b32": lambda: x[0],
        "mov.u32": lambda: x[0],
        "add.u32": lambda: x[0] + x[1],
        "sub.u32": lambda: x[0] - x[1],
        "bfe.u32": lambda: x[0] >> x[1] & (1 << x[2]) - 1,
        "or.b32": lambda: x[0] | x[1],
        "not.b32": lambda: ~x[0],
        "setp.lt.u32": lambda: x[0] < x[1],
        "selp.b32": lambda: np.where(x[2], x[0], x[1]),
        "shfl.sync.idx.b32": lambda: x[0].reshape(-1, 32)[np.arange(len(x[0])) // 32, x[1]],
        "cvt.rn.f16x2.f32": lambda: _float16x2(x[1], x[0]),
        "mad.lo.u32": lambda: x[0] * x[1] + x[2],
        "shf.r.wrap.b32": lambda: x[0] >> x[2] | x[1] << (32 - x[2]),
        "lop3.b32": lambda: _lop3(*x),
        "prmt.b32": lambda: _prmt(*x),
        "mul.rn.bf16x2": lambda: _mul_bf16x2(*x),
    }[opcode]()


def _float16x2(low, high):
    return np.stack([low, high], axis=-1).astype(np.float16).view(np.uint32).reshape(-1)


def _lop3(a, b, c, table):
    out = np.zeros_like(a | b | c)
    for i in range(8):
        if int(table) >> i & 1:
            terms = [v if i >> (2 - n) & 1 else ~v for n, v in enumerate((a, b, c))]
            out |= terms[0] & terms[1] & terms[2]
    return out


def _prmt(a, b, selector):
    out = np.zeros_like(a)
    for i in range(4):
        pick = int(selector) >> (4 * i) & 7
        out |= ((a if pick < 4 else b) >> (8 * (pick % 4)) & 255) << (8 * i)
    return out


def _halves(register):
    """[lanes, 2] bfloat16, the lower half first."""
    return np.ascontiguousarray(register).view(ml_dtypes.bfloat16).reshape(-1, 2)


def _mul_bf16x2(a, b):
    """From integers, since XLA's threads flush subnormal numbers, which 4-bit codes are."""

    def wide(register):
        bits = _halves(register).view(np.uint16).astype(np.int32)
        exponent = bits >> 7 & 255
        mantissa = (bits & 127) + np.where(exponent > 0, 128, 0)
        magnitude = np.ldexp(mantissa.astype(np.float64), np.maximum(exponent, 1) - 134)
        return np.where(bits >> 15 == 1, -magnitude, magnitude)

    product = (wide(a) * wide(b)).astype(np.float32).astype(ml_dtypes.bfloat16)
    return product.view(np.uint32).reshape(-1)


def _mma(a, b, c):
    """m16n8k16 by the fragment layouts of the PTX manual; lane 4g + t."""
    left = operand_a(a)
    right = _join(b[0], b[1])  # [warps, n = g, k]
    product = np.einsum("wmk,wnk->wmn", *(v.astype(np.float32) for v in (left, right)))
    product = product.reshape(-1, 2, 8, 4, 2)  # warp, row half, g, t, n % 2
    return [product[:, i // 2, :, :, i % 2].reshape(-1) + c[i] for i in range(4)]


def operand_a(a):
    """The [warps, 16, 16] of an MMA's, or a warp's of wgmma's, four A registers."""
    return np.concatenate([_join(a[0], a[2]), _join(a[1], a[3])], axis=1)  # rows g, g + 8


def _join(low, high):
    """Columns 2t, 2t + 1 of the lower and of the upper eight."""
    return np.concatenate([_halves(r).reshape(-1, 8, 8) for r in (low, high)], axis=2)


def interpreted(monkeypatch, kernel):
    """Makes `kernel`, a moe_experts kernel module, run in the interpreter."""
    monkeypatch.setattr(kernel.plt, "elementwise_inline_asm", elementwise_inline_asm)
    call = kernel.pl.pallas_call

    def interpreting(*args, **kwargs):
        return call(*args, **{**kwargs, "interpret": True})

    monkeypatch.setattr(kernel.pl, "pallas_call", interpreting)
    monkeypatch.setattr(kernel.plt, "debug_barrier", lambda: None)
    monkeypatch.setattr(kernel.plt, "max_contiguous", lambda x, values: x)
    monkeypatch.setattr(kernel.pl, "multiple_of", lambda x, values: x)
    jax.clear_caches()
