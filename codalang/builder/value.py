"""Values with Python's operators: each makes a node of the epilogue that is being recorded.

What Python does with a value but the language cannot (asking whether it is true, iterating over it, handing it to
numpy or torch) raises a CodaTypeError that says what to write instead.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from codalang.builder.place import Here, frames, here
from codalang.builder.recording import Recording, current, wanted
from codalang.builder.shapes import Dim, storage
from codalang.errors import CodaError, CodaLocalityError, CodaTypeError, Loc
from codalang.ir.ops import OPS
from codalang.ir.states import StateDef
from codalang.ir.types import Dtype

LOCALITY_HINT = (
    "a reduction is complete only after every tile: read it in a later epilogue, as a parameter; a factor of each row "
    "commutes with the next matmul, so apply it to that matmul's result"
)
_PARAMETER_HINT = "declare it as a parameter, such as `bias: row[N]`, and pass it at the call"
_BUILDER = "codalang.builder"

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
        _refuse_truth(self)

    def __iter__(self) -> NoReturn:
        _refuse_iteration(self)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # looked up by convention: copy, pickle, inspect
            raise AttributeError(name)
        if name in OPS and OPS[name].infix is None:
            hint = f"write `{name}(...)`, with `{name}` from {_BUILDER}"
        else:
            hint = _ATTRIBUTES.get(name, f"functions of values are in {_BUILDER}")
        raise ValueAttributeError(f"a value has no attribute `{name}`", here(), hint=hint)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: Sequence[object] = (), kwargs: object = None
    ) -> NoReturn:
        _refuse_call("torch", getattr(function, "__name__", "this"), args)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: object, **named: object) -> Value:
        """A numpy number on the left of an operator; numpy's functions are refused."""
        if method == "__call__" and ufunc.__name__ in _UFUNCS:
            left, right = (i if isinstance(i, Value) else constant_of(_unwrapped(i)) for i in inputs)
            result: Value = _UFUNCS[ufunc.__name__](left, right)
            return result
        _refuse_call("numpy", ufunc.__name__, inputs)

    def __repr__(self) -> str:
        """Its name, if it has one, and its type."""
        builder = self._recording.builder
        node = builder.nodes[self._node]
        name = repr(node.attr) if node.op == "const" else node.hint
        shown = node.type.show(builder.dims)
        return f"<{name}: {shown}>" if name else f"<{shown}>"


Operand = Value | float | int | bool


class ValueAttributeError(CodaTypeError, AttributeError):
    """A value has no such attribute."""


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
        _refuse_reduction(self)

    def __repr__(self) -> str:
        return f"<{self.spelled}({', '.join(map(repr, self.values))})>"


# From operands to nodes


def apply(op: str, *operands: object, attr: str | float | int | None = None, result: int = 0) -> Value:
    """Record an op of the table on values and numbers.

    A Python int is an index where another operand is one.  Raises CodaTypeError, at the user's line, where the
    operands do not fit.  `result` says which of the names in `a, b = ...` the result is given.
    """
    recording = wanted(f"`{OPS[op].infix or op}`")
    if op in _SYMBOLS:
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
    raise recording.located(_stranger(operand))


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
        raise _located(error)
    if kind == "dtype":
        return storage(given)
    if kind == "exponent" and isinstance(given, numbers.Real) and not isinstance(given, bool):
        return float(given)
    return int(given) if kind == "group" and isinstance(given, numbers.Integral) else given


def _check_masks(recording: Recording, op: str, operands: Sequence[object]) -> None:
    """`&` and `|` of what is no mask are most often a comparison without parentheses."""
    nodes = recording.builder.nodes
    for operand in operands:
        known = checked(recording, operand)
        if not (nodes[known._node].type.dtype is Dtype.BOOL if isinstance(known, Value) else isinstance(known, bool)):
            raise recording.located(
                CodaTypeError(
                    f"`{_SYMBOLS[op]}` combines masks, got {operand!r}",
                    hint=f"Python's `{_SYMBOLS[op]}` binds more tightly than comparisons: "
                    f"write `(a > 0) {_SYMBOLS[op]} (b > 0)`",
                )
            )


