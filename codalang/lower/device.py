"""The operations of the language on the device: the names that generated kernels use.

A value in a generated kernel is a tuple of f32 registers: the columns that one thread holds side by side.  A tile or
row at the accumulator's width has two, at half width one, at double width four; a col or a scalar has one, which
broadcasts.  Each function below applies one op of `ir.ops.OPS` to such tuples; `DEVICE_OPS` is the table.

Transcendental functions use the hardware's approximations (ex2, lg2, rcp, rsqrt: 1 to 2 ulp of f32), except
`tanh`, `sigmoid` and `erf`, whose tails would show in f16: tanh and sigmoid are built from ex2 and rcp, erf is the
library's.  Division is PTX's `div.full` (2 ulp).
"""

from __future__ import annotations

import math as host_math
from collections.abc import Callable
from typing import Any

from cutlass import Boolean, Float32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, and_, not_, or_, select_

Registers = tuple[Any, ...]

LOG2_E = host_math.log2(host_math.e)
LN_2 = host_math.log(2.0)


def elementwise(function: Callable[..., Any]) -> Callable[..., Registers]:
    """Lift a function of scalars to register tuples, broadcasting single registers."""

    def lifted(*operands: Registers) -> Registers:
        lanes = max(len(o) for o in operands)
        return tuple(function(*(o[lane if len(o) > 1 else 0] for o in operands)) for lane in range(lanes))

    lifted.__name__ = function.__name__
    return lifted


def constant(value: float | bool) -> Registers:
    """A literal."""
    return (Boolean(value) if isinstance(value, bool) else Float32(value),)


def even(x: Registers) -> Registers:
    """The even columns: the first result of `split`."""
    return x[0::2]


def odd(x: Registers) -> Registers:
    """The odd columns: the second result of `split`."""
    return x[1::2]


def join(a: Registers, b: Registers) -> Registers:
    """Interleave two values column by column: the inverse of `split`."""
    lanes = max(len(a), len(b))
    pairs = ((a[i if len(a) > 1 else 0], b[i if len(b) > 1 else 0]) for i in range(lanes))
    return tuple(x for pair in pairs for x in pair)


def _exp2(x: Any) -> Any:
    return cute.math.exp2(x, fastmath=True)


def _divide(a: Any, b: Any) -> Any:
    # the full-range approximate division of PTX (2 ulp): the DSL's own is the IEEE one, some 100 instructions
    operands = [Float32(a).ir_value(), Float32(b).ir_value()]
    return Float32(llvm.inline_asm(T.f32(), operands, "div.full.f32 $0, $1, $2;", "=f,f,f", has_side_effects=False))


def _sigmoid(x: Any) -> Any:
    # 1 / (1 + 2^(-x log2 e)): ex2 overflows to inf for very negative x and rcp(inf) is 0, as it should be
    return cute.arch.rcp_approx(1.0 + _exp2(x * -LOG2_E))


def _tanh(x: Any) -> Any:
    # 1 - 2 / (e^2x + 1) loses digits near 0, where tanh(x) = x - x^3/3 + 2x^5/15 - ... serves instead
    far = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + _exp2(x * (2.0 * LOG2_E)))
    square = x * x
    near = x + x * square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return select_(square < 0.0625, near, far)


DEVICE_OPS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _divide,
    "neg": lambda a: -a,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "and": lambda a, b: and_(a, b),
    "or": lambda a, b: or_(a, b),
    "not": lambda a: not_(a),
    "where": lambda c, a, b: select_(c, a, b),
    "min": lambda a, b: cute.arch.fmin(a, b, nan=True),
    "max": lambda a, b: cute.arch.fmax(a, b, nan=True),
    "abs": lambda a: cute.math.abs(a),
    "exp": lambda a: _exp2(a * LOG2_E),
    "exp2": _exp2,
    "log": lambda a: cute.math.log2(a, fastmath=True) * LN_2,
    "log2": lambda a: cute.math.log2(a, fastmath=True),
    "sqrt": lambda a: cute.math.sqrt(a, fastmath=True),
    "rsqrt": lambda a: cute.math.rsqrt(a, fastmath=True),
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "erf": lambda a: cute.math.erf(a),
    "stop_gradient": lambda a: a,
}


def apply_op(name: str) -> Callable[..., Registers]:
    """An op of the table on register tuples, for generated kernels."""
    return elementwise(DEVICE_OPS[name])
