"""Stateful transforms as Python classes.

    @codalang.state
    class logsumexp:
        m: float = -inf                  # carried values with their initial ones: float, or int for an index
        s: float = 0

        def update(self, x):             # the carried values, then what is folded: a number, or `i: int`
            top = max(self.m, x)
            shift = where(top == -inf, 0, top)
            return top, self.s * exp(self.m - shift) + exp(x - shift)

        def merge(self, other):          # the carried values of two parts
            top = max(self.m, other.m)
            shift = where(top == -inf, 0, top)
            return top, self.s * exp(self.m - shift) + other.s * exp(other.m - shift)

        def finalize(self):              # the results by name
            return {"lse": self.m + log(self.s)}

        def vjp(x, lse, d_lse):          # any of the inputs, the results and their cotangents, by name; may be left out
            return d_lse * exp(x - lse)

The class is never instantiated: each function runs once on symbols, as an epilogue's does.  `logsumexp(x)` is then
what `state("lse", logsumexp(x), col[M])` takes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, NoReturn

import attrs

from codalang.builder import place
from codalang.builder.definition import Definition, check_function, parameters, run
from codalang.builder.recording import Recording, recorded, wanted
from codalang.builder.value import Operand, Reduction, Value, checked, node_of
from codalang.errors import CodaError, CodaNameError, CodaTypeError, Loc
from codalang.ir.build import function_of
from codalang.ir.builtin_states import BUILTIN_STATES
from codalang.ir.names import is_name
from codalang.ir.states import Function, Named, StateDef
from codalang.ir.types import Dtype, Kind, ValueType

_PARTS = ("update", "merge", "finalize", "vjp")
_DTYPES: dict[object, Dtype] = {float: Dtype.F32, "f32": Dtype.F32, int: Dtype.I32, "i32": Dtype.I32}


@attrs.frozen
class Transform:
    """A stateful transform as a function of values: what `state(names, transform(x), shape)` takes."""

    definition: StateDef

    def __call__(self, *values: Operand) -> Reduction:
        """The transform of values.  Raises CodaTypeError where there are too many or too few."""
        recording = wanted(f"`{self.definition.name}`")
        names = [name for name, _ in self.definition.inputs]
        if len(values) != len(names):
            raise recording.located(
                CodaTypeError(
                    f"`{self.definition.name}` takes {len(names)} values ({', '.join(names)}), got {len(values)}"
                )
            )
        given = tuple(checked(recording, value) for value in values)
        return Reduction(self.definition, given, recording.chain()[0].loc)

    def __repr__(self) -> str:
        return f"<codalang state {self.definition.name}>"


BUILTINS: dict[str, Transform] = {name: Transform(definition) for name, definition in BUILTIN_STATES.items()}


class Carried:
    """The carried values, as attributes: what `self` is in a state's functions."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CodaNameError(
            f"there is no carried value `{name}`", place.here(), hint=f"there are {', '.join(vars(self))}"
        )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise CodaTypeError(
            "carried values are not assigned to",
            place.here(),
            hint="return the new ones, in the order of their declarations",
        )