_SYMBOLS = {"and": "&", "or": "|", "floordiv": "//", "mod": "%", "divmod": "divmod", "lshift": "<<", "rshift": ">>"}


def _stranger(operand: object) -> CodaError:
    """The error for what can be no operand."""
    if isinstance(operand, Reduction):
        return _locality(operand)
    library = type(operand).__module__.partition(".")[0]
    what = f"{library}.{type(operand).__name__}" if library in ("torch", "numpy") else type(operand).__name__
    article = "an" if what[0] in "aeiou" else "a"
    if library in ("torch", "numpy"):
        return CodaTypeError(
            f"{article} {what} cannot be part of an epilogue: an epilogue is made once, for all calls",
            hint=_PARAMETER_HINT + "; a number that never changes may be written as one: `float(t)`",
        )
    if operand is None:
        return CodaTypeError(
            "expected a value, got None", hint="a function without `return` gives None; so does `store`"
        )
    if isinstance(operand, tuple | list):
        return CodaTypeError(
            f"expected a value, got {article} {what}", hint="`even, odd = split(x)` unpacks the two halves"
        )
    if isinstance(operand, Dim):
        return CodaTypeError(
            f"`{operand}` is a dimension, not a value", hint="pass what is needed of it as a `scalar` parameter"
        )
    hint = "call it" if callable(operand) and not isinstance(operand, type) else None
    return CodaTypeError(f"expected a value or a number, got {article} {what}", hint=hint)


# Refusals


def _located(error: CodaError) -> CodaError:
    recording = current()
    if recording is not None:
        return recording.located(error)
    return type(error)(error.message, here(), notes=error.notes, hint=error.hint)


_TRUTH_HINTS = {
    "and": "write `&`, with each comparison in parentheses: `(a > 0) & (b > 0)`",
    "or": "write `|`, with each comparison in parentheses: `(a > 0) | (b > 0)`",
    "not": "write `~mask`",
    "chain": "comparisons do not chain: write `(a < b) & (b < c)`",
    "max": f"this is Python's own `max`; take the one of {_BUILDER}",
    "min": f"this is Python's own `min`; take the one of {_BUILDER}",
    "in": "compare with one after the other, and combine the masks with `|`",
}


def _refuse_truth(value: Value) -> NoReturn:
    innermost = _innermost()
    test = innermost.file.test(innermost.span) if innermost.span else None
    error = CodaTypeError(
        f"{value!r} is neither true nor false: it is so for each element",
        hint=_TRUTH_HINTS.get(
            test.what if test else "", "`where(mask, a, b)` chooses for each element; masks combine with `&`, `|`, `~`"
        ),
    )
    located = _located(error)
    if test is not None:
        located.loc = innermost.file.loc(test.shown)
    raise located


def _innermost() -> Here:
    return next(frames())


def _refuse_iteration(value: Value) -> NoReturn:
    innermost = _innermost()
    test = innermost.file.test(innermost.span) if innermost.span else None
    hint = "`even, odd = split(x)` gives the even and the odd columns"
    if test is not None and test.what in ("sum", "max", "min"):
        hint = f"this is Python's own `{test.what}`; take the one of {_BUILDER}"
    raise _located(CodaTypeError(f"{value!r} cannot be unpacked or iterated over", hint=hint))


def _refuse_call(library: str, function: str, arguments: Sequence[object]) -> NoReturn:
    """A function of torch or numpy got a value."""
    for argument in arguments:
        if type(argument).__module__.partition(".")[0] in ("torch", "numpy"):
            raise _located(_stranger(argument))
    known = function in OPS and OPS[function].infix is None
    raise _located(
        CodaTypeError(
            f"{library}'s `{function}` cannot take a value of an epilogue",
            hint=f"take the `{function}` of {_BUILDER}" if known else f"functions of values are in {_BUILDER}",
        )
    )


def _locality(reduction: Reduction) -> CodaError:
    return CodaLocalityError(
        f"`{reduction.name or reduction.spelled}` is a reduction of this same epilogue",
        notes=((reduction.loc, "it is reduced here"),),
        hint=LOCALITY_HINT,
    )


