"""The expressions that derivatives are written in: a graph that keeps one node per distinct value.

`Graph` holds the forward's nodes and those that the rules add.  A node that exists is found again instead of made
twice, so common subexpressions share by construction.  Arithmetic goes through small simplifications, each exact for
NaN and infinities (there is no x*0 -> 0), so that what comes out reads as if written by hand:

    0 + x -> x      x + x -> 2*x      x + -y -> x - y      1*x -> x      x * (2*y) -> 2 * (x*y)      --x -> x

In a product the constant factor is kept outermost (`2 * (x*y)`), where further constants meet it.

`Expr` is a node together with the *domain* it is a function of; operators are overloaded on it.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import attrs

from codalang.ir.epilogue import Epilogue, Node
from codalang.ir.infer import infer
from codalang.ir.types import SCALAR, Dims, Dtype, Kind, ValueType

Attribute = str | float | int | None


class Graph:
    """Nodes by index, operands before users, each distinct one once."""

    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        self.nodes: list[Node] = []
        self._index: dict[tuple[object, ...], int] = {}

    def add(self, node: Node) -> int:
        """The index of a node, which is added where the graph has none like it."""
        # The type follows from these; repr separates 0.0 from -0.0 and True from 1.0, and makes nan equal itself.
        key = (node.op, node.args, repr(node.attr) if node.attr is not None else None)
        if key not in self._index:
            self._index[key] = len(self.nodes)
            self.nodes.append(node)
        return self._index[key]

    def add_epilogue(self, epilogue: Epilogue) -> list[int]:
        """Add an epilogue's nodes as they stand.  Returns the index of each."""
        indices: list[int] = []
        for node in epilogue.nodes:
            indices.append(self.add(attrs.evolve(node, args=tuple(indices[a] for a in node.args))))
        return indices

    def param(self, name: str, type: ValueType) -> int:
        """A parameter."""
        return self.add(Node("param", (), type, name, hint=name))

    def const(self, value: float) -> int:
        """A number."""
        return self.add(Node("const", (), SCALAR, float(value)))

    def integer(self, value: int) -> int:
        """An index."""
        return self.add(Node("const", (), ValueType(Kind.SCALAR, None, Dtype.I32), value))

    def op(self, op: str, *args: int, attr: Attribute = None) -> int:
        """The simplest node that equals an op of the table, with its attribute, applied to `args`."""
        counts = any(self.nodes[a].type.dtype is Dtype.I32 for a in args)
        simpler = _SIMPLIFY[op](self, *args) if op in _SIMPLIFY and not counts else None
        return self.plain(op, *args, attr=attr) if simpler is None else simpler

    def plain(self, op: str, *args: int, attr: Attribute = None) -> int:
        """An op of the table applied to `args`, as it stands."""
        return self.add(Node(op, args, infer(op, [self.nodes[a].type for a in args], self.dims, attr=attr), attr))

    def hint(self, index: int, name: str) -> None:
        """Name a node that has no name yet."""
        node = self.nodes[index]
        if node.hint is None and node.args:
            self.nodes[index] = attrs.evolve(node, hint=name)

    def number(self, index: int) -> float | None:
        """The value of a constant, or None for any other node."""
        node = self.nodes[index]
        return node.attr if node.op == "const" and isinstance(node.attr, float) else None

    def factor(self, index: int) -> tuple[float, int | None]:
        """A node as `constant * rest`; the rest of a constant is None."""
        node = self.nodes[index]
        number = self.number(index)
        if number is not None:
            return number, None
        if node.op == "neg":
            return -1.0, node.args[0]
        if node.op == "mul":
            coefficient = self.number(node.args[0])
            if coefficient is not None:
                return coefficient, node.args[1]
        return 1.0, index

    def scaled(self, coefficient: float, rest: int | None) -> int:
        """`coefficient * rest` for a rest without a constant factor."""
        if rest is None:
            return self.const(coefficient)
        if coefficient == 1.0:
            return rest
        if coefficient == -1.0:
            return self.add(Node("neg", (rest,), self.nodes[rest].type))
        return self.add(Node("mul", (self.const(coefficient), rest), self.nodes[rest].type))


# ---- simplifications: op -> the simpler node, or None ----------------------------------------------------------------
#
# On floats only.  Each looks one level deep and ends in a `plain` node: a forward may hold a chain of any length, and
# none is walked.


def _add(graph: Graph, a: int, b: int) -> int | None:
    x, y = graph.number(a), graph.number(b)
    if x is not None and y is not None:
        return graph.const(x + y)
    if x == 0.0:
        return b
    if y == 0.0:
        return a
    if a == b:
        return graph.op("mul", graph.const(2.0), a)
    coefficient, rest = graph.factor(b)
    if coefficient < 0 and rest is not None:
        return graph.plain("sub", a, graph.scaled(-coefficient, rest))
    if graph.nodes[a].op == "neg":
        return graph.plain("sub", b, graph.nodes[a].args[0])
    return None


def _sub(graph: Graph, a: int, b: int) -> int | None:
    x, y = graph.number(a), graph.number(b)
    if x is not None and y is not None:
        return graph.const(x - y)
    if y == 0.0:
        return a
    if x == 0.0:
        return graph.op("neg", b)
    coefficient, rest = graph.factor(b)
    if coefficient < 0 and rest is not None:
        return graph.plain("add", a, graph.scaled(-coefficient, rest))
    return None


