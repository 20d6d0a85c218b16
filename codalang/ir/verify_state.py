"""Checks the definition of a state, however it was made."""

from __future__ import annotations

from collections.abc import Sequence

from codalang.errors import CodaError, CodaNameError, CodaTypeError
from codalang.ir.build import postorder
from codalang.ir.names import is_name
from codalang.ir.states import Function, Named, StateDef
from codalang.ir.types import Dtype, Kind, ValueType
from codalang.ir.verify_nodes import check_nodes

_DIMS = ("M", "N")


def verify_state(definition: StateDef) -> None:
    """Raise CodaNameError or CodaTypeError for the first fault."""
    d = definition
    if not is_name(d.name):
        raise CodaNameError(f"{d.name!r} cannot name a state", d.loc)
    for what, named in (("input", d.inputs), ("carried value", d.carried), ("result", d.results)):
        _check_names(d, what, named)
    _check_distinct(d, d.inputs + d.carried)
    _check_distinct(d, d.inputs + d.results)
    for what, named in (("carried value", d.carried), ("result", d.results)):
        for name, dtype in named:
            if dtype is Dtype.BOOL:
                raise _error(d, f"{what} `{name}` cannot be a mask")
    _check_initial(d)
    parts = tuple((f"{side}_{name}", dtype) for side in "ab" for name, dtype in d.carried)
    _check_function(d, "update", d.update, d.carried + d.inputs, d.carried)
    _check_function(d, "merge", d.merge, parts, d.carried)
    _check_function(d, "finalize", d.finalize, d.carried, d.results)
    if d.vjp is not None:
        cotangents = tuple((f"d_{name}", dtype) for name, dtype in d.results if dtype is Dtype.F32)
        floats = tuple(i for i in d.inputs if i[1] is Dtype.F32)
        _check_function(d, "vjp", d.vjp, d.inputs + d.results + cotangents, floats)


def _error(definition: StateDef, message: str) -> CodaError:
    return CodaTypeError(f"state `{definition.name}`: {message}", definition.loc)


def _check_names(definition: StateDef, what: str, named: Named) -> None:
    if not named:
        raise _error(definition, f"it has no {what}")
    for name, dtype in named:
        if not is_name(name):
            raise CodaNameError(f"{name!r} cannot be the name of a {what} of state `{definition.name}`", definition.loc)
        if not isinstance(dtype, Dtype):
            raise _error(definition, f"{what} `{name}` has no register dtype: {dtype!r}")


def _check_distinct(definition: StateDef, named: Named) -> None:
    seen: set[str] = set()
    for name, _ in named:
        if name in seen:
            raise CodaNameError(f"`{name}` is defined twice in state `{definition.name}`", definition.loc)
        seen.add(name)


def _check_initial(definition: StateDef) -> None:
    if len(definition.initial) != len(definition.carried):
        raise _error(
            definition, f"{len(definition.carried)} values are carried from {len(definition.initial)} initial ones"
        )
    for (name, dtype), value in zip(definition.carried, definition.initial, strict=True):
        fits = type(value) is int and -(2**31) <= value < 2**31 if dtype is Dtype.I32 else type(value) is float
        if not fits:
            raise _error(definition, f"`{name}` cannot start from {value!r}: it is {dtype.value}")


def _check_function(definition: StateDef, what: str, function: Function, params: Named, results: Named) -> None:
    if function.params != params:
        raise _error(definition, f"`{what}` must have the parameters {_show(params)}, has {_show(function.params)}")
    _check_distinct(definition, function.params)
    check_nodes(function.nodes, {n: ValueType(Kind.SCALAR, None, dtype) for n, dtype in params}, _DIMS)
    for node in function.nodes:
        if node.type.kind is not Kind.SCALAR:
            raise _error(definition, f"`{what}` has a value that is no scalar: `{node.op}` is {node.type.show(_DIMS)}")
    if len(function.results) != len(results):
        raise _error(definition, f"`{what}` has {len(function.results)} results, must have {len(results)}")
    for (name, dtype), index in zip(results, function.results, strict=True):
        if not isinstance(index, int) or not 0 <= index < len(function.nodes):
            raise _error(definition, f"`{what}` has the result {index!r}, which is no node")
        if function.nodes[index].type.dtype is not dtype:
            have = function.nodes[index].type.dtype.value
            raise _error(definition, f"`{what}` makes `{name}` {have}, must be {dtype.value}")
    if postorder(function.nodes, function.results) != list(range(len(function.nodes))):
        raise _error(definition, f"the nodes of `{what}` are not in canonical order, or some are dead")


def _show(named: Sequence[tuple[str, Dtype]]) -> str:
    return f"({', '.join(f'{name}: {dtype.value}' for name, dtype in named)})"
