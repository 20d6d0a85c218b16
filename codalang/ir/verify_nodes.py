"""Checks the nodes of a graph, an epilogue's or a state's: operands, types, attributes, leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from codalang.errors import CodaError, CodaTypeError
from codalang.ir.epilogue import Node
from codalang.ir.infer import infer
from codalang.ir.ops import OPS
from codalang.ir.types import Dims, Dtype, Kind, ValueType

_CONSTANTS = {float: Dtype.F32, int: Dtype.I32, bool: Dtype.BOOL}


def check_nodes(nodes: Sequence[Node], params: Mapping[str, ValueType], dims: Dims) -> None:
    """Raise CodaTypeError for the first node that is not well-formed."""
    for index, node in enumerate(nodes):
        if node.op == "param":
            _check_param_node(index, node, params, dims)
        elif node.op == "const":
            _check_const_node(index, node)
        elif node.op not in OPS:
            raise _node_error(index, node, "is no op")
        else:
            _check_op_node(nodes, index, node, dims)
    _check_leaves(nodes)


def _node_error(index: int, node: Node, message: str) -> CodaError:
    return CodaTypeError(f"node {index} (`{node.op}`) {message}", node.loc)


def _check_param_node(index: int, node: Node, params: Mapping[str, ValueType], dims: Dims) -> None:
    if node.args or not isinstance(node.attr, str) or node.attr not in params:
        raise _node_error(index, node, f"names no parameter: {node.attr!r}")
    declared = params[node.attr]
    if node.type != declared:
        have, want = node.type.show(dims), declared.show(dims)
        raise _node_error(index, node, f"is {have}, but parameter `{node.attr}` is {want}")


def _check_const_node(index: int, node: Node) -> None:
    dtype = _CONSTANTS.get(type(node.attr))
    if node.args or dtype is None:
        raise _node_error(index, node, f"must hold a float, an int or a bool, got {node.attr!r}")
    if node.type != ValueType(Kind.SCALAR, None, dtype):
        raise _node_error(index, node, f"has a wrong type for {node.attr!r}")
    if type(node.attr) is int and not -(2**31) <= node.attr < 2**31:
        raise _node_error(index, node, f"does not fit in 32 bits: {node.attr!r}")


def _check_op_node(nodes: Sequence[Node], index: int, node: Node, dims: Dims) -> None:
    for arg in node.args:
        if not isinstance(arg, int) or not 0 <= arg < index:
            raise _node_error(index, node, f"has operand {arg!r}, which is no earlier node")
    inferred = infer(node.op, [nodes[a].type for a in node.args], dims, node.loc, node.attr)
    if node.type != inferred:
        have, want = node.type.show(dims), inferred.show(dims)
        raise _node_error(index, node, f"is declared {have}, but its operands make it {want}")


def _check_leaves(nodes: Sequence[Node]) -> None:
    """Each parameter and constant is one node."""
    seen: set[tuple[str, str]] = set()
    for index, node in enumerate(nodes):
        if node.op in ("param", "const"):
            key = (node.op, repr(node.attr))
            if key in seen:
                raise _node_error(index, node, f"is a second node for {node.attr!r}")
            seen.add(key)
