"""The text of values: which get a name by `let`, and the expressions of the others.

What is written as what:

    a value with a name hint, or used more than once   let name = ...
    even(x) and odd(x)                                 let (gate, up) = split(x), `_` for a half that nobody uses
    any other value                                    in place, with the parentheses that its tree needs
    a constant                                         in place: 2, 0.5, 1e-05, -inf, nan, true
    an index                                           3 where something beside it is an index, and i32(3) elsewhere

Floating-point operators do not associate, so `a - (b - c)` and `a + (b + c)` keep their parentheses.  `-1` is the
constant, `-(1)` the negation of a constant.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from codalang.ir.epilogue import Node
from codalang.ir.names import DISCARD, Namer
from codalang.ir.ops import OPS
from codalang.ir.types import Dtype

_CALL_ARGUMENT = 0
_COMPARISON = OPS["lt"].precedence
_SIGN = OPS["neg"].precedence

# Text, or a value with how tightly its place binds and whether its place says that it is an index.
_Piece = str | tuple[int, int, bool]


def print_number(value: float | bool) -> str:
    """A constant as it is written in the language; reading it back gives the same bits (but for a nan's payload)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text.removesuffix(".0")


class GraphText:
    """Writes the nodes of one graph.  `names` are those that values have so far; parameters have theirs at once."""

    def __init__(
        self,
        nodes: Sequence[Node],
        uses: Sequence[int],
        namer: Namer,
        *,
        stored_as: Mapping[int, Sequence[str]] | None = None,
        named: frozenset[int] = frozenset(),
    ) -> None:
        """`stored_as` are names that outputs have taken for a value, `named` the values that must have a name."""
        self.nodes = nodes
        self.uses = list(uses)
        self.namer = namer
        self.stored_as = stored_as or {}
        self.named = named
        self.halves = _pair_halves(nodes, self.uses)
        for pair in set(self.halves.values()):
            if None not in pair:  # two halves are one use, in one `split`
                self.uses[nodes[pair[0] or 0].args[0]] -= 1
        self.names = {index: str(node.attr) for index, node in enumerate(nodes) if node.op == "param"}

    def let(self, index: int) -> tuple[str, tuple[int, ...]] | None:
        """The line that names a node, and what it names, if the node is to have a name and has none yet."""
        node = self.nodes[index]
        if index in self.names or node.op == "const" or self.uses[index] == 0:
            return None
        if node.op in ("even", "odd"):
            text = self.expression(node.args[0])
            halves = self.halves[index]
            names = [DISCARD if half is None else self._name(half) for half in halves]
            return f"let ({', '.join(names)}) = split({text})", tuple(h for h in halves if h is not None)
        if node.hint is None and self.uses[index] == 1 and index not in self.named:
            return None
        text = self.expression(index)  # before the node has its name
        return f"let {self._name(index)} = {text}", (index,)

    def _name(self, index: int) -> str:
        wanted = self.nodes[index].hint
        outputs = self.stored_as.get(index, ())
        if wanted in outputs or (wanted is None and outputs):
            # The output's name is free for one value only: the first that is stored under it.
            name = wanted if wanted is not None else outputs[0]
        else:
            name = self.namer.fresh(wanted) if wanted is not None else self.namer.numbered("t")
        self.names[index] = name
        return name

    def expression(self, root: int, index: bool = False) -> str:
        """The text of a value: its name, or its op over the texts of its operands.

        `index` is true where the value's place says that an integer is an index.
        """
        pieces: list[str] = []
        todo: list[_Piece] = [(root, _CALL_ARGUMENT, index)]
        while todo:
            item = todo.pop()
            if isinstance(item, str):
                pieces.append(item)
            else:
                todo.extend(reversed(self._pieces(*item)))
        return "".join(pieces)

    def _pieces(self, index: int, binding: int, place: bool) -> list[_Piece]:
        """One level of an expression, in parentheses where it binds less tightly than its place asks for."""
        node = self.nodes[index]
        if index in self.names:
            return [self.names[index]]
        if node.op == "const":
            return [self._constant(node, place)]
        info = OPS[node.op]
        if info.infix is None:
            return self._call(node)
        inner = self._prefix(node) if len(node.args) == 1 else self._infix(node)
        return ["(", *inner, ")"] if info.precedence < binding else inner

    def _constant(self, node: Node, place: bool) -> str:
        text = print_number(node.attr)  # type: ignore[arg-type]
        return f"i32({text})" if node.type.dtype is Dtype.I32 and not place else text

    def _says_index(self, node: Node) -> bool:
        """Does the op read an integer among its operands as an index?"""
        operands = (self.nodes[a] for a in node.args)
        return node.op == "float" or any(n.type.dtype is Dtype.I32 and n.op != "const" for n in operands)

    def _call(self, node: Node) -> list[_Piece]:
        place = self._says_index(node)
        operands: list[_Piece] = [(arg, _CALL_ARGUMENT, place) for arg in node.args]
        if node.attr is not None:
            operands.append(node.attr if isinstance(node.attr, str) else print_number(node.attr))
        pieces: list[_Piece] = [f"{node.op}("]
        for position, operand in enumerate(operands):
            pieces += [*([", "] * (position > 0)), operand]
        return [*pieces, ")"]

    def _prefix(self, node: Node) -> list[_Piece]:
        operand = self.nodes[node.args[0]]
        if node.op == "not":
            return ["not ", (node.args[0], OPS["not"].precedence, False)]
        is_literal = operand.op == "const" and operand.type.dtype is not Dtype.I32
        if is_literal and not print_number(operand.attr).startswith("-"):  # type: ignore[arg-type]
            return ["-(", (node.args[0], _CALL_ARGUMENT, False), ")"]
        return ["-", (node.args[0], _SIGN, False)]

    def _infix(self, node: Node) -> list[_Piece]:
        """`a op b`: all operators group to the left, comparisons do not group at all."""
        info = OPS[node.op]
        place = self._says_index(node)
        left = info.precedence + (info.precedence == _COMPARISON)
        return [(node.args[0], left, place), f" {info.infix} ", (node.args[1], info.precedence + 1, place)]


def _pair_halves(nodes: Sequence[Node], uses: Sequence[int]) -> dict[int, tuple[int | None, int | None]]:
    """For each even or odd node, the two nodes that one `split` names: the n-th even and the n-th odd of a value."""
    halves: dict[int, tuple[list[int], list[int]]] = {}
    for index, node in enumerate(nodes):
        if node.op in ("even", "odd") and uses[index]:
            halves.setdefault(node.args[0], ([], []))[node.op == "odd"].append(index)
    pairs: dict[int, tuple[int | None, int | None]] = {}
    for evens, odds in halves.values():
        for pair in itertools.zip_longest(evens, odds):
            pairs.update({half: pair for half in pair if half is not None})
    return pairs
