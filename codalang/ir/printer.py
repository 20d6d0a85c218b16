"""IR -> .coda text that parses back to an equal IR.

What is written as what:

    a value with a name hint, or used more than once   let name = ...
    even(x) and odd(x)                                 let (gate, up) = split(x), `_` for a half that nobody uses
    any other value                                    in place, with the parentheses that its tree needs
    a constant                                         in place: 2, 0.5, 1e-05, -inf, nan, true

Floating-point operators do not associate, so `a - (b - c)` and `a + (b + c)` keep their parentheses.  `-1` is the
constant, `-(1)` the negation of a constant.  Names are those of the hints, made unique; printing what was parsed from
printed text gives the same text.
"""

from __future__ import annotations

import itertools

from codalang.ir.epilogue import Epilogue, Node, Output, Param, Store
from codalang.ir.module import Module
from codalang.ir.names import DISCARD, Namer, default_dims
from codalang.ir.ops import OPS
from codalang.ir.types import show_shape

INDENT = "    "
LINE_WIDTH = 110

_CALL_ARGUMENT = 0
_COMPARISON = OPS["lt"].precedence
_SIGN = OPS["neg"].precedence


def print_module(module: Module) -> str:
    """All epilogues of a module as .coda text; its `fn`s are inlined already."""
    return "\n".join(print_epilogue(e) for e in module.epilogues.values())


def print_epilogue(epilogue: Epilogue) -> str:
    """One epilogue as .coda text that ends with a newline.  The epilogue must pass `verify`."""
    return _Printer(epilogue).print()


