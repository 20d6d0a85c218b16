"""Values with Python's operators: each makes a node of the epilogue that is being recorded.

What Python does with a value but the language cannot is refused (refuse.py).
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from codalang.builder import refuse
from codalang.builder.recording import Recording, wanted
from codalang.builder.shapes import storage
from codalang.errors import CodaError, CodaTypeError, Loc
from codalang.ir.ops import OPS
from codalang.ir.states import StateDef
from codalang.ir.types import Dtype

Number = float | int | bool


class Value:
    """A value of an epilogue: every element of a tile, row, col or scalar at once."""

    __slots__ = ("_node", "_recording")

    def __init__(self, recording: Recording, node: int) -> None:
        self._recording = recording
        self._node = node

    # Arithmetic

    def __add__(self, other: Operand) -> Value:
        return apply("add", self, other)

    def __radd__(self, other: Operand) -> Value:
        return apply("add", other, self)

    def __sub__(self, other: Operand) -> Value:
        return apply("sub", self, other)

    def __rsub__(self, other: Operand) -> Value:
        return apply("sub", other, self)

    def __mul__(self, other: Operand) -> Value:
        return apply("mul", self, other)

    def __rmul__(self, other: Operand) -> Value:
        return apply("mul", other, self)

    def __truediv__(self, other: Operand) -> Value:
        return apply("div", self, other)

    def __rtruediv__(self, other: Operand) -> Value:
        return apply("div", other, self)

    def __neg__(self) -> Value:
        return apply("neg", self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return apply("abs", self)

    def __pow__(self, exponent: float) -> Value:
        return apply("pow", self, attr=attribute("pow", exponent))

    # Comparisons and masks

    def __lt__(self, other: Operand) -> Value:
        return apply("lt", self, other)

    def __le__(self, other: Operand) -> Value:
        return apply("le", self, other)

    def __gt__(self, other: Operand) -> Value:
        return apply("gt", self, other)

    def __ge__(self, other: Operand) -> Value:
        return apply("ge", self, other)

    def __eq__(self, other: Operand) -> Value:  # type: ignore[override]
        return apply("eq", self, other)

    def __ne__(self, other: Operand) -> Value:  # type: ignore[override]
        return apply("ne", self, other)

    def __and__(self, other: Operand) -> Value:
        return apply("and", self, other)

    def __rand__(self, other: Operand) -> Value:
        return apply("and", other, self)

    def __or__(self, other: Operand) -> Value:
        return apply("or", self, other)

    def __ror__(self, other: Operand) -> Value:
        return apply("or", other, self)

    def __invert__(self) -> Value:
        return apply("not", self)

    __hash__ = object.__hash__

    # What Python would do, and the language cannot

    def __bool__(self) -> NoReturn:
        refuse.truth(self)

    def __iter__(self) -> NoReturn:
        refuse.iteration(self)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # looked up by convention: copy, pickle, inspect
            raise AttributeError(name)
        refuse.attribute(name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: Sequence[object] = (), kwargs: object = None
    ) -> NoReturn:
        refuse.call("torch", getattr(function, "__name__", "this"), args)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: object, **named: object) -> Value:
        """A numpy number on the left of an operator; numpy's functions are refused."""
        if method == "__call__" and ufunc.__name__ in _UFUNCS:
            left, right = (i if isinstance(i, Value) else constant_of(_unwrapped(i)) for i in inputs)
            result: Value = _UFUNCS[ufunc.__name__](left, right)
            return result
        refuse.call("numpy", ufunc.__name__, inputs)

    def __repr__(self) -> str:
        """Its name, if it has one, and its type."""
        builder = self._recording.builder
        node = builder.nodes[self._node]
        name = repr(node.attr) if node.op == "const" else node.hint
        shown = node.type.show(builder.dims)
        return f"<{name}: {shown}>" if name else f"<{shown}>"


Operand = Value | float | int | bool


_UFUNCS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "true_divide": operator.truediv,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
}
for _name in refuse.METHODS:
    setattr(Value, f"__{_name}__", refuse.method(_name))


class Reduction:
    """`sum(x)`, `max(x)`, `min(x)` or a stateful transform: what `reduce` and `state` take, and nothing else."""

    __slots__ = ("how", "loc", "name", "values")

    def __init__(self, how: str | StateDef, values: tuple[Operand, ...], loc: Loc) -> None:
        self.how = how
        self.values = values
        self.loc = loc
        self.name: str | None = None  # the output that it is

    @property
    def spelled(self) -> str:
        """Its function's name."""
        return self.how if isinstance(self.how, str) else self.how.name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        raise refuse.located(refuse.locality(self.name or self.spelled, self.loc))

    @classmethod
    def __torch_function__(cls, function: Any, *_: object) -> NoReturn:
        refuse.call("torch", getattr(function, "__name__", "this"), ())

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<{self.spelled}({', '.join(map(repr, self.values))})>"


