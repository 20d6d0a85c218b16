"""The functions of the language in Python: one for each op of the table, and those that give two values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from codalang.builder.recording import wanted
from codalang.builder.value import (
    Operand,
    Reduction,
    Value,
    apply,
    attribute,
    checked,
    constant_of,
)
from codalang.ir.ops import OPS, REDUCTIONS, OpInfo
from codalang.ir.types import Dtype

_NAMED_HINT = "arguments are given by position; which axes are summed is said by the result's shape"


def _function(name: str, info: OpInfo | None) -> Callable[..., Any]:
    """The function of an op, or of a reduction, or of both: `max(a, b)` and `max(x)`."""
    count = len(info.operands) + (info.attr is not None) if info else 1

    def function(*operands: Any, **named: object) -> Any:
        recording = wanted(f"`{name}`")
        if named:
            recording.fail(f"`{name}` has no argument `{next(iter(named))}`", _NAMED_HINT)
        if name in REDUCTIONS and len(operands) == 1:
            return Reduction(name, (checked(recording, operands[0]),), recording.chain()[0].loc)
        if len(operands) != count:
            hint = f"nest them: `{name}(a, {name}(b, c))`" if name in REDUCTIONS and len(operands) > 2 else None
            recording.fail(f"`{name}` takes {count} argument{'' if count == 1 else 's'}, got {len(operands)}", hint)
        if name == "float" and isinstance(operands[0], int) and not isinstance(operands[0], bool):
            operands = (constant_of(operands[0], Dtype.I32),)
        if info is None or info.attr is None:
            return apply(name, *operands)
        return apply(name, *operands[:-1], attr=attribute(name, operands[-1]))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = _documentation(name, info)
    return function


def _documentation(name: str, info: OpInfo | None) -> str:
    lines = []
    if info is not None:
        numbers = iter("xyz")
        operands = ["mask" if dtype is Dtype.BOOL else next(numbers) for dtype in info.operands]
        call = f"{name}({', '.join([*operands, *([info.attr] if info.attr else [])])})"
        lines.append(f"`{call}` of the language, for every element.")
    if name in REDUCTIONS:
        lines.append(f"`{name}(x)` is a reduction, for `reduce`.")
    return "  ".join(lines)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: _function(name, OPS.get(name))
    for name in (*OPS, *REDUCTIONS)
    if name not in OPS or name == "neg" or (OPS[name].infix is None and OPS[name].resize != "halve")
}


def split(x: Operand) -> tuple[Value, Value]:
    """The even and the odd columns of a value, each half as wide."""
    wanted("`split`")
    return apply("even", x, result=0), apply("odd", x, result=1)


def rotate(a: Operand, b: Operand, angle: Operand) -> tuple[Value, Value]:
    """The pair (a, b) turned by an angle: (a cos - b sin, a sin + b cos)."""
    wanted("`rotate`")
    cos, sin = apply("cos", angle), apply("sin", angle)
    x, y = apply("mul", a, cos), apply("mul", b, sin)
    return (
        apply("sub", x, y, result=0),
        apply("add", apply("mul", a, sin), apply("mul", b, cos), result=1),
    )


def i32(number: int) -> Value:
    """An index of a Python int, where nothing beside it says that it is one."""
    recording = wanted("`i32`")
    if not isinstance(number, int) or isinstance(number, bool):
        recording.fail(
            f"`i32` makes an index of a Python int, got {number!r}",
            "an index comes from `row_index()`, `col_index()` or a parameter; no number becomes one",
        )
    return constant_of(number, Dtype.I32)
