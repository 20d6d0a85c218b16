"""IR -> .coda text that parses back to an equal IR.

An epilogue is its parameters, its values (graph_text.py) and its outputs, after the definitions of the states that it
uses and that are not built in; a program (program_text.py) comes after the epilogues that it applies.  Names are those
of the hints, made unique; printing what was parsed from printed text gives the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from codalang.ir.builtin_states import BUILTIN_STATES
from codalang.ir.epilogue import Epilogue, Output, Param, Reduce, State, Store
from codalang.ir.graph_text import GraphText, print_number
from codalang.ir.module import Module
from codalang.ir.names import DISCARD, FUNCTIONS, Namer, default_dims
from codalang.ir.ops import OPS
from codalang.ir.program import Program
from codalang.ir.program_text import program_text
from codalang.ir.states import Function, Named, StateDef
from codalang.ir.types import Dtype, show_shape

__all__ = ["print_epilogue", "print_module", "print_number", "print_program", "print_state"]

INDENT = "    "
LINE_WIDTH = 110


def print_module(module: Module) -> str:
    """All states, epilogues and programs of a module as .coda text; its `fn`s are inlined already."""
    return _print(module.states, list(module.epilogues.values()), list(module.programs.values()))


def print_epilogue(epilogue: Epilogue) -> str:
    """One epilogue as .coda text that ends with a newline; a comment where it has no outputs.  Any other must pass
    `verify`."""
    return _print({}, [epilogue])


def print_program(program: Program) -> str:
    """One program as .coda text that ends with a newline, after the epilogues that it applies.  A comment where it
    returns nothing.  Any other must pass `verify_program`."""
    return _print({}, [], [program])


def print_state(definition: StateDef) -> str:
    """One state definition as .coda text that ends with a newline."""
    return "\n".join([*_state_lines(definition, definition.name), ""])


def _print(states: Mapping[str, StateDef], epilogues: Sequence[Epilogue], programs: Sequence[Program] = ()) -> str:
    """The states, further ones that the epilogues use, the epilogues, and further ones that the programs apply, and the
    programs, in one namespace."""
    taken = {e.name for e in epilogues} | {p.name for p in programs}
    apart = Namer(taken)
    called = {e: e.name for e in epilogues}
    for epilogue in (e for p in programs if p.results for e in p.epilogues()):
        if epilogue not in called:
            called[epilogue] = apart.fresh(epilogue.name)
    epilogues = [e if e.name == name else attrs.evolve(e, name=name) for e, name in called.items()]
    taken |= set(called.values())
    used = dict.fromkeys(s.definition for e in epilogues for s in e.states)
    known = {d: d.name for d in used if BUILTIN_STATES.get(d.name) == d and d.name not in taken | states.keys()}
    namer = Namer(taken | set(known.values()) | FUNCTIONS | OPS.keys())
    printed = {namer.fresh(name): definition for name, definition in states.items()}
    names = known | {definition: name for name, definition in reversed(printed.items())}
    for definition in used:
        if definition not in names:
            names[definition] = namer.fresh(definition.name)
            printed[names[definition]] = definition
    texts = ["\n".join([*_state_lines(definition, name), ""]) for name, definition in printed.items()]
    texts += [_Printer(e, names).print() if e.outputs else _nothing(e) for e in epilogues]
    return "\n".join([*texts, *(program_text(p, called, namer) for p in programs)])


def _nothing(epilogue: Epilogue) -> str:
    """What stands for an epilogue without outputs, which is no program: a derivative where no gradient is wanted that
    is not zero."""
    return f"# `{epilogue.name}` computes nothing: every gradient is zero\n"


# States


def _state_lines(definition: StateDef, name: str) -> Iterator[str]:
    inputs = ", ".join(_typed(*i) for i in definition.inputs)
    yield f"state {name}({inputs}) {{"
    carried = (
        f"{_typed(*c)} = {print_number(start)}" for c, start in zip(definition.carried, definition.initial, strict=True)
    )
    yield f"{INDENT}carry {', '.join(carried)}"
    indices = [dtype is Dtype.I32 for _, dtype in definition.carried]
    yield from _block("update", definition.update, indices)
    yield from _block("merge", definition.merge, indices)
    results = ", ".join(name for name, _ in definition.results)
    yield from _clause(f"finalize ({results})", definition.finalize, [False] * len(definition.results))
    if definition.vjp is not None:
        floats = [name for name, dtype in definition.inputs if dtype is Dtype.F32]
        yield from _clause(f"vjp ({', '.join(floats)})", definition.vjp, [False] * len(floats))
    yield "}"


def _typed(name: str, dtype: Dtype) -> str:
    return name if dtype is Dtype.F32 else f"{name}: {dtype.value}"


def _clause(head: str, function: Function, indices: list[bool]) -> Iterator[str]:
    lets, results = _function_text(function, indices)
    if lets:
        yield from _block(head, function, indices)
    else:
        yield f"{INDENT}{head} = ({', '.join(results)})"


def _block(head: str, function: Function, indices: list[bool]) -> Iterator[str]:
    lets, results = _function_text(function, indices)
    yield f"{INDENT}{head} {{"
    for line in lets:
        yield 2 * INDENT + line
    returned = results[0] if len(results) == 1 else f"({', '.join(results)})"
    yield f"{2 * INDENT}return {returned}"
    yield INDENT + "}"


def _function_text(function: Function, indices: list[bool]) -> tuple[list[str], list[str]]:
    """The `let`s of a function and its results.  `indices`: which result's place says that it is an index."""
    uses = [0] * len(function.nodes)
    for index in [*(a for n in function.nodes for a in n.args), *function.results]:
        uses[index] += 1
    text = GraphText(function.nodes, uses, Namer(_names(function.params)))
    lets = []
    for index in range(len(function.nodes)):
        let = text.let(index)
        if let is not None:
            lets.append(let[0])
    return lets, [text.expression(r, place) for r, place in zip(function.results, indices, strict=True)]