def _refuse_reduction(reduction: Reduction, *_: object) -> NoReturn:
    raise _located(_locality(reduction))


def _refuse(message: str, hint: str) -> Callable[..., NoReturn]:
    def refuse(self: Value, *_: object, **__: object) -> NoReturn:
        raise _located(CodaTypeError(message.replace("{value}", repr(self)), hint=hint))

    return refuse


_INDEX_HINT = "`even, odd = split(x)` gives the even and the odd columns"
_NUMBER_HINT = f"functions of values are in {_BUILDER}, not in `math`"
_REFUSED: dict[str, tuple[str, str]] = {
    "len": ("{value} has no length", "its dimensions are symbols, bound at the call"),
    "getitem": ("values are not indexed", _INDEX_HINT),
    "setitem": ("values are not assigned to", "`where(mask, a, b)` chooses for each element"),
    "contains": ("`in` does not search in a value", "`==` compares each element"),
    "call": ("{value} is no function", "a product is written with `*`"),
    "float": ("{value} is not a Python number", _NUMBER_HINT),
    "int": ("{value} is not a Python number", _NUMBER_HINT),
    "index": ("{value} is not a Python number", _NUMBER_HINT),
    "complex": ("{value} is not a Python number", _NUMBER_HINT),
    "round": ("{value} is not a Python number", "`cast(x, bf16)` rounds to a storage dtype"),
    "array": ("{value} is no array", f"functions of values are in {_BUILDER}, not in `numpy`"),
    "matmul": ("the matmul is not written", "an epilogue's first parameter is the matmul's result"),
    "rmatmul": ("the matmul is not written", "an epilogue's first parameter is the matmul's result"),
    "rpow": ("an exponent must be a constant", "`exp2(x)` is 2 to the x, `exp(x)` e to the x"),
    "xor": ("there is no `^` of values", "`pow(x, 2)` is a power; of two masks: `(p & ~q) | (~p & q)`"),
    "rxor": ("there is no `^` of values", "`pow(x, 2)` is a power; of two masks: `(p & ~q) | (~p & q)`"),
}
for _name in ("floordiv", "mod", "divmod", "lshift", "rshift"):
    for _side in ("", "r"):
        _REFUSED[_side + _name] = (
            f"there is no `{_SYMBOLS[_name]}` of values",
            "there are `+`, `-`, `*`, `/` and `pow(x, exponent)`",
        )
for _name, (_message, _hint) in _REFUSED.items():
    setattr(Value, f"__{_name}__", _refuse(_message, _hint))
for _name in (
    *_REFUSED,
    *"add radd sub rsub mul rmul truediv rtruediv neg pos abs pow lt le gt ge eq ne and rand or ror invert".split(),
    *"bool iter torch_function array_ufunc".split(),
):
    setattr(Reduction, f"__{_name}__", _refuse_reduction)
Reduction.__torch_function__ = classmethod(lambda cls, *_: _refuse_call("torch", "this", ()))  # type: ignore
Reduction.__hash__ = object.__hash__  # type: ignore[method-assign]

_REDUCE_HINT = 'over an axis: `reduce("s", sum(x), col[M])`, whose shape says what is left'
_ATTRIBUTES = {
    "sum": _REDUCE_HINT,
    "mean": _REDUCE_HINT + "; divide by the length in a later epilogue",
    "amax": _REDUCE_HINT.replace("sum", "max"),
    "amin": _REDUCE_HINT.replace("sum", "min"),
    "chunk": _INDEX_HINT,
    "split": _INDEX_HINT,
    "shape": "its dimensions are symbols, bound at the call",
    "size": "its dimensions are symbols, bound at the call",
    "to": "`cast(x, bf16)` rounds to a storage dtype; a store's dtype is `tile[M, N].bf16`",
    "dtype": "values are f32 in registers; a store's dtype is `tile[M, N].bf16`",
    "T": "values are not transposed",
    "detach": "write `stop_gradient(x)`",
    "clamp": "write `min(max(x, low), high)`",
    "square": "write `x * x`",
}
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
