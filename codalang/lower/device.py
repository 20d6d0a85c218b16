"""The operations of the language on the device: the names that generated kernels use.

A value in a generated kernel is a tuple of registers: the columns that one thread holds of a row.  A col or a scalar
has one, which broadcasts.  Each function below applies one op of `ir.ops.OPS` to such tuples; `DEVICE_OPS` is the
table.  What depends on where a register lies in the output (indices, groups) is the host's: see `body.HOST_OPS`.

Transcendental functions come in two ways: DEVICE_OPS has the fast ones, by the hardware's approximations, PRECISE_OPS
those of a `precise epilogue`.  Their error bounds are data: see `accuracy`.

| function      | fast                                                           | precise                           |
|---------------|----------------------------------------------------------------|-----------------------------------|
| exp2, sqrt .. | ex2, lg2, sqrt, rsqrt .approx                                  | the library's; sqrt.rn            |
| exp, log      | through exp2 and log2                                          | the library's                     |
| division      | div.full                                                       | div.rn                            |
| sigmoid, tanh | ex2 and rcp; tanh by its series near 0: tails must hold in f16 | exp and div.rn; the library's     |
| erf           | the library's                                                  | the library's                     |
| 1 + erf       | 2^polynomial for erfc: 2.5e-7 absolute                         | as written                        |
| 1 + tanh      | 2 sigmoid(2x): 4 ulp                                           | as written                        |
| sin, cos      | sin, cos .approx of what remains beside whole turns            | by polynomials of a quarter turn  |
| pow           | products for whole exponents to 16, else exp2(e log2 x)        | products to 4, else the library's |
"""

from __future__ import annotations

import math as host_math
from collections.abc import Callable
from typing import Any

from cutlass import BFloat16, Boolean, Float16, Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, and_, not_, or_, select_

from codalang.lower.body import Block, Fold

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