def _mul(graph: Graph, a: int, b: int) -> int | None:
    (x, p), (y, q) = graph.factor(a), graph.factor(b)
    if p is None or q is None:
        return graph.scaled(x * y, p if q is None else q)
    if x == 1.0 and y == 1.0:
        return None
    return graph.scaled(x * y, graph.plain("mul", p, q))


def _div(graph: Graph, a: int, b: int) -> int | None:
    if graph.number(b) == 1.0:
        return a
    coefficient, rest = graph.factor(a)
    if coefficient == -1.0 and rest is not None:
        return graph.scaled(-1.0, graph.plain("div", rest, b))
    return None


def _neg(graph: Graph, a: int) -> int | None:
    coefficient, rest = graph.factor(a)
    if coefficient != 1.0 or rest is None:
        return graph.scaled(-coefficient, rest)
    node = graph.nodes[a]
    return graph.plain("sub", node.args[1], node.args[0]) if node.op == "sub" else None


def _half(position: int) -> Callable[[Graph, int], int | None]:
    def pick(graph: Graph, a: int) -> int | None:
        node = graph.nodes[a]
        if node.op != "join":
            return None
        # One that gets its columns from the other half keeps them.
        half = node.args[position]
        return half if graph.nodes[half].type.width is not None else None

    return pick


def _join(graph: Graph, a: int, b: int) -> int | None:
    even, odd = graph.nodes[a], graph.nodes[b]
    return even.args[0] if even.op == "even" and odd.op == "odd" and even.args == odd.args else None


_SIMPLIFY: dict[str, Callable[..., int | None]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "even": _half(0),
    "odd": _half(1),
    "join": _join,
}


# ---- expressions ----------------------------------------------------------------------------------------------------
@attrs.frozen
class Expr:
    """A node as a function on a domain of `width * N` columns.

    `width` is the node's own where it has columns.  A value without columns is constant along those of its domain;
    a forward value without columns takes the domain of what it is combined with, hence None.
    """

    graph: Graph = attrs.field(repr=False)
    node: int
    width: Fraction | None

    @property
    def is_zero(self) -> bool:
        """True for the constant 0."""
        return self.graph.number(self.node) == 0.0

    @property
    def type(self) -> ValueType:
        """The node's type."""
        return self.graph.nodes[self.node].type

    @property
    def attr(self) -> Attribute:
        """The node's attribute."""
        return self.graph.nodes[self.node].attr

    @property
    def has_columns(self) -> bool:
        """True where the value differs from column to column."""
        return self.type.width is not None

    def __add__(self, other: Operand) -> Expr:
        return apply("add", self, other)

    def __radd__(self, other: Operand) -> Expr:
        return apply("add", other, self)

    def __sub__(self, other: Operand) -> Expr:
        return apply("sub", self, other)

    def __rsub__(self, other: Operand) -> Expr:
        return apply("sub", other, self)

    def __mul__(self, other: Operand) -> Expr:
        return apply("mul", self, other)

    def __rmul__(self, other: Operand) -> Expr:
        return apply("mul", other, self)

    def __truediv__(self, other: Operand) -> Expr:
        return apply("div", self, other)

    def __rtruediv__(self, other: Operand) -> Expr:
        return apply("div", other, self)

    def __neg__(self) -> Expr:
        return apply("neg", self)


Operand = Expr | float | int  # a float is a number, an int an index


def expr(graph: Graph, node: int) -> Expr:
    """A forward value."""
    return Expr(graph, node, graph.nodes[node].type.width)


def apply(op: str, *operands: Operand, attr: Attribute = None) -> Expr:
    """An op on expressions and numbers, at least one of them an expression."""
    graph = next(o.graph for o in operands if isinstance(o, Expr))
    width = next((o.width for o in operands if isinstance(o, Expr) and o.width is not None), None)
    return Expr(graph, graph.op(op, *(_node(graph, o) for o in operands), attr=attr), width)


def _node(graph: Graph, operand: Operand) -> int:
    if isinstance(operand, Expr):
        return operand.node
    return graph.integer(operand) if isinstance(operand, int) else graph.const(operand)


def column_index(graph: Graph, width: Fraction) -> Expr:
    """The columns of a domain, counted from the left; those of half the width are counted by twos."""
    index = Expr(graph, graph.op("col_index"), Fraction(1))
    if width < 1:
        return even(index)
    return index if width == 1 else join(apply("mul", 2, index), apply("add", apply("mul", 2, index), 1))


def row_index(graph: Graph, width: Fraction) -> Expr:
    """The rows, counted from above, on a domain of any width."""
    return Expr(graph, graph.op("row_index"), width)


def even(x: Expr) -> Expr:
    """The even columns; a value without columns stays as it is, on half the domain."""
    return _halve("even", x)


def odd(x: Expr) -> Expr:
    """The odd columns; a value without columns stays as it is, on half the domain."""
    return _halve("odd", x)


def _halve(op: str, x: Expr) -> Expr:
    node = x.graph.nodes[x.node]
    if node.op == "join":
        half = node.args[("even", "odd").index(op)]
    else:
        half = x.graph.op(op, x.node) if x.has_columns else x.node
    return Expr(x.graph, half, None if x.width is None else x.width / 2)


def join(a: Operand, b: Operand) -> Expr:
    """Interleaved columns; one operand must have columns."""
    joined = apply("join", a, b)
    return Expr(joined.graph, joined.node, joined.type.width)


def is_tile(node: Node) -> bool:
    """True for an activation-sized value."""
    return node.type.kind is Kind.TILE


def is_number(node: Node) -> bool:
    """True for a float, which can be saved and differentiated (not a mask or an index)."""
    return node.type.dtype is Dtype.F32
