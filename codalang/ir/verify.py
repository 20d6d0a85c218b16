"""Checks any epilogue, however it was made: what the builder guarantees, and a canonical order.

What passes can be printed, parsed back to an equal epilogue, interpreted, differentiated and lowered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from codalang.errors import CodaError, CodaNameError, CodaTypeError, Loc
from codalang.ir.build import canonical
from codalang.ir.epilogue import Epilogue, Output, Param, Reduce, State, Store
from codalang.ir.names import AXES, is_name
from codalang.ir.ops import REDUCTIONS
from codalang.ir.types import (
    INTEGER_DTYPES,
    PARAM_DTYPES,
    STORAGE_DTYPES,
    WIDTHS,
    Dims,
    Dtype,
    Kind,
    register_dtype,
)
from codalang.ir.verify_nodes import check_nodes
from codalang.ir.verify_state import verify_state

_KEYWORDS: dict[type, str] = {Store: "store", Reduce: "reduce", State: "state"}


def verify(epilogue: Epilogue) -> None:
    """Raise CodaNameError or CodaTypeError for the first fault."""
    _check_name(epilogue.name, "epilogue", epilogue.loc)
    _check_dims(epilogue)
    _check_unique(epilogue.params, "parameter")
    _check_unique(epilogue.outputs, "output")
    for param in epilogue.params:
        _check_param(param, epilogue.dims)
    params = {p.name: p.type for p in epilogue.params}
    check_nodes(epilogue.nodes, params, epilogue.dims)
    if not epilogue.outputs:
        raise CodaTypeError(f"epilogue `{epilogue.name}` has no output", epilogue.loc)
    checked: set[int] = set()
    for output in epilogue.outputs:
        _check_output(epilogue, output, checked)
    _check_keeps(epilogue)
    if canonical(epilogue).nodes != epilogue.nodes:
        raise CodaTypeError(
            f"the nodes of epilogue `{epilogue.name}` are not in canonical order, or some are dead",
            epilogue.loc,
            hint="codalang.ir.build.canonical puts them in order",
        )


def _check_name(name: object, what: str, loc: Loc | None) -> None:
    if not is_name(name):
        raise CodaNameError(
            f"{name!r} cannot be the name of a {what}" if what != "epilogue" else f"{name!r} cannot name an epilogue",
            loc,
            hint="a name is made of letters, digits and _, does not begin with a digit, and is no word of the grammar",
        )


def _check_dims(epilogue: Epilogue) -> None:
    wanted = AXES[: 3 if epilogue.has_samples else 2]
    if not isinstance(epilogue.dims, tuple) or len(epilogue.dims) != len(wanted):
        raise CodaTypeError(f"dims must be the names of {' and '.join(wanted)}, got {epilogue.dims!r}", epilogue.loc)
    for dim in epilogue.dims:
        _check_name(dim, "dimension", epilogue.loc)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        if j < len(wanted) and epilogue.dims[i] == epilogue.dims[j]:
            raise CodaTypeError(f"{AXES[i]} and {AXES[j]} are both called `{epilogue.dims[i]}`", epilogue.loc)


def _check_unique(things: Iterable[Param | Output], what: str) -> None:
    seen: set[str] = set()
    for thing in things:
        _check_name(thing.name, what, thing.loc)
        if thing.name in seen:
            raise CodaNameError(f"{what} `{thing.name}` is defined twice", thing.loc)
        seen.add(thing.name)


def _check_width(thing: Param | Output, what: str, dims: Dims) -> None:
    if thing.type.width is not None and thing.type.width not in WIDTHS:
        raise CodaTypeError(f"{what} `{thing.name}` has no width that there is: {thing.type.show(dims)}", thing.loc)


def _check_dtype(thing: Param | Output, what: str, known: Sequence[str]) -> None:
    if thing.dtype is not None and thing.dtype not in known:
        raise CodaTypeError(
            f"{what} `{thing.name}` has unknown dtype {thing.dtype!r}",
            thing.loc,
            hint=f"there are {', '.join(known)}",
        )


def _check_param(param: Param, dims: Dims) -> None:
    _check_width(param, "parameter", dims)
    _check_dtype(param, "parameter", PARAM_DTYPES)
    if param.type.dtype is not register_dtype(param.dtype):
        raise CodaTypeError(
            f"parameter `{param.name}` is {param.type.show(dims)}, but declared {param.dtype or 'without a dtype'}",
            param.loc,
        )


def _check_output(epilogue: Epilogue, output: Output, checked: set[int]) -> None:
    what = _KEYWORDS[type(output)]
    _check_width(output, what, epilogue.dims)
    for value in output.values:
        if not isinstance(value, int) or not 0 <= value < len(epilogue.nodes):
            raise CodaTypeError(f"`{what} {output.name}` is of {value!r}, which is no node", output.loc)
    if output.type.kind is (Kind.ROWS if isinstance(output, Store) else Kind.TILE):
        raise CodaTypeError(f"`{what} {output.name}` cannot be {output.type.show(epilogue.dims)}", output.loc)
    if isinstance(output, State):
        if id(output.definition) not in checked:
            verify_state(output.definition)
            checked.add(id(output.definition))
        _check_state_output(epilogue, output)
    else:
        _check_float_output(epilogue, output, what)
    widths = {epilogue.nodes[v].type.width for v in output.values} | {output.type.width}
    if len(widths - {None}) > 1:
        raise _unfitting(epilogue, output, what)
    _check_dtype(output, what, INTEGER_DTYPES if output.type.dtype is Dtype.I32 else STORAGE_DTYPES)


def _check_float_output(epilogue: Epilogue, output: Store | Reduce, what: str) -> None:
    if output.type.dtype is not Dtype.F32:
        shown = output.type.show(epilogue.dims)
        raise CodaTypeError(f"{what} `{output.name}` must hold numbers, got {shown}", output.loc)
    if isinstance(output, Reduce) and output.how not in REDUCTIONS:
        raise CodaTypeError(f"unknown reduction {output.how!r}; there is {', '.join(REDUCTIONS)}", output.loc)
    value = epilogue.nodes[output.value].type
    is_store = isinstance(output, Store)
    more_rows = is_store and value.kind.has_rows and not output.type.kind.has_rows
    more_columns = is_store and value.kind.has_columns and not output.type.kind.has_columns
    if value.dtype is not Dtype.F32 or more_rows or more_columns:
        raise _unfitting(epilogue, output, what)


def _check_state_output(epilogue: Epilogue, output: State) -> None:
    definition = output.definition
    if len(output.values) != len(definition.inputs):
        raise CodaTypeError(
            f"`{definition.name}` takes {len(definition.inputs)} values, got {len(output.values)}", output.loc
        )
    if not isinstance(output.result, int) or not 0 <= output.result < len(definition.results):
        raise CodaTypeError(f"`{definition.name}` has no result {output.result!r}", output.loc)
    dtypes = [epilogue.nodes[v].type.dtype for v in output.values]
    if dtypes != [dtype for _, dtype in definition.inputs]:
        raise _unfitting(epilogue, output, "state")
    if output.type.dtype is not definition.results[output.result][1]:
        raise CodaTypeError(
            f"`state {output.name}` is declared {output.type.show(epilogue.dims)}, but result {output.result} of "
            f"`{definition.name}` is {definition.results[output.result][1].value}",
            output.loc,
        )


def _unfitting(epilogue: Epilogue, output: Output, what: str) -> CodaError:
    have = ", ".join(epilogue.nodes[v].type.show(epilogue.dims) for v in output.values)
    want = output.type.show(epilogue.dims)
    return CodaTypeError(f"`{what} {output.name}` is declared {want}, but its value is {have}", output.loc)


def _check_keeps(epilogue: Epilogue) -> None:
    last = -1
    for keep in epilogue.keeps:
        if keep.how not in ("save", "recompute"):
            raise CodaTypeError(f"a value is saved or recomputed, got {keep.how!r}", keep.loc)
        if not isinstance(keep.value, int) or not last < keep.value < len(epilogue.nodes):
            raise CodaTypeError(f"`{keep.how}` of {keep.value!r}: no node, or not in their order, once each", keep.loc)
        if epilogue.nodes[keep.value].op == "const":
            raise CodaTypeError(f"there is nothing to {keep.how}: node {keep.value} is a constant", keep.loc)
        last = keep.value