def define(cls: type, name: str | None = None) -> Transform:
    """The transform that a class means, under its name or another; see the module's docstring.

    Raises CodaTypeError or CodaNameError at the line of Python that is wrong.
    """
    loc = place.here()  # forgets what is known of files, too
    if not isinstance(cls, type):
        raise CodaTypeError(f"a state is made of a class, got {cls!r}", loc, hint="write it with `class`")
    name = cls.__name__ if name is None else name
    if not is_name(name):
        raise CodaNameError(f"{name!r} cannot name a state", loc)
    parts = _functions(cls, loc)
    fields = _carried(cls, loc)
    carried = tuple((name, dtype) for name, dtype, _ in fields)
    inputs = _inputs(parts["update"])
    _check_distinct(carried + inputs, parts["update"])
    _count(parts["merge"], 2, "the carried values of two parts")
    _count(parts["finalize"], 1, "the carried values")
    record = functools.partial(_record, name)
    new = _in_order("carried value", carried)

    def update_arguments(values: dict[str, Value]) -> tuple[Any, ...]:
        return (Carried({name: values[name] for name, _ in carried}), *(values[name] for name, _ in inputs))

    def merge_arguments(values: dict[str, Value]) -> tuple[Any, ...]:
        return tuple(Carried({name: values[f"{side}_{name}"] for name, _ in carried}) for side in "ab")

    update, _ = record(parts["update"], carried + inputs, update_arguments, new)
    both = tuple((f"{side}_{name}", dtype) for side in "ab" for name, dtype in carried)
    merge, _ = record(parts["merge"], both, merge_arguments, new)
    names: list[str] = []
    finalize, dtypes = record(parts["finalize"], carried, lambda values: (Carried(values),), _by_name(names))
    results = tuple(zip(names, dtypes, strict=True))
    seen = inputs + results + tuple((f"d_{name}", dtype) for name, dtype in results if dtype is Dtype.F32)
    _check_distinct(seen, parts["finalize"])
    vjp = None
    if "vjp" in parts:
        asked = _known_parameters(parts["vjp"], [name for name, _ in seen])
        cotangents = tuple((name, dtype) for name, dtype in inputs if dtype is Dtype.F32)
        vjp, _ = record(
            parts["vjp"],
            seen,
            lambda values: tuple(values[name] for name in asked),
            _in_order("float input", cotangents),
        )
    initial = tuple(value for _, _, value in fields)
    return Transform(StateDef(name, inputs, carried, initial, update, merge, finalize, results, vjp, loc))


# The class


def _functions(cls: type, loc: Loc) -> dict[str, FunctionType]:
    found: dict[str, FunctionType] = {}
    for name, part in vars(cls).items():
        function: Any = part.__func__ if isinstance(part, staticmethod) else part
        if name.startswith("__") and name.endswith("__"):
            continue
        if name in _PARTS:
            check_function(function)
            found[name] = function
        elif isinstance(function, FunctionType):
            place_ = Definition(function).name
            raise CodaNameError(f"a state has no `{name}`", place_, hint=f"it has {', '.join(_PARTS)}")
        elif name not in inspect.get_annotations(cls):
            raise CodaTypeError(
                f"`{name}` of state `{cls.__name__}` has no dtype",
                loc,
                hint=f"write `{name}: float = ...`, or `int` for an index",
            )
    missing = [name for name in _PARTS[:-1] if name not in found]
    if missing:
        raise CodaTypeError(f"state `{cls.__name__}` has no `{missing[0]}`", loc, hint=f"it has {', '.join(_PARTS)}")
    return found


def _carried(cls: type, loc: Loc) -> list[tuple[str, Dtype, float | int]]:
    fields = []
    for name, annotation in inspect.get_annotations(cls).items():
        dtype = _dtype(annotation)
        initial = vars(cls).get(name)
        if not is_name(name):
            raise CodaNameError(f"{name!r} cannot be the name of a carried value", loc)
        if dtype is None:
            raise CodaTypeError(f"`{name}` must be float or int, got {annotation!r}", loc)
        fits = isinstance(initial, int | float) and not isinstance(initial, bool)
        if not fits or (dtype is Dtype.I32 and not isinstance(initial, int)):
            shown = "nothing" if name not in vars(cls) else repr(initial)
            raise CodaTypeError(
                f"`{name}` must begin with {'an int' if dtype is Dtype.I32 else 'a number'}, got {shown}",
                loc,
                hint="it begins with the value that merging leaves alone, such as 0 for a sum",
            )
        assert isinstance(initial, int | float)
        fields.append((name, dtype, initial if dtype is Dtype.I32 else float(initial)))
    if not fields:
        raise CodaTypeError(f"state `{cls.__name__}` carries nothing", loc, hint="write `s: float = 0` in the class")
    return fields


def _dtype(annotation: object) -> Dtype | None:
    text = annotation.rpartition(".")[2] if isinstance(annotation, str) else getattr(annotation, "__name__", annotation)
    return _DTYPES.get({"float": float, "int": int}.get(text, text) if isinstance(text, str) else text)


