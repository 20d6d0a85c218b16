"""The values of a program: their types, and which of them anybody needs."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import attrs

from codalang.ir.build import canonical
from codalang.ir.dims import Dim
from codalang.ir.epilogue import Epilogue
from codalang.ir.program import Apply, Matmul, Product, Program, Statement, TensorType, Vector
from codalang.ir.simplify import simplify
from codalang.ir.types import Kind


def types_of(program: Program) -> dict[str, TensorType]:
    """The type of every value."""
    types = {param.name: param.type for param in program.params}
    for statement in program.statements:
        types.update(made_by(statement, types))
    return types


def made_by(statement: Statement, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
    if isinstance(statement, Product):
        return {statement.result: TensorType(product_of(statement.matmul, types))}
    if isinstance(statement, Vector):
        output = statement.expression.outputs[0]
        shape = (statement.length,) if output.type.kind is Kind.ROW else ()
        return {statement.result: TensorType(shape, output.type.dtype)}
    m, n, *samples = statement.extents
    made = {}
    for name, output in zip(statement.results, statement.epilogue.outputs, strict=True):
        if name is not None:
            rows = (samples[0] if output.type.kind is Kind.ROWS else m,) if output.type.kind.has_rows else ()
            columns = (n * output.type.width,) if output.type.width is not None else ()
            made[name] = TensorType(rows + columns, output.type.dtype)
    return made


def product_of(matmul: Matmul, types: Mapping[str, TensorType]) -> tuple[Dim, Dim]:
    a, b = types[matmul.a].matrix, types[matmul.b].matrix
    assert a is not None and b is not None
    return a[matmul.a_transposed], b[not matmul.b_transposed]


def live(program: Program) -> Program:
    """The program without the statements, and the outputs of epilogues, that nobody reads."""
    needed = set(program.results)
    kept: list[Statement] = []
    for statement in reversed(program.statements):
        if not needed.intersection(statement.makes):
            continue
        if isinstance(statement, Apply):
            statement = _with_outputs(statement, tuple(name in needed for name in statement.results))
        kept.append(statement)
        needed.update(statement.reads)
    return attrs.evolve(program, statements=tuple(reversed(kept)))


def _with_outputs(statement: Apply, wanted: tuple[bool, ...]) -> Apply:
    if all(wanted):
        return statement
    epilogue, inputs = _restricted(statement.epilogue, wanted, statement.host is not None)
    results = tuple(name for name, want in zip(statement.results, wanted, strict=True) if want)
    return attrs.evolve(
        statement,
        results=results,
        epilogue=epilogue,
        inputs=tuple(item for item in statement.inputs if item[0] in inputs),
    )


@functools.lru_cache(maxsize=4096)
def _restricted(epilogue: Epilogue, wanted: tuple[bool, ...], hosted: bool) -> tuple[Epilogue, frozenset[str]]:
    """An epilogue with fewer outputs, and the parameters that these need; its host stays."""
    outputs = tuple(o for o, want in zip(epilogue.outputs, wanted, strict=True) if want)
    rest = canonical(attrs.evolve(epilogue, outputs=outputs))
    used = {node.attr for node in rest.nodes if node.op == "param"}
    params = tuple(p for i, p in enumerate(rest.params) if p.name in used or (hosted and i == 0))
    return attrs.evolve(rest, params=params), frozenset(p.name for p in params)


@functools.lru_cache(maxsize=4096)
def simplified(epilogue: Epilogue) -> Epilogue:
    """Simplified once: a kernel is found fastest by an epilogue that is the same object."""
    return simplify(epilogue)