def _names(params: Named) -> list[str]:
    return [name for name, _ in params]


# Epilogues


class _Printer:
    def __init__(self, epilogue: Epilogue, state_names: dict[StateDef, str]) -> None:
        self.epilogue = epilogue
        self.state_names = state_names
        params = {p.name for p in epilogue.params}
        namer = Namer(params | {o.name for o in epilogue.outputs} | set(epilogue.dims))
        # A value that is stored may take its output's name, where no parameter has it.
        stored_as: dict[int, list[str]] = {}
        for output in epilogue.outputs:
            if isinstance(output, Store) and output.name not in params:
                stored_as.setdefault(output.value, []).append(output.name)
        self.kept = {k.value: k.how for k in epilogue.keeps}
        uses = epilogue.uses()
        for outputs in _statements(epilogue.outputs):
            for value in outputs[0].values * (len(outputs) - 1):  # results of one transform are one use
                uses[value] -= 1
        self.text = GraphText(epilogue.nodes, uses, namer, stored_as=stored_as, named=frozenset(self.kept))

    def print(self) -> str:
        lines = [self._header()]
        done = 0
        for outputs in _statements(self.epilogue.outputs):
            while done <= max(outputs[0].values):
                lines += self._let(done)
                done += 1
            lines.append(INDENT + self._output(outputs))
        return "\n".join([*lines, "}", ""])

    def _header(self) -> str:
        e = self.epilogue
        types = [p.type for p in e.params] + [o.type for o in e.outputs]
        rows = e.dims[0] if any(t.kind.per_row for t in types) else None
        columns = e.dims[1] if any(t.kind.has_columns for t in types) else None
        dims = "" if default_dims(rows, columns, *e.dims[2:]) == e.dims else f"[{e.dims[0]}, {e.dims[1]}]"
        params = [f"{p.name}: {self._declared(p)}" for p in e.params]
        head = f"{'precise ' * e.precise}epilogue {e.name}{dims}("
        line = f"{head}{', '.join(params)}) {{"
        if len(line) <= LINE_WIDTH:
            return line
        return "\n".join([head, *(f"{INDENT}{p}," for p in params), ") {"])

    def _declared(self, what: Param | Output) -> str:
        shape = show_shape(what.type.kind, what.type.width, self.epilogue.dims)
        return shape + (f": {what.dtype}" if what.dtype else "")

    def _let(self, index: int) -> list[str]:
        """The line that names a node, if it is to have a name, and those that say whether it is saved."""
        let = self.text.let(index)
        is_param = self.epilogue.nodes[index].op == "param"
        line, named = let if let is not None else ("", (index,) if is_param else ())
        keeps = [f"{self.kept[v]} {self.text.names[v]}" for v in named if v in self.kept]
        return [INDENT + text for text in (line, *keeps) if text]

    def _output(self, outputs: Sequence[Output]) -> str:
        output = outputs[0]
        if isinstance(output, State):
            return self._state(outputs)
        value = self.text.expression(output.value)
        if isinstance(output, Reduce):
            return f"reduce {output.name}: {self._declared(output)} = {output.how}({value})"
        head = f"store {output.name}: {self._declared(output)}"
        return head if self.text.names.get(output.value) == output.name else f"{head} = {value}"

    def _state(self, outputs: Sequence[Output]) -> str:
        first = outputs[0]
        assert isinstance(first, State)
        name_of = {o.result: o.name for o in outputs if isinstance(o, State)}
        names = [name_of.get(result, DISCARD) for result in range(max(name_of) + 1)]
        shown = names[0] if len(names) == 1 else f"({', '.join(names)})"
        values = ", ".join(
            self.text.expression(value, dtype is Dtype.I32)
            for value, (_, dtype) in zip(first.values, first.definition.inputs, strict=True)
        )
        return f"state {shown}: {self._declared(first)} = {self.state_names[first.definition]}({values})"


def _statements(outputs: Sequence[Output]) -> Iterator[list[Output]]:
    """The outputs by statement: neighbouring results of one stateful transform, in order, are one."""
    together: list[Output] = []
    for output in outputs:
        if together and not _continues(together[-1], output):
            yield together
            together = []
        together.append(output)
    yield together


def _continues(last: Output, output: Output) -> bool:
    """Can a result of a state stand in the same statement as the one before it?"""
    if not (isinstance(last, State) and isinstance(output, State)):
        return False
    same_dtype = last.dtype == output.dtype  # annotated for numbers or for indices, never for both
    same_shape = (last.type.kind, last.type.width) == (output.type.kind, output.type.width)
    same_fold = last.values == output.values and last.definition == output.definition
    return same_dtype and same_shape and same_fold and last.result < output.result