def print_number(value: float | bool) -> str:
    """A constant as it is written in the language; reading it back gives the same bits (but for a nan's payload)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text.removesuffix(".0")


class _Printer:
    def __init__(self, epilogue: Epilogue) -> None:
        self.epilogue = epilogue
        self.uses = epilogue.uses()
        self.halves = _pair_halves(epilogue, self.uses)
        for pair in set(self.halves.values()):
            if None not in pair:  # two halves are one use, in one `split`
                self.uses[epilogue.nodes[pair[0] or 0].args[0]] -= 1
        self.namer = Namer({p.name for p in epilogue.params} | {o.name for o in epilogue.outputs} | set(epilogue.dims))
        # A value that is stored may take its output's name, where no parameter has it.
        self.stored_as: dict[int, list[str]] = {}
        for store in epilogue.stores:
            if not epilogue.has_param(store.name):
                self.stored_as.setdefault(store.value, []).append(store.name)
        self.names: dict[int, str] = {}
        for index, node in enumerate(epilogue.nodes):
            if node.op == "param":
                self.names[index] = str(node.attr)

    def print(self) -> str:
        lines = [self._header()]
        done = 0
        for output in self.epilogue.outputs:
            while done <= output.value:
                lines += self._let(done)
                done += 1
            lines.append(INDENT + self._output(output))
        return "\n".join([*lines, "}", ""])

    def _header(self) -> str:
        e = self.epilogue
        types = [p.type for p in e.params] + [o.type for o in e.outputs]
        rows = e.dims[0] if any(t.kind.has_rows for t in types) else None
        columns = e.dims[1] if any(t.kind.has_columns for t in types) else None
        dims = "" if default_dims(rows, columns) == e.dims else f"[{e.dims[0]}, {e.dims[1]}]"
        params = [self._param(p) for p in e.params]
        line = f"epilogue {e.name}{dims}({', '.join(params)}) {{"
        if len(line) <= LINE_WIDTH:
            return line
        return "\n".join([f"epilogue {e.name}{dims}(", *(f"{INDENT}{p}," for p in params), ") {"])

    def _param(self, param: Param) -> str:
        return f"{param.name}: {self._declared(param)}"

    def _declared(self, what: Param | Output) -> str:
        shape = show_shape(what.type.kind, what.type.width, self.epilogue.dims)
        return shape + (f": {what.dtype}" if what.dtype else "")

    def _let(self, index: int) -> list[str]:
        """The line that names a node, if it is to have a name and has none yet."""
        node = self.epilogue.nodes[index]
        if index in self.names or node.op == "const" or self.uses[index] == 0:
            return []
        if node.op in ("even", "odd"):
            return [f"{INDENT}let ({self._split_names(index)}) = split({self._expression(node.args[0])})"]
        if node.hint is None and self.uses[index] == 1:
            return []
        text = self._expression(index)  # before the node has its name
        return [f"{INDENT}let {self._name(index)} = {text}"]

    def _split_names(self, index: int) -> str:
        names = [DISCARD if half is None else self._name(half) for half in self.halves[index]]
        return ", ".join(names)

    def _name(self, index: int) -> str:
        wanted = self.epilogue.nodes[index].hint
        outputs = self.stored_as.get(index, [])
        if wanted in outputs or (wanted is None and outputs):
            # The output's name is free for one value only: the first that is stored under it.
            name = wanted if wanted is not None else outputs[0]
        else:
            name = self.namer.fresh(wanted) if wanted is not None else self.namer.numbered("t")
        self.names[index] = name
        return name

    def _output(self, output: Output) -> str:
        keyword, how = ("store", "") if isinstance(output, Store) else ("reduce", output.how)
        head = f"{keyword} {output.name}: {self._declared(output)}"
        if not how and self.names.get(output.value) == output.name:
            return head
        value = self._expression(output.value)
        return f"{head} = {how}({value})" if how else f"{head} = {value}"

    def _expression(self, root: int) -> str:
        """The text of a value: its name, or its op over the texts of its operands."""
        pieces: list[str] = []
        todo: list[str | tuple[int, int]] = [(root, 0)]
        while todo:
            item = todo.pop()
            if isinstance(item, str):
                pieces.append(item)
            else:
                todo.extend(reversed(self._pieces(*item)))
        return "".join(pieces)

    def _pieces(self, index: int, binding: int) -> list[str | tuple[int, int]]:
        """One level of an expression, in parentheses where it binds less tightly than its place asks for."""
        node = self.epilogue.nodes[index]
        if index in self.names:
            return [self.names[index]]
        if node.op == "const":
            return [print_number(node.attr)]  # type: ignore[arg-type]
        info = OPS[node.op]
        if info.infix is None:
            return _call(node)
        inner = self._prefix(node) if len(node.args) == 1 else _infix(node)
        return ["(", *inner, ")"] if info.precedence < binding else inner

    def _prefix(self, node: Node) -> list[str | tuple[int, int]]:
        operand = self.epilogue.nodes[node.args[0]]
        if node.op == "not":
            return ["not ", (node.args[0], OPS["not"].precedence)]
        if operand.op == "const" and not print_number(operand.attr).startswith("-"):  # type: ignore[arg-type]
            return ["-(", (node.args[0], _CALL_ARGUMENT), ")"]
        return ["-", (node.args[0], _SIGN)]


def _call(node: Node) -> list[str | tuple[int, int]]:
    pieces: list[str | tuple[int, int]] = [f"{node.op}("]
    for position, arg in enumerate(node.args):
        pieces += [", "] * (position > 0) + [(arg, _CALL_ARGUMENT)]
    return [*pieces, ")"]


def _infix(node: Node) -> list[str | tuple[int, int]]:
    """`a op b`: all operators group to the left, comparisons do not group at all."""
    info = OPS[node.op]
    left = info.precedence + (info.precedence == _COMPARISON)
    return [(node.args[0], left), f" {info.infix} ", (node.args[1], info.precedence + 1)]


def _pair_halves(epilogue: Epilogue, uses: list[int]) -> dict[int, tuple[int | None, int | None]]:
    """For each even or odd node, the two nodes that one `split` names: the n-th even and the n-th odd of a value."""
    halves: dict[int, tuple[list[int], list[int]]] = {}
    for index, node in enumerate(epilogue.nodes):
        if node.op in ("even", "odd") and uses[index]:
            halves.setdefault(node.args[0], ([], []))[node.op == "odd"].append(index)
    pairs: dict[int, tuple[int | None, int | None]] = {}
    for evens, odds in halves.values():
        for pair in itertools.zip_longest(evens, odds):
            pairs.update({half: pair for half in pair if half is not None})
    return pairs
