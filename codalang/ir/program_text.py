"""The text of a program, given what its epilogues and the `fn`s of its auxiliary steps are called.

An auxiliary step is an expression on one line.  One that uses an intermediate value twice is a call of an `fn`, which
can name it: a program itself has no `let`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from codalang.ir.dims import Dim
from codalang.ir.epilogue import Epilogue, Reduce
from codalang.ir.graph_text import GraphText, print_number
from codalang.ir.names import DISCARD, Namer
from codalang.ir.program import Apply, Product, Program, ProgramParam, Value, Vector
from codalang.ir.types import Kind

INDENT = "    "
LINE_WIDTH = 110


def program_text(program: Program, epilogues: Mapping[Epilogue, str], functions: Namer) -> str:
    """The `fn`s of a program and the program, ending with a newline.  `functions` gives names that are free for `fn`s.

    A comment where it returns nothing.
    """
    if not program.results:
        return f"# `{program.name}` computes nothing: every gradient is zero\n"
    lines = _listed(f"program {program.name}", [_param(p) for p in program.params], " {", "")
    texts = []
    for statement in program.statements:
        if isinstance(statement, Apply):
            lines += _apply(statement, epilogues[statement.epilogue])
        elif isinstance(statement, Product):
            lines.append(f"{INDENT}{statement.result} = {statement.matmul}")
        else:
            if _shares(statement.expression):
                name = functions.fresh(f"{program.name}_{statement.result}")
                texts.append(_function(name, statement.expression))
                value = f"{name}({', '.join(p.name for p in statement.expression.params)})"
            else:
                value = _expression(statement.expression)
            lines.append(INDENT + _vector(statement, value))
    shown = program.results[0] if len(program.results) == 1 else f"({', '.join(program.results)})"
    lines.append(f"{INDENT}return {shown}")
    return "\n".join([*texts, "\n".join([*lines, "}", ""])])


def _listed(head: str, items: list[str], tail: str, indent: str) -> list[str]:
    """`head(items)tail` on one line, or with a line for each item."""
    line = f"{indent}{head}({', '.join(items)}){tail}"
    if len(line) <= LINE_WIDTH or not items:
        return [line]
    return [f"{indent}{head}(", *(f"{indent}{INDENT}{item}," for item in items), f"{indent}){tail}"]


def _param(param: ProgramParam) -> str:
    dtype = f": {param.dtype}" if param.dtype else ""
    default = f" = {print_number(param.default)}" if param.default is not None else ""
    return f"{param.name}: {param.type}{dtype}{default}"


def _apply(statement: Apply, name: str) -> list[str]:
    results = [result or DISCARD for result in statement.results]
    shown = results[0] if len(results) == 1 else f"({', '.join(results)})"
    extents = "" if _determined(statement) else f"[{', '.join(map(str, statement.extents))}]"
    host = [] if statement.host is None else [str(statement.host)]
    inputs = [f"{param} = {_value(value)}" for param, value in statement.inputs]
    return _listed(f"{shown} = {name}{extents}", [*host, *inputs], "", INDENT)


def _determined(statement: Apply) -> bool:
    """Do the operands say what all extents are?"""
    kinds = {p.type.kind for p in statement.epilogue.params}
    known = {
        Kind.COL in kinds or Kind.TILE in kinds,
        Kind.ROW in kinds or Kind.TILE in kinds or Kind.ROWS in kinds,
        Kind.ROWS in kinds or len(statement.extents) == 2,
    }
    return known == {True}


def _value(value: Value) -> str:
    if isinstance(value, Dim):  # outside of brackets, where operators have spaces
        return str(value).replace("*", " * ").replace("/", " / ")
    return value if isinstance(value, str) else print_number(value)


def _vector(statement: Vector, value: str) -> str:
    (output,) = statement.expression.outputs
    return (
        f"{statement.result} = {output.how}({value})" if isinstance(output, Reduce) else f"{statement.result} = {value}"
    )


def _shares(expression: Epilogue) -> bool:
    """Is a value used twice that is no parameter and no constant?"""
    uses = expression.uses()
    return any(uses[i] > 1 for i, node in enumerate(expression.nodes) if node.op not in ("param", "const"))


def _expression(expression: Epilogue) -> str:
    return _graph(expression, Namer(())).expression(expression.outputs[0].values[0])


def _graph(expression: Epilogue, namer: Namer) -> GraphText:
    """The texts of values, of which only those used twice have names."""
    nodes = tuple(attrs.evolve(node, hint=None) for node in expression.nodes)
    return GraphText(nodes, expression.uses(), namer)


def _function(name: str, expression: Epilogue) -> str:
    params = [p.name for p in expression.params]
    text = _graph(expression, Namer(params))
    lets = list(_lets(text, len(expression.nodes)))
    result = text.expression(expression.outputs[0].values[0])
    return "\n".join([*_listed(f"fn {name}", params, " {", ""), *lets, f"{INDENT}return {result}", "}", ""])


def _lets(text: GraphText, count: int) -> Iterator[str]:
    for index in range(count):
        let = text.let(index)
        if let is not None:
            yield INDENT + let[0]