def _inputs(update: FunctionType) -> Named:
    """What is folded: the parameters of `update` after the carried values."""
    annotations = inspect.get_annotations(update)
    _, *folded = parameters(update).items() or [("", Definition(update).name)]
    if not folded:
        raise CodaTypeError("`update` takes the carried values, and at least one value", Definition(update).name)
    inputs = []
    for name, loc in folded:
        dtype = _dtype(annotations.get(name, float))
        if dtype is None:
            raise CodaTypeError(f"`{name}` must be float or int, got {annotations[name]!r}", loc)
        inputs.append((name, dtype))
    return tuple(inputs)


def _count(function: FunctionType, wanted_: int, what: str) -> None:
    have = len(parameters(function))
    if have != wanted_:
        raise CodaTypeError(
            f"`{function.__name__}` takes {what}, got {have} parameter{'' if have == 1 else 's'}",
            Definition(function).name,
        )


def _known_parameters(vjp: FunctionType, known: Sequence[str]) -> list[str]:
    names = parameters(vjp)
    for name, loc in names.items():
        if name not in known:
            raise CodaNameError(f"`vjp` cannot have `{name}`", loc, hint=f"it may have {', '.join(known)}")
    return list(names)


def _check_distinct(things: Named, function: FunctionType) -> None:
    names = [name for name, _ in things]
    for name in names:
        if names.count(name) > 1:
            raise CodaNameError(f"`{name}` means two things", Definition(function).name, hint="rename one of them")


# Its functions


def _record(
    state: str,
    function: FunctionType,
    params: Named,
    arguments: Callable[[dict[str, Value]], tuple[Any, ...]],
    results: Callable[[Recording, object, Loc], list[int]],
) -> tuple[Function, list[Dtype]]:
    """The function of scalars that a Python function computes, and its results' dtypes."""
    loc = Definition(function).name
    recording = Recording("state", f"{state}.{function.__name__}", function.__code__, loc)
    with recorded(recording):
        values = {
            name: Value(recording, recording.builder.param(name, ValueType(Kind.SCALAR, None, dtype)))
            for name, dtype in params
        }
        returned = run(function, arguments(values), recording)
        nodes = results(recording, returned, loc)
    dtypes = [recording.builder.nodes[node].type.dtype for node in nodes]
    return function_of(recording.builder, params, nodes), dtypes


def _in_order(what: str, wanted_: Named) -> Callable[[Recording, object, Loc], list[int]]:
    """Reads what a function returns: one value for each of these."""

    def read(recording: Recording, returned: object, loc: Loc) -> list[int]:
        given = list(returned) if isinstance(returned, tuple | list) else [returned]
        names = ", ".join(name for name, _ in wanted_)
        if len(given) != len(wanted_) or any(value is None for value in given):
            got = "nothing" if returned is None else f"{len(given)} value{'' if len(given) == 1 else 's'}"
            raise CodaTypeError(f"`{recording.name}` must return one value for each {what} ({names}), got {got}", loc)
        return [
            _result(recording, name, value, dtype, loc) for (name, dtype), value in zip(wanted_, given, strict=True)
        ]

    return read


def _by_name(names: list[str]) -> Callable[[Recording, object, Loc], list[int]]:
    """Reads what `finalize` returns: a dict of the results, whose names go to `names`."""

    def read(recording: Recording, returned: object, loc: Loc) -> list[int]:
        if not isinstance(returned, dict) or not returned:
            raise CodaTypeError(
                f"`{recording.name}` must return a dict of its results",
                loc,
                hint='such as `return {"mean": self.total / self.count}`',
            )
        for name in returned:
            if not is_name(name):
                raise CodaNameError(f"{name!r} cannot be the name of a result", loc)
        names.extend(returned)
        return [_result(recording, name, value, None, loc) for name, value in returned.items()]

    return read


def _result(recording: Recording, name: str, value: object, dtype: Dtype | None, loc: Loc) -> int:
    try:
        node = node_of(recording, value, dtype or Dtype.F32)
    except CodaError as error:
        raise type(error)(error.message, loc, hint=error.hint) from None
    have = recording.builder.nodes[node].type.dtype
    if have is not (dtype or have) or have is Dtype.BOOL:
        want = dtype.value if dtype else "a number"
        raise CodaTypeError(f"`{recording.name}` must return {want} for `{name}`, got {have.value}", loc)
    return node
