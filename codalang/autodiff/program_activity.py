"""Which values of a program need a cotangent: those that depend on a parameter whose gradient is wanted.

A value depends on another through operations that have derivatives: not through comparisons, indices, masks or
`stop_gradient`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from codalang.ir.epilogue import Epilogue
from codalang.ir.program import Apply, Matmul, Product, Program, Statement
from codalang.ir.types import Dtype


def active_values(program: Program, wanted: Collection[str]) -> set[str]:
    """The values that depend on one of the wanted parameters, those included."""
    active = set(wanted)
    known: dict[Epilogue, list[frozenset[str]]] = {}
    for statement in program.statements:
        for result, sources in _sources(statement, known):
            if not active.isdisjoint(sources):
                active.add(result)
    return active


def _sources(statement: Statement, known: dict[Epilogue, list[frozenset[str]]]) -> Iterator[tuple[str, list[str]]]:
    """Each value that a statement makes, and the values that it depends on."""
    if isinstance(statement, Product):
        yield statement.result, list(statement.reads)
        return
    epilogue = statement.epilogue if isinstance(statement, Apply) else statement.expression
    if epilogue not in known:
        known[epilogue] = dependencies(epilogue)
    values = given(statement) if isinstance(statement, Apply) else {p.name: [p.name] for p in epilogue.params}
    results = statement.results if isinstance(statement, Apply) else (statement.result,)
    for result, params in zip(results, known[epilogue], strict=True):
        if result is not None:
            yield result, [value for param in params for value in values[param]]


def given(statement: Apply) -> dict[str, list[str]]:
    """The values that each parameter of an epilogue is made of: two of an accumulator, none of a number."""
    found = {name: [value] if isinstance(value, str) else [] for name, value in statement.inputs}
    host = statement.host
    if host is not None:
        found[statement.epilogue.params[0].name] = [host.a, host.b] if isinstance(host, Matmul) else [host]
    return found


def dependencies(epilogue: Epilogue) -> list[frozenset[str]]:
    """For each output, the parameters that it has a derivative by."""
    of: list[int] = []  # a bit for each parameter
    bits = {p.name: 1 << i for i, p in enumerate(epilogue.params)}
    for node in epilogue.nodes:
        if node.type.dtype is not Dtype.F32 or node.op == "stop_gradient":
            of.append(0)
        elif node.op == "param":
            of.append(bits[str(node.attr)])
        else:
            union = 0
            for arg in node.args:
                union |= of[arg]
            of.append(union)
    found = []
    for output in epilogue.outputs:
        union = 0
        for value in output.values:
            union |= of[value]
        found.append(frozenset(name for name, bit in bits.items() if union & bit and output.type.dtype is Dtype.F32))
    return found
