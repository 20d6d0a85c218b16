"""Random well-typed epilogues, and inputs for them.

`epilogues()` draws a program node by node through EpilogueBuilder: every op and signature, kind, width and dtype,
values shared at will, a few outputs of every sort.  It shrinks towards few steps, `add`, and the accumulator.

Programs are numerically tame, so that a comparison to 1e-9 means something: inputs lie in [-2, 2], each value carries
an interval that contains it, and where an operand's interval would make an op overflow, divide by nearly zero or
leave its domain, the operand is first made tame (2^-k * x, 1 + x*x).  Inputs are real numbers at random, so that two
different values are equal, or a value is at a kink, with probability zero; a program may still compare a value with
itself, or with what rounding made equal, and there the derivative is the same convention on both sides.

`without` leaves out ops and reductions by name.  NOT_SMOOTH are those that finite differences do not see as the
derivative is defined, JUMPS those where a rounding error may decide between quite different values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor
from user_states import POSITIVE_INPUTS

from codalang.ir.bind import granularity
from codalang.ir.build import EpilogueBuilder
from codalang.ir.builtin_states import ARGMAX, ARGMAX2, ONLINE_LOGSUMEXP, ONLINE_MAX, ONLINE_MIN, WELFORD
from codalang.ir.epilogue import Epilogue, Output, Param
from codalang.ir.ops import OPS, REDUCTIONS
from codalang.ir.states import StateDef
from codalang.ir.types import INTEGER_DTYPES, STORAGE_DTYPES, WIDTHS, Dtype, Kind, ValueType

INPUT_BOUND = 2.0
# A value that may be larger is scaled before it is used further.  tanh(6) is 1 - 1e-5: no op saturates, or the rounding
# of 1 - y * y would be all there is of a derivative.
LARGE = 6.0
# A denominator or the argument of a logarithm or root is at least this.
SMALL = 0.25
# Integer inputs, which meet row and column indices; and what no index exceeds in any test.
INDEX_INPUTS = (-2, 9)
INDEX_BOUND = 1 << 12

# Names that meet those which a derivation makes up.
NAMES = ["acc", "x", "y", "r", "bias", "d_x", "d_y", "d_acc", "saved_acc", "dx", "max", "t1", "sigmoid"]
CONSTANTS = [1.0, 0.0, 2.0, -1.0, 0.5, -0.25, 3.0]
INTEGERS = [1, 0, 2, 3, -1]
ATTRIBUTES: dict[str, list[str | float | int]] = {
    "exponent": [2.0, 1.5, 3.0, -1.0, 0.5, -0.5, 1.0, 0.0, 4.0],
    "dtype": list(STORAGE_DTYPES),
    "group": [2, 4],
}

Interval = tuple[float, float]
Attribute = str | float | int | None


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


def _needs_positive(exponent: float) -> bool:
    """Is a power of this exponent undefined, or steep, at some number that is not positive?"""
    return exponent < 0 or exponent != int(exponent)


def _powers(a: Interval, exponent: float) -> Interval:
    inner = [] if _needs_positive(exponent) or not a[0] <= 0 <= a[1] else [0.0**exponent]
    return _hull(*(x**exponent for x in a), *inner)


# The interval of a result, from those of the operands that are no masks, and the attribute where there is one.
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
    "sin": lambda a: (-1.0, 1.0),
    "cos": lambda a: (-1.0, 1.0),
    "pow": _powers,
    "cast": lambda a, dtype: (min(a[0] * 0.99, a[0] * 1.01), max(a[1] * 0.99, a[1] * 1.01)),
    "float": lambda a=(0.0, 1.0): a,
    "row_index": lambda: (0, INDEX_BOUND),
    "col_index": lambda: (0, INDEX_BOUND),
    "group_sum": lambda a, group: (group * a[0], group * a[1]),
    "group_max": lambda a, group: a,
    "stop_gradient": lambda a: a,
    "even": lambda a: a,
    "odd": lambda a: a,
    "join": lambda a, b: _hull(*a, *b),
}

# Operand positions whose interval must stay away from zero, from above.
_POSITIVE = {"div": 1, "log": 0, "log2": 0, "sqrt": 0, "rsqrt": 0}
_EXPONENTIALS = ("exp", "exp2")
NOT_SMOOTH = ("cast", "stop_gradient")
JUMPS = (
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "where",
    "min",
    "max",
    "abs",
    "group_max",
    "argmax",
    "online_max",
    "online_min",
)


class _Draft:
    """A program in the making: the builder, and the values that later steps may use, the accumulator first."""

    def __init__(self, draw: Callable[..., object], name: str) -> None:
        self.draw = draw
        self.builder = EpilogueBuilder(name, ("M", "N", "B"))
        self.pool: list[Value] = []
        self.used: set[int] = set()

    def choose(self, options: list[Value]) -> Value:
        # The latest first, so that programs grow deep.
        return options[-1 - self.draw(st.integers(0, len(options) - 1))]

    def apply(self, op: str, *operands: Value, attr: Attribute = None) -> Value | None:
        """A new value; its operands are made tame first.  None for an index that might overflow."""
        return self.node(op, *(self.tamed(op, position, v, attr) for position, v in enumerate(operands)), attr=attr)

    def node(self, op: str, *operands: Value, attr: Attribute = None) -> Value | None:
        """A new value of these very operands."""
        numbers = [v.interval for v in operands if v.type.dtype is not Dtype.BOOL]
        attribute = () if attr is None else (attr,)
        interval = INTERVALS[op](*numbers, *attribute) if op in INTERVALS and (numbers or not operands) else None
        counts = any(v.type.dtype is Dtype.I32 for v in operands)
        if counts and interval is not None and max(abs(x) for x in interval) > 1 << 30:
            return None
        node = self.builder.op(op, *(v.node for v in operands), attr=attr)
        self.used.update(v.node for v in operands)
        type_ = self.builder.nodes[node].type
        if type_.dtype is Dtype.BOOL:
            return Value(node, type_)
        low, high = interval if interval is not None else (0.0, 1.0)
        if op == "mul" and operands[0].node == operands[1].node:
            low = max(low, 0.0)
        return Value(node, type_, (low, high))

    def tamed(self, op: str, position: int, value: Value, attr: Attribute = None) -> Value:
        if value.type.dtype is not Dtype.F32:
            return value
        positive = _POSITIVE.get(op) == position or (op == "pow" and _needs_positive(float(attr or 0)))
        return self.positive(value) if positive else self.scaled(value, INPUT_BOUND if op in _EXPONENTIALS else LARGE)

    def positive(self, value: Value) -> Value:
        """The value, or 1 + x*x of it where it may be small."""
        value = self.scaled(value, LARGE)
        if value.interval[0] >= SMALL:
            return value
        return self.made("add", self.constant(1.0), self.made("mul", value, value))

    def scaled(self, value: Value, bound: float) -> Value:
        """The value, times a power of two where it may exceed the bound."""
        largest = max(abs(x) for x in value.interval)
        if largest <= bound:
            return value
        return self.made("mul", self.constant(2.0 ** -math.ceil(math.log2(largest / bound))), value)

    def made(self, op: str, *operands: Value) -> Value:
        """A new value that cannot overflow."""
        value = self.node(op, *operands)
        assert value is not None
        return value

    def constant(self, number: float | int | bool) -> Value:
        if isinstance(number, int) and not isinstance(number, bool):
            node = self.builder.integer(number)
        else:
            node = self.builder.const(number)
        interval = (-math.inf, math.inf) if isinstance(number, bool) else (number, number)
        return Value(node, self.builder.nodes[node].type, interval)

    def operand(self, dtype: Dtype, fits: Callable[[ValueType], bool], literals: bool = True) -> Value | None:
        """A value of the pool, or now and then a literal.  A mask or an index that is missing is made."""
        options = [v for v in self.pool if v.type.dtype is dtype and fits(v.type)]
        literal = not options or (literals and self.draw(st.integers(0, 7)) == 7)
        if dtype is Dtype.BOOL and not options:
            a = self.operand(Dtype.F32, fits)
            return None if a is None else self.apply("lt", a, self.constant(self.draw(st.sampled_from([0.1, -0.3]))))
        if dtype is Dtype.I32 and not options:
            options = [v for v in (self.made("row_index"), self.made("col_index")) if fits(v.type)]
            literal = literal and not options
        if not literal:
            return self.choose(options)
        if not fits(ValueType(Kind.SCALAR)):
            return self.choose(options) if options else None
        literals_ = {Dtype.BOOL: [False, True], Dtype.I32: INTEGERS, Dtype.F32: CONSTANTS}[dtype]
        return self.constant(self.draw(st.sampled_from(literals_)))

    def step(self, op: str) -> None:
        """Apply an op, or both halves of `split`, to values that fit, if there are any."""
        info = OPS["even" if op == "split" else op]
        dtypes, _ = self.draw(st.sampled_from([info.signatures[0], *info.signatures]))
        attr = None if info.attr is None else self.draw(st.sampled_from(ATTRIBUTES[info.attr]))
        operands: list[Value] = []
        for position, dtype in enumerate(dtypes):
            widths = {v.type.width for v in operands if v.type.width is not None}
            last = position == len(dtypes) - 1
            resize = "keep" if info.attr == "group" else info.resize
            fits = functools.partial(_fits, resize, widths=widths, last=last)
            operand = self.operand(dtype, fits, literals=len(dtypes) > 1)
            if operand is None:
                return
            operands.append(operand)
        for each in ("even", "odd") if op == "split" else (op,):
            value = self.apply(each, *operands, attr=attr)
            if value is None:
                return
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
    return width * {"halve": Fraction(1, 2), "keep": 1, "double": 2}[resize] in WIDTHS


# In the order in which a program shrinks.
_KINDS = [Kind.TILE, Kind.COL, Kind.ROW, Kind.SCALAR, Kind.ROWS]

# Every op, and those oftener that combine values.
_STEPS = ["add", *OPS, "split", "split", "join", "sub", "mul", "mul", "mul", "where", "where"]


@st.composite
def _value_type(draw: Callable[..., object], kinds: list[Kind]) -> ValueType:
    kind = draw(st.sampled_from(kinds))
    width = draw(st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(2)])) if kind.has_columns else None
    return ValueType(kind, width)


_annotation = st.sampled_from([None, None, None, None, *STORAGE_DTYPES])


@st.composite
def epilogues(
    draw: Callable[..., object],
    *,
    max_steps: int = 16,
    annotated: bool = True,
    without: Collection[str] = (),
    states: Sequence[StateDef] = (),
) -> Epilogue:
    """A random epilogue with at most `max_steps` steps beside those that keep it tame.

    `states` are stateful transforms beside the built-in ones.
    """
    draft = _Draft(draw, "random")
    annotation = _annotation if annotated else st.none()
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=5))
    for position, name in enumerate(names):
        _param(draw, draft, name, position, annotation)
    steps = [op for op in _STEPS if op not in without]
    for _ in range(draw(st.integers(0, max_steps))):
        draft.step(draw(st.sampled_from(steps)))
    free = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=4))
    while free:
        _output(draw, draft, free, draw(annotation), states, without)
    for value in draw(st.lists(st.sampled_from(draft.pool), unique=True, max_size=2)):
        _keep(draw, draft, value)
    return draft.builder.finish()


def _param(
    draw: Callable[..., object], draft: _Draft, name: str, position: int, annotation: st.SearchStrategy[str | None]
) -> None:
    """A parameter: floats, but for one in seven or so; the first is most often the accumulator."""
    first = position == 0 and draw(st.integers(0, 9)) < 9
    type_ = draw(_value_type([Kind.TILE] if first else _KINDS))
    dtype = Dtype.F32 if first else draw(st.sampled_from([Dtype.F32] * 5 + [Dtype.I32, Dtype.BOOL]))
    storage = draw(
        {Dtype.F32: annotation, Dtype.I32: st.sampled_from(INTEGER_DTYPES), Dtype.BOOL: st.just("bool")}[dtype]
    )
    type_ = attrs.evolve(type_, dtype=dtype)
    interval = {Dtype.F32: (-INPUT_BOUND, INPUT_BOUND), Dtype.I32: INDEX_INPUTS}.get(dtype, (-math.inf, math.inf))
    draft.pool.append(Value(draft.builder.param(name, type_, storage), type_, interval))


# ---- outputs ---------------------------------------------------------------------------------------------------------


def _output(
    draw: Callable[..., object],
    draft: _Draft,
    free: list[str],
    dtype: str | None,
    states: Sequence[StateDef],
    without: Collection[str],
) -> None:
    """An output of any sort; it takes its names from those that are free."""
    value = _result(draw, draft)
    sort = draw(st.sampled_from(["store", "store", "reduce", "reduce", "state"]))
    if sort == "store":
        kinds = [k for k in _KINDS if k is not Kind.ROWS and _holds(k, value.type.kind)]
        draft.builder.store(free.pop(0), value.node, _of_width(draw(_value_type(kinds)), value), dtype)
        return
    type_ = _of_width(draw(_value_type([Kind.COL, Kind.ROW, Kind.SCALAR, Kind.ROWS])), value)
    if sort == "reduce":
        how = draw(st.sampled_from([how for how in REDUCTIONS if how not in without]))
        draft.builder.reduce(free.pop(0), value.node, type_, how, dtype)
        return
    known = [ONLINE_LOGSUMEXP, WELFORD, ARGMAX, ONLINE_MAX, ONLINE_MIN, *states]
    definition = draw(st.sampled_from([d for d in known if d.name not in without]))
    definition = ARGMAX2 if definition is ARGMAX and type_.kind is Kind.SCALAR else definition
    operands = _state_inputs(draw, draft, definition, value, type_)
    if operands is None:
        return
    count = min(len(free), draw(st.integers(1, len(definition.results))))
    names = [free.pop(0) for _ in range(count)]
    storage = dtype if all(d is Dtype.F32 for _, d in definition.results[:count]) else None
    draft.builder.state(names, [v.node for v in operands], type_, definition, storage)


def _result(draw: Callable[..., object], draft: _Draft) -> Value:
    """A float that an output may hold.  Results that nothing uses come first, or much of the program would be dead."""
    values = [v for v in reversed(draft.pool) if v.type.dtype is Dtype.F32] or [draft.constant(0.5)]
    values.sort(key=lambda v: v.node in draft.used)
    value = values[draw(st.integers(0, min(len(values), 6) - 1))]
    draft.used.add(value.node)
    return value


def _holds(kind: Kind, value: Kind) -> bool:
    return kind.has_rows >= value.has_rows and kind.has_columns >= value.has_columns


def _of_width(type: ValueType, value: Value) -> ValueType:
    """The type, as wide as the value where both have columns."""
    both = type.width is not None and value.type.width is not None
    return attrs.evolve(type, width=value.type.width) if both else type


def _state_inputs(
    draw: Callable[..., object], draft: _Draft, definition: StateDef, value: Value, type: ValueType
) -> list[Value] | None:
    """The value and, beside it, what else a transform folds; indices that are all different."""
    width = type.width or value.type.width or Fraction(1)
    if definition is ARGMAX2:
        return [value, draft.made("row_index"), _columns(draft, width)]
    if definition is ARGMAX:
        return [value, draft.made("row_index") if type.kind in (Kind.ROW, Kind.ROWS) else _columns(draft, width)]
    if definition in (ONLINE_LOGSUMEXP, WELFORD, ONLINE_MAX, ONLINE_MIN):
        return [draft.scaled(value, LARGE)]
    positive = definition.inputs[0][0] in POSITIVE_INPUTS
    operands = [draft.positive(value) if positive else draft.scaled(value, LARGE)]
    for name, dtype in definition.inputs[1:]:
        widths = {t.width for t in (type, *(v.type for v in operands)) if t.width is not None}
        other = draft.operand(dtype, functools.partial(_fits, None, widths=widths, last=False))
        if other is None:
            return None
        operands.append(draft.positive(other) if name in POSITIVE_INPUTS else other)
    return operands


def _columns(draft: _Draft, width: Fraction) -> Value:
    """Column indices on a domain of any width."""
    index = draft.made("col_index")
    if width < 1:
        return draft.made("even", index)
    if width == 1:
        return index
    twice = draft.made("mul", draft.constant(2), index)
    return draft.made("join", twice, draft.made("add", twice, draft.constant(1)))


def _keep(draw: Callable[..., object], draft: _Draft, value: Value) -> None:
    """A word on what the backward reads, now and then.  Inputs cannot be recomputed."""
    if value.type.dtype is Dtype.F32 and draw(st.integers(0, 3)) == 3:
        is_input = draft.builder.nodes[value.node].op == "param"
        draft.builder.keep(value.node, "save" if is_input else draw(st.sampled_from(["save", "recompute"])))


# ---- inputs ----------------------------------------------------------------------------------------------------------


# Base extents (M, N): one row, ragged against any tile, N even for the half-width values.
extents = st.tuples(st.integers(1, 5), st.sampled_from([2, 4, 6, 8]))


def fitted(epilogue: Epilogue, extents: tuple[int, ...]) -> tuple[int, int, int]:
    """The extents, or the shape of a tile, with as many more columns as the epilogue's groups ask for; and a number of
    samples."""
    step = granularity(epilogue)
    return extents[0], -(-extents[1] // step) * step, samples_of(extents[0])


def samples_of(rows: int) -> int:
    """A number of samples that divides the rows."""
    return next(samples for samples in (2, 5, 1) if rows % samples == 0)


def shape_of(what: Param | Output, extents: tuple[int, ...]) -> tuple[int, ...]:
    """The tensor shape of a parameter or output."""
    rows = (extents[0],) if what.type.kind.per_row else ()
    rows = (samples_of(extents[0]),) if what.type.kind is Kind.ROWS else rows
    columns = (int(what.type.width * extents[1]),) if what.type.width is not None else ()
    return rows + columns


def inputs_for(epilogue: Epilogue, extents: tuple[int, ...], seed: int) -> dict[str, Tensor]:
    """Fresh inputs for every parameter: float64 in [-2, 2], small integers, masks."""
    generator = torch.Generator().manual_seed(seed)
    return {p.name: _random(p, extents, generator) for p in epilogue.params}


def cotangents_for(epilogue: Epilogue, extents: tuple[int, ...], seed: int) -> dict[str, Tensor]:
    """Fresh float64 cotangents in [-2, 2] for every output that has one: not for indices."""
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    floats = [o for o in epilogue.outputs if o.type.dtype is Dtype.F32]
    return {o.name: _random(o, extents, generator) for o in floats}


def _random(what: Param | Output, extents: tuple[int, ...], generator: torch.Generator) -> Tensor:
    shape = shape_of(what, extents)
    if what.type.dtype is Dtype.I32:
        integers = torch.randint(INDEX_INPUTS[0], INDEX_INPUTS[1] + 1, shape, generator=generator)
        return integers if what.dtype == "i64" else integers.int()
    uniform = 2 * torch.rand(shape, dtype=torch.float64, generator=generator) - 1
    return uniform > 0 if what.type.dtype is Dtype.BOOL else INPUT_BOUND * uniform