_OPERATORS = (
    "add sub mul truediv radd rsub rmul rtruediv neg pos abs pow lt le gt ge eq ne and rand or ror invert".split()
)
for _name in (*refuse.METHODS, *_OPERATORS, "bool", "iter", "array_ufunc"):
    setattr(Reduction, f"__{_name}__", Reduction._refuse)


# From operands to nodes


def apply(op: str, *operands: object, attr: str | float | int | None = None, result: int = 0) -> Value:
    """Record an op of the table on values and numbers.

    A Python int is an index where another operand is one.  Raises CodaTypeError, at the user's line, where the
    operands do not fit.  `result` says which of the names in `a, b = ...` the result is given.
    """
    recording = wanted(f"`{OPS[op].infix or op}`")
    if op in ("and", "or"):
        _check_masks(recording, op, operands)
    return Value(recording, recording.op(op, *nodes_of(recording, operands), attr=attr, result=result))


def nodes_of(recording: Recording, operands: Sequence[object]) -> list[int]:
    """The nodes of values and numbers."""
    values = [checked(recording, operand) for operand in operands]
    nodes = recording.builder.nodes
    indices = any(isinstance(v, Value) and nodes[v._node].type.dtype is Dtype.I32 for v in values)
    return [node_of(recording, v, Dtype.I32 if indices else Dtype.F32) for v in values]


def node_of(recording: Recording, operand: object, dtype: Dtype = Dtype.F32) -> int:
    """The node of a value or a number.  `dtype` is what a Python int is to be."""
    value = checked(recording, operand)
    if isinstance(value, Value):
        return value._node
    loc = recording.chain()[-1].loc
    try:
        if dtype is Dtype.I32 and isinstance(value, int) and not isinstance(value, bool):
            return recording.builder.integer(value, loc)
        return recording.builder.const(value if isinstance(value, bool) else float(value), loc)
    except CodaError as error:
        raise recording.located(error) from None
    except OverflowError:
        raise recording.located(CodaTypeError("this number is too large")) from None


def checked(recording: Recording, operand: object) -> Value | Number:
    """A value of this recording, or a number.  Raises CodaTypeError for anything else."""
    if isinstance(operand, Value):
        if operand._recording is not recording:
            other = operand._recording
            raise recording.located(
                CodaTypeError(
                    f"{operand!r} is a value of {other.what} `{other.name}`, not of `{recording.name}`",
                    hint="a value lives in the call of the function that made it",
                )
            )
        return operand
    if isinstance(operand, bool | int | float):
        return operand
    if isinstance(operand, numbers.Integral):
        return int(operand)
    if isinstance(operand, numbers.Real):
        return float(operand)
    if _is_numpy_number(operand):
        return checked(recording, operand.item())  # type: ignore[attr-defined]
    if isinstance(operand, Reduction):
        operand._refuse()
    raise recording.located(refuse.stranger(operand))


def _is_numpy_number(operand: object) -> bool:
    return type(operand).__module__ == "numpy" and hasattr(operand, "item") and not hasattr(operand, "__len__")


def _unwrapped(operand: object) -> object:
    """Numpy makes arrays without axes of the numbers that it compares."""
    return operand.item() if getattr(operand, "shape", None) == () else operand  # type: ignore[attr-defined]


def constant_of(number: object, dtype: Dtype = Dtype.F32) -> Value:
    """A number as a value.  `dtype` is what a Python int is to be."""
    recording = wanted("a value")
    return Value(recording, node_of(recording, number, dtype))


def name_of(value: Value) -> str | None:
    """The name that the user gave a value, if any."""
    return value._recording.builder.nodes[value._node].hint


def attribute(op: str, given: object) -> Any:
    """The static attribute of an op, from what the user gives.  Raises CodaTypeError for what is no constant."""
    kind = OPS[op].attr
    if isinstance(given, Value):
        what = {"exponent": "exponent", "group": "group size"}.get(kind or "", "dtype")
        error = CodaTypeError(
            f"the {what} of `{op}` must be a constant, got {given!r}",
            hint="write `exp(p * log(x))` for a power with another exponent" if kind == "exponent" else None,
        )
        raise refuse.located(error)
    if kind == "dtype":
        return storage(given)
    if kind == "exponent" and isinstance(given, numbers.Real) and not isinstance(given, bool):
        return float(given)
    return int(given) if kind == "group" and isinstance(given, numbers.Integral) else given


def _check_masks(recording: Recording, op: str, operands: Sequence[object]) -> None:
    nodes = recording.builder.nodes
    for operand in operands:
        known = checked(recording, operand)
        if not (nodes[known._node].type.dtype is Dtype.BOOL if isinstance(known, Value) else isinstance(known, bool)):
            raise recording.located(refuse.no_mask({"and": "&", "or": "|"}[op], operand))
