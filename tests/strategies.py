"""Random well-typed epilogues, and inputs for them.

`epilogues()` draws a program node by node through EpilogueBuilder: every op, kind and width, values shared at will, a
few outputs of every sort.  It shrinks towards few steps, `add`, and the accumulator.

Programs are numerically tame, so that a comparison to 1e-9 means something: inputs lie in [-2, 2], each value carries
an interval that contains it, and where an operand's interval would make an op overflow, divide by nearly zero or
leave its domain, the operand is first made tame (2^-k * x, 1 + x*x).  Inputs are real numbers at random, so that two
different values are equal, or a value is at a kink, with probability zero; a program may still compare a value with
itself, and there the derivative is the same convention on both sides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from codalang.ir.build import EpilogueBuilder
from codalang.ir.epilogue import Epilogue, Output, Param
from codalang.ir.ops import OPS
from codalang.ir.types import STORAGE_DTYPES, WIDTHS, Dtype, Kind, ValueType

INPUT_BOUND = 2.0
# A value that may be larger is scaled before it is used further.  tanh(6) is 1 - 1e-5: no op saturates, or the rounding
# of 1 - y * y would be all there is of a derivative.
LARGE = 6.0
# A denominator or the argument of a logarithm or root is at least this.
SMALL = 0.25

# Names that meet those which a derivation makes up.
NAMES = ["acc", "x", "y", "r", "bias", "d_x", "d_y", "d_acc", "saved_acc", "dx", "max", "t1", "sigmoid"]
CONSTANTS = [1.0, 0.0, 2.0, -1.0, 0.5, -0.25, 3.0]

Interval = tuple[float, float]


@attrs.frozen
class Value:
    """A node, its type, and an interval that contains it (masks: none)."""

    node: int
    type: ValueType
    interval: Interval = (-math.inf, math.inf)


def _hull(*points: float) -> Interval:
    return (min(points), max(points))


def _products(a: Interval, b: Interval) -> Interval:
    return _hull(*(x * y for x in a for y in b))


def _monotone(f: Callable[[float], float]) -> Callable[[Interval], Interval]:
    return lambda a: (f(a[0]), f(a[1]))


INTERVALS: dict[str, Callable[..., Interval]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _products,
    "div": lambda a, b: _products(a, (1 / b[1], 1 / b[0])),
    "neg": lambda a: (-a[1], -a[0]),
    "where": lambda a, b: _hull(*a, *b),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "abs": lambda a: (0.0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1])), max(abs(a[0]), abs(a[1]))),
    "exp": _monotone(math.exp),
    "exp2": _monotone(lambda x: 2.0**x),
    "log": _monotone(math.log),
    "log2": _monotone(math.log2),
    "sqrt": _monotone(math.sqrt),
    "rsqrt": lambda a: (a[1] ** -0.5, a[0] ** -0.5),
    "tanh": _monotone(math.tanh),
    "sigmoid": _monotone(lambda x: 1 / (1 + math.exp(-x))),
    "erf": _monotone(math.erf),
    "stop_gradient": lambda a: a,
    "even": lambda a: a,
    "odd": lambda a: a,
    "join": lambda a, b: _hull(*a, *b),
}

# Operand positions whose interval must stay away from zero, from above.
_POSITIVE = {"div": 1, "log": 0, "log2": 0, "sqrt": 0, "rsqrt": 0}
_EXPONENTIALS = ("exp", "exp2")


class _Draft:
    """A program in the making: the builder, and the values that later steps may use, the accumulator first."""

    def __init__(self, draw: Callable[..., object], name: str) -> None:
        self.draw = draw
        self.builder = EpilogueBuilder(name, ("M", "N"))
        self.pool: list[Value] = []
        self.used: set[int] = set()

    def choose(self, options: list[Value]) -> Value:
        # The latest first, so that programs grow deep.
        return options[-1 - self.draw(st.integers(0, len(options) - 1))]

    def apply(self, op: str, *operands: Value) -> Value:
        """A new value; its operands are made tame first."""
        return self.node(op, *(self.tamed(op, position, v) for position, v in enumerate(operands)))

    def node(self, op: str, *operands: Value) -> Value:
        """A new value of these very operands."""
        node = self.builder.op(op, *(v.node for v in operands))
        self.used.update(v.node for v in operands)
        type_ = self.builder.nodes[node].type
        if type_.dtype is Dtype.BOOL:
            return Value(node, type_)
        numbers = [v.interval for v in operands if v.type.dtype is Dtype.F32]
        low, high = INTERVALS[op](*numbers)
        if op == "mul" and operands[0].node == operands[1].node:
            low = max(low, 0.0)
        return Value(node, type_, (low, high))

    def tamed(self, op: str, position: int, value: Value) -> Value:
        low, high = value.interval
        if value.type.dtype is Dtype.BOOL:
            return value
        if _POSITIVE.get(op) == position and low < SMALL:
            value = self.scaled(value, LARGE)
            return self.node("add", self.constant(1.0), self.node("mul", value, value))
        return self.scaled(value, INPUT_BOUND if op in _EXPONENTIALS else LARGE)

    def scaled(self, value: Value, bound: float) -> Value:
        """The value, times a power of two where it may exceed the bound."""
        largest = max(abs(x) for x in value.interval)
        if largest <= bound:
            return value
        return self.node("mul", self.constant(2.0 ** -math.ceil(math.log2(largest / bound))), value)

    def constant(self, number: float | bool) -> Value:
        node = self.builder.const(number)
        interval = (-math.inf, math.inf) if isinstance(number, bool) else (number, number)
        return Value(node, self.builder.nodes[node].type, interval)

    def operand(self, dtype: Dtype, fits: Callable[[ValueType], bool], literals: bool = True) -> Value | None:
        """A value of the pool, or now and then a literal.  A mask that is missing is made by a comparison."""
        options = [v for v in self.pool if v.type.dtype is dtype and fits(v.type)]
        literal = not options or (literals and self.draw(st.integers(0, 7)) == 7)
        if dtype is Dtype.BOOL and not options:
            a = self.operand(Dtype.F32, fits)
            return None if a is None else self.apply("lt", a, self.constant(self.draw(st.sampled_from([0.1, -0.3]))))
        if not literal:
            return self.choose(options)
        if not fits(ValueType(Kind.SCALAR)):
            return self.choose(options) if options else None
        return self.constant(self.draw(st.booleans() if dtype is Dtype.BOOL else st.sampled_from(CONSTANTS)))

    def step(self, op: str) -> None:
        """Apply an op, or both halves of `split`, to values that fit, if there are any."""
        if op == "split":
            whole = self.operand(Dtype.F32, functools.partial(_fits, "halve", widths=set(), last=True))
            if whole is not None:
                self.pool += [self.apply("even", whole), self.apply("odd", whole)]
            return
        info = OPS[op]
        operands: list[Value] = []
        for position, dtype in enumerate(info.operands):
            widths = {v.type.width for v in operands if v.type.width is not None}
            last = position == len(info.operands) - 1
            fits = functools.partial(_fits, info.resize, widths=widths, last=last)
            operand = self.operand(dtype, fits, literals=len(info.operands) > 1)
            if operand is None:
                return
            operands.append(operand)
        value = self.apply(op, *operands)
        if self.draw(st.integers(0, 3)) == 3:
            self.builder.hint(value.node, self.draw(st.sampled_from(NAMES)))
        self.pool.append(value)


def _fits(resize: str | None, type: ValueType, widths: set[Fraction], last: bool) -> bool:
    """Can a value be the next operand beside others of these widths?"""
    if widths and type.width is not None and type.width not in widths:
        return False
    if resize is None:
        return True
    width = type.width or next(iter(widths), None)
    if width is None:
        return not last  # something must bring the columns
    return (width / 2 if resize == "halve" else width * 2) in WIDTHS


# Every op, and those oftener that combine values.
_STEPS = ["add", *OPS, "split", "split", "join", "sub", "mul", "mul", "mul", "where"]


@st.composite
def _value_type(draw: Callable[..., object], kinds: list[Kind]) -> ValueType:
    kind = draw(st.sampled_from(kinds))
    width = draw(st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(2)])) if kind.has_columns else None
    return ValueType(kind, width)


_annotation = st.sampled_from([None, None, None, None, *STORAGE_DTYPES])


@st.composite
def epilogues(draw: Callable[..., object], *, max_steps: int = 16, annotated: bool = True) -> Epilogue:
    """A random epilogue with at most `max_steps` steps beside those that keep it tame."""
    draft = _Draft(draw, "random")
    annotation = _annotation if annotated else st.none()
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=5))
    for position, name in enumerate(names):
        kinds = [Kind.TILE] if position == 0 and draw(st.integers(0, 9)) < 9 else list(reversed(Kind))
        type_ = draw(_value_type(kinds))
        node = draft.builder.param(name, type_, draw(annotation))
        draft.pool.append(Value(node, type_, (-INPUT_BOUND, INPUT_BOUND)))
    for _ in range(draw(st.integers(0, max_steps))):
        draft.step(draw(st.sampled_from(_STEPS)))
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=4)):
        _output(draw, draft, name, draw(annotation))
    return draft.builder.finish()


def _output(draw: Callable[..., object], draft: _Draft, name: str, dtype: str | None) -> None:
    values = [v for v in reversed(draft.pool) if v.type.dtype is Dtype.F32]
    # Results that nothing uses come first, or much of the program would be dead.
    values.sort(key=lambda v: v.node in draft.used)
    value = values[draw(st.integers(0, min(len(values), 6) - 1))]
    draft.used.add(value.node)
    type_ = draw(_value_type(list(reversed(Kind))))
    if value.type.width is not None and type_.width is not None:
        type_ = ValueType(type_.kind, value.type.width)
    if type_.kind is Kind.TILE:
        draft.builder.store(name, value.node, type_, dtype)
    else:
        draft.builder.reduce(name, value.node, type_, "sum", dtype)


# Base extents (M, N): one row, ragged against any tile, N even for the half-width values.
extents = st.tuples(st.integers(1, 5), st.sampled_from([2, 4, 6, 8]))


def shape_of(what: Param | Output, extents: tuple[int, int]) -> tuple[int, ...]:
    """The tensor shape of a parameter or output."""
    rows = (extents[0],) if what.type.kind.has_rows else ()
    columns = (int(what.type.width * extents[1]),) if what.type.width is not None else ()
    return rows + columns


def inputs_for(epilogue: Epilogue, extents: tuple[int, int], seed: int) -> dict[str, Tensor]:
    """Fresh float64 inputs in [-2, 2] for every parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {p.name: _uniform(shape_of(p, extents), generator) for p in epilogue.params}


def cotangents_for(epilogue: Epilogue, extents: tuple[int, int], seed: int) -> dict[str, Tensor]:
    """Fresh float64 cotangents in [-2, 2] for every output."""
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    return {o.name: _uniform(shape_of(o, extents), generator) for o in epilogue.outputs}


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return INPUT_BOUND * (2 * torch.rand(shape, dtype=torch.float64, generator=generator) - 1)