def choose(condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, else b: two registers of one dtype."""
    return type(a)(select_(condition, a, b))


def constant(value: float | int | bool) -> Registers:
    """A literal: a float, an i32 or a mask."""
    kind = {bool: Boolean, int: Int32, float: Float32}[type(value)]
    # through its IR value: the DSL would compute with a Python number itself, and a comparison of two is no condition
    return (kind(kind(value).ir_value()),)


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


def _settled(x: Any) -> Any:
    # x + -0.0 is x, whatever it is, and takes two operands: see `codegen._is_bare`
    operands = [Float32(x).ir_value()]
    return Float32(llvm.inline_asm(T.f32(), operands, "add.f32 $0, $1, 0f80000000;", "=f,f", has_side_effects=False))


settled = elementwise(_settled)


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
    return choose(square < 0.0625, near, far)


# log2(erfc(u)) / u to 8e-8 of erfc, by powers of u in 0 .. _ERFC_END, where erfc is 3e-9
_ERFC = (-1.62791373, -0.918328645, -0.148963666, 0.0294525115, -0.00230223719, -0.000461572511, 0.000100220879)
_ERFC_END = 4.2


def _one_plus_erf(x: Any) -> Any:
    magnitude = cute.math.abs(x)
    near = cute.arch.fmin(magnitude, Float32(_ERFC_END), nan=True)  # beyond, a line to 0, which infinity meets
    exponent = Float32(_ERFC[-1])
    for coefficient in reversed(_ERFC[:-1]):
        exponent = exponent * near + coefficient
    complement = _exp2(exponent * magnitude)
    return choose(x < 0.0, complement, 2.0 - complement)


one_plus_erf = elementwise(_one_plus_erf)
one_plus_tanh = elementwise(lambda x: 2.0 * cute.arch.rcp_approx(1.0 + _exp2(x * (-2.0 * LOG2_E))))


def _minimum(a: Any, b: Any) -> Any:
    return cute.arch.fmin(a, b, nan=True) if isinstance(a, Float32) else choose(a < b, a, b)


def _maximum(a: Any, b: Any) -> Any:
    return cute.arch.fmax(a, b, nan=True) if isinstance(a, Float32) else choose(a > b, a, b)


def _absolute(a: Any) -> Any:
    return cute.math.abs(a) if isinstance(a, Float32) else choose(a < 0, -a, a)


def _float(a: Any) -> Any:
    return choose(a, Float32(1.0), Float32(0.0)) if isinstance(a, Boolean) else a.to(Float32)


# 2 pi in two parts of f32.  In a fused step k * part is exact, so that what remains has an error of its own last bits.
_TURN = (6.2831854820251465, -1.7484555314695172e-7)
# Added to a number up to 2^22, leaves it rounded to a whole one
_ROUNDING = 1.5 * 2**23


def _in_turn(x: Any) -> Any:
    """What remains of x beside multiples of 2 pi, in [-pi, pi].

    By additions: the hardware's own rounding and conversion take eight times as long.
    """
    turns = cute.math.fma(x, Float32(0.5 / host_math.pi), Float32(_ROUNDING)) - _ROUNDING
    for part in _TURN:
        x = cute.math.fma(-turns, Float32(part), x)
    return x


def _approximate(name: str, x: Any) -> Any:
    """The hardware's sine or cosine, for x in [-pi, pi]."""
    operands = [Float32(x).ir_value()]
    return Float32(llvm.inline_asm(T.f32(), operands, f"{name}.approx.ftz.f32 $0, $1;", "=f,f", has_side_effects=False))


def _power(x: Any, exponent: float) -> Any:
    if exponent == 0.5:
        return cute.math.sqrt(x, fastmath=True)
    if exponent == int(exponent) and abs(exponent) <= 16:
        result, factor, rest = None, x, int(abs(exponent))
        while rest:
            if rest & 1:
                result = factor if result is None else result * factor
            factor, rest = factor * factor, rest >> 1
        if result is None:
            return Float32(1.0)
        return result if exponent > 0 else _divide(Float32(1.0), result)
    return _exp2(cute.math.log2(x, fastmath=True) * exponent)


def _cast(x: Any, dtype: str) -> Any:
    kinds = {"bf16": BFloat16, "f16": Float16, "f32": Float32}
    return x.to(kinds[dtype]).to(Float32)


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
    "where": choose,
    "min": _minimum,
    "max": _maximum,
    "abs": _absolute,
    "exp": lambda a: _exp2(a * LOG2_E),
    "exp2": _exp2,
    "log": lambda a: cute.math.log2(a, fastmath=True) * LN_2,
    "log2": lambda a: cute.math.log2(a, fastmath=True),
    "sqrt": lambda a: cute.math.sqrt(a, fastmath=True),
    "rsqrt": lambda a: cute.math.rsqrt(a, fastmath=True),
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "erf": lambda a: cute.math.erf(a),
    "sin": lambda a: _approximate("sin", _in_turn(a)),
    "cos": lambda a: _approximate("cos", _in_turn(a)),
    "pow": _power,
    "cast": _cast,
    "float": _float,
    "stop_gradient": lambda a: a,
}


# ---- precise ---------------------------------------------------------------------------------------------------------

# pi/2 in three parts whose products with a whole number below 2^22 are exact to their last bit in a fused step
_HALF_PI_FUSED = (1.570796012878418, 3.1391647326017846e-07, 5.390302529957765e-15)
# sin(r) / r - 1 and (cos(r) - 1 + r^2 / 2) / r^4 by powers of r^2, for r in [-pi/4, pi/4]
_SINE = (-1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4)
_COSINE = (4.166664568298827e-2, -1.388731625493765e-3, 2.443315711809948e-5)


def _precise_divide(a: Any, b: Any) -> Any:
    return Float32(a) / Float32(b)


def _polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    value = Float32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = cute.math.fma(value, x, Float32(coefficient))
    return value


