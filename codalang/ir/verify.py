"""Checks any epilogue, however it was made: what the builder guarantees, and a canonical order.

What passes can be printed, parsed back to an equal epilogue, interpreted, differentiated and lowered.
"""

from __future__ import annotations

from collections.abc import Iterable

from codalang.errors import CodaError, CodaNameError, CodaTypeError, Loc
from codalang.ir.build import canonical
from codalang.ir.epilogue import Epilogue, Node, Output, Param, Reduce, Store
from codalang.ir.infer import infer
from codalang.ir.names import is_name
from codalang.ir.ops import OPS, REDUCTIONS
from codalang.ir.types import SCALAR, STORAGE_DTYPES, WIDTHS, Dtype, Kind, ValueType

_BOOL = ValueType(Kind.SCALAR, None, Dtype.BOOL)


def verify(epilogue: Epilogue) -> None:
    """Raise CodaNameError or CodaTypeError for the first fault."""
    _check_name(epilogue.name, "epilogue", epilogue.loc)
    _check_dims(epilogue)
    _check_unique(epilogue.params, "parameter")
    _check_unique(epilogue.outputs, "output")
    for param in epilogue.params:
        _check_declared(param, "parameter", epilogue.dims)
    params = {p.name: p for p in epilogue.params}
    for index, node in enumerate(epilogue.nodes):
        _check_node(epilogue, index, node, params)
    if not epilogue.outputs:
        raise CodaTypeError(f"epilogue `{epilogue.name}` has no output", epilogue.loc)
    for output in epilogue.outputs:
        _check_output(epilogue, output)
    _check_leaves(epilogue)
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
    if not isinstance(epilogue.dims, tuple) or len(epilogue.dims) != 2:
        raise CodaTypeError(f"dims must be the names of rows and columns, got {epilogue.dims!r}", epilogue.loc)
    for dim in epilogue.dims:
        _check_name(dim, "dimension", epilogue.loc)
    if epilogue.dims[0] == epilogue.dims[1]:
        raise CodaTypeError(f"rows and columns are both called `{epilogue.dims[0]}`", epilogue.loc)


def _check_unique(things: Iterable[Param | Output], what: str) -> None:
    seen: set[str] = set()
    for thing in things:
        _check_name(thing.name, what, thing.loc)
        if thing.name in seen:
            raise CodaNameError(f"{what} `{thing.name}` is defined twice", thing.loc)
        seen.add(thing.name)


def _check_declared(thing: Param | Output, what: str, dims: tuple[str, str]) -> None:
    """The declared type and storage dtype of something at the epilogue's border."""
    if thing.type.dtype is not Dtype.F32:
        raise CodaTypeError(f"{what} `{thing.name}` must hold numbers, got {thing.type.show(dims)}", thing.loc)
    if thing.type.width is not None and thing.type.width not in WIDTHS:
        raise CodaTypeError(f"{what} `{thing.name}` has no width that there is: {thing.type.show(dims)}", thing.loc)
    if thing.dtype is not None and thing.dtype not in STORAGE_DTYPES:
        known = ", ".join(STORAGE_DTYPES)
        raise CodaTypeError(
            f"{what} `{thing.name}` has unknown dtype {thing.dtype!r}", thing.loc, hint=f"there are {known}"
        )


def _node_error(index: int, node: Node, message: str) -> CodaError:
    return CodaTypeError(f"node {index} (`{node.op}`) {message}", node.loc)


def _check_node(epilogue: Epilogue, index: int, node: Node, params: dict[str, Param]) -> None:
    if node.op == "param":
        _check_param_node(epilogue, index, node, params)
    elif node.op == "const":
        _check_const_node(index, node)
    elif node.op not in OPS:
        raise _node_error(index, node, "is no op")
    else:
        _check_op_node(epilogue, index, node)


def _check_param_node(epilogue: Epilogue, index: int, node: Node, params: dict[str, Param]) -> None:
    if node.args or not isinstance(node.attr, str) or node.attr not in params:
        raise _node_error(index, node, f"names no parameter: {node.attr!r}")
    declared = params[node.attr].type
    if node.type != declared:
        have, want = node.type.show(epilogue.dims), declared.show(epilogue.dims)
        raise _node_error(index, node, f"is {have}, but parameter `{node.attr}` is {want}")


def _check_const_node(index: int, node: Node) -> None:
    if node.args or not isinstance(node.attr, float | bool):
        raise _node_error(index, node, f"must hold a float or a bool, got {node.attr!r}")
    if node.type != (_BOOL if isinstance(node.attr, bool) else SCALAR):
        raise _node_error(index, node, f"has a wrong type for {node.attr!r}")


def _check_op_node(epilogue: Epilogue, index: int, node: Node) -> None:
    if node.attr is not None:
        raise _node_error(index, node, f"has an attribute: {node.attr!r}")
    for arg in node.args:
        if not isinstance(arg, int) or not 0 <= arg < index:
            raise _node_error(index, node, f"has operand {arg!r}, which is no earlier node")
    inferred = infer(node.op, [epilogue.nodes[a].type for a in node.args], epilogue.dims, node.loc)
    if node.type != inferred:
        have, want = node.type.show(epilogue.dims), inferred.show(epilogue.dims)
        raise _node_error(index, node, f"is declared {have}, but its operands make it {want}")


def _check_output(epilogue: Epilogue, output: Output) -> None:
    what = "store" if isinstance(output, Store) else "reduce"
    _check_declared(output, what, epilogue.dims)
    if not isinstance(output.value, int) or not 0 <= output.value < len(epilogue.nodes):
        raise CodaTypeError(f"`{what} {output.name}` is of {output.value!r}, which is no node", output.loc)
    if (output.type.kind is Kind.TILE) != isinstance(output, Store):
        raise CodaTypeError(f"`{what} {output.name}` cannot be {output.type.show(epilogue.dims)}", output.loc)
    if isinstance(output, Reduce) and output.how not in REDUCTIONS:
        raise CodaTypeError(f"unknown reduction {output.how!r}; there is {', '.join(REDUCTIONS)}", output.loc)
    value = epilogue.nodes[output.value].type
    widths = {w for w in (output.type.width, value.width) if w is not None}
    if value.dtype is not Dtype.F32 or len(widths) > 1:
        have, want = value.show(epilogue.dims), output.type.show(epilogue.dims)
        raise CodaTypeError(f"`{what} {output.name}` is declared {want}, but its value is {have}", output.loc)


def _check_leaves(epilogue: Epilogue) -> None:
    """Each parameter and constant is one node."""
    seen: set[tuple[str, str]] = set()
    for index, node in enumerate(epilogue.nodes):
        if node.op in ("param", "const"):
            key = (node.op, repr(node.attr))
            if key in seen:
                raise _node_error(index, node, f"is a second node for {node.attr!r}")
            seen.add(key)