def _precise_sine(x: Any, quarter: int) -> Any:
    """sin(x + quarter * pi/2)."""
    turns = cute.math.roundeven(x * (2.0 / host_math.pi))
    rest = x
    for part in _HALF_PI_FUSED:
        rest = cute.math.fma(-turns, Float32(part), rest)
    square = rest * rest
    sine = cute.math.fma(rest * square, _polynomial(square, _SINE), rest)
    cosine = cute.math.fma(
        square * square, _polynomial(square, _COSINE), cute.math.fma(square, Float32(-0.5), Float32(1))
    )
    turned = turns.to(Int32) + quarter
    magnitude = choose((turned & 1) == 0, sine, cosine)
    return choose((turned & 2) == 0, magnitude, -magnitude)


def _precise_power(x: Any, exponent: float) -> Any:
    if exponent in (0.5, 0.0, 1.0, 2.0, 3.0, 4.0):
        square = x * x
        return {
            0.0: lambda: Float32(1.0),
            0.5: lambda: cute.math.sqrt(x),
            1.0: lambda: x,
            2.0: lambda: square,
            3.0: lambda: square * x,
            4.0: lambda: square * square,
        }[exponent]()
    return cute.math.pow(x, Float32(exponent))


# What a `precise epilogue` computes otherwise.
PRECISE_OPS: dict[str, Callable[..., Any]] = {
    "div": _precise_divide,
    "exp": lambda a: cute.math.exp(a),
    "exp2": lambda a: cute.math.exp2(a),
    "log": lambda a: cute.math.log(a),
    "log2": lambda a: cute.math.log2(a),
    "sqrt": lambda a: cute.math.sqrt(a),
    "rsqrt": lambda a: _precise_divide(1.0, cute.math.sqrt(a)),
    "tanh": lambda a: cute.math.tanh(a),
    "sigmoid": lambda a: _precise_divide(1.0, 1.0 + cute.math.exp(-a)),
    "erf": lambda a: cute.math.erf(a),
    "sin": lambda a: _precise_sine(a, 0),
    "cos": lambda a: _precise_sine(a, 1),
    "pow": _precise_power,
}


def apply_op(name: str) -> Callable[..., Registers]:
    """An op of the table on register tuples, for generated kernels.  A static attribute comes as a last argument."""
    return _on_registers(DEVICE_OPS[name])


def apply_precise(name: str) -> Callable[..., Registers]:
    """The same of what a `precise epilogue` computes otherwise."""
    return _on_registers(PRECISE_OPS[name])


def _on_registers(function: Callable[..., Any]) -> Callable[..., Registers]:
    def applied(*operands: Any) -> Registers:
        static = [o for o in operands if not isinstance(o, tuple)]
        return elementwise(lambda *registers: function(*registers, *static))(
            *(o for o in operands if isinstance(o, tuple))
        )

    return applied


def combine(name: str, registers: Registers, exchange: Callable[[Any, int], Any], lanes: tuple[int, ...]) -> Any:
    """Sum or maximum of one thread's registers and of those of the lanes that differ in the given bits."""
    function = {"group_sum": DEVICE_OPS["add"], "group_max": DEVICE_OPS["max"]}[name]
    total = registers[0]
    for register in registers[1:]:
        total = function(total, register)
    for lane in lanes:
        total = function(total, exchange(total, lane))
    return total


def _reduction(how: str, op: str, initial: float) -> Fold:
    function = apply_op(op)
    step = lambda a, b: (function(a, b),)  # noqa: E731
    same = lambda a: (a,)  # noqa: E731
    return Fold((initial,), ("f32",), step, step, same, ("f32",), Block(((how, same),), same))


# The folds of `reduce`.
REDUCTIONS = {
    "sum": _reduction("sum", "add", 0.0),
    "max": _reduction("max", "max", -host_math.inf),
    "min": _reduction("min", "min", host_math.inf),
}
