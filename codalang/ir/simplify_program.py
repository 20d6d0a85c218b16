"""A program that computes the same results, without what nobody reads.

    merge      statements that compute the same are one
    copies     an auxiliary step that copies a vector is that vector
    drop       statements, and outputs of epilogues, that no result depends on, and the inputs that only those needed

Results keep their names.  An epilogue that has lost outputs is another one: its kernel loads and stores less.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from codalang.ir.build import canonical
from codalang.ir.build_program import elementwise
from codalang.ir.epilogue import Epilogue
from codalang.ir.names import Namer
from codalang.ir.program import Apply, Matmul, Product, Program, Statement, Value, Vector
from codalang.ir.simplify import simplify


def simplify_program(program: Program) -> Program:
    """See the module's docstring.  `program` must be one that `verify_program` passes; so is what comes out."""
    return _dropped(_merged(program))


# Statements that compute the same


def _merged(program: Program) -> Program:
    returned = set(program.results)
    same: dict[str, str] = {}  # a value -> an earlier one that is the same
    called: dict[str, str] = {}  # a value -> what it is to be called
    known: dict[object, int] = {}
    statements: list[Statement] = []
    for statement in program.statements:
        statement = _of(statement, same)
        source = _copied(statement)
        if source is not None and statement.makes[0] not in returned:
            same[statement.makes[0]] = source
            continue
        at = known.setdefault(_key(statement), len(statements))
        if at == len(statements) or not _merge(statements, at, statement, returned, same, called):
            statements.append(statement)
    renamed = [_makes(_of(s, called), called) for s in statements]
    return attrs.evolve(program, statements=tuple(renamed))


def _merge(
    statements: list[Statement],
    at: int,
    statement: Statement,
    returned: set[str],
    same: dict[str, str],
    called: dict[str, str],
) -> bool:
    """Let an earlier statement make what an equal one makes, or answer False where both have returned values."""
    earlier = statements[at]
    pairs = list(zip(_results(earlier), _results(statement), strict=True))
    for first, second in pairs:
        if first is not None and second in returned and called.get(first, first) in returned:
            return False
    results = []
    for first, second in pairs:
        results.append(first or second)
        if first is not None and second is not None:
            same[second] = first
            if second in returned:
                called[first] = second
    if isinstance(earlier, Apply):
        statements[at] = attrs.evolve(earlier, results=tuple(results))
    return True


def _results(statement: Statement) -> tuple[str | None, ...]:
    return statement.results if isinstance(statement, Apply) else statement.makes


def _key(statement: Statement) -> object:
    """What a statement computes: equal for two that make equal values."""
    if isinstance(statement, Apply):
        return attrs.evolve(statement, results=())
    if isinstance(statement, Product):
        return statement.matmul
    (output,) = statement.expression.outputs
    return attrs.evolve(statement.expression, outputs=(attrs.evolve(output, name="_"),))


def _copied(statement: Statement) -> str | None:
    """The value that an auxiliary step copies, or None."""
    if not isinstance(statement, Vector) or len(statement.expression.nodes) != 1:
        return None
    (node,) = statement.expression.nodes
    is_vector = node.op == "param" and node.type.kind is statement.expression.outputs[0].type.kind
    return str(node.attr) if is_vector and node.type.width is not None else None


def _of(statement: Statement, names: Mapping[str, str]) -> Statement:
    """A statement that reads values by other names."""
    if isinstance(statement, Vector):
        renamed = elementwise(_expression_of(statement.expression, names))
        simple = elementwise(simplify(renamed))
        # Without one of its vectors a matrix may stand alone.
        return attrs.evolve(statement, expression=simple if simple.params == renamed.params else renamed)
    if not any(name in names for name in statement.reads):
        return statement
    if isinstance(statement, Product):
        return attrs.evolve(statement, matmul=_matmul(statement.matmul, names))
    inputs = tuple((name, _value(value, names)) for name, value in statement.inputs)
    host = statement.host
    host = _matmul(host, names) if isinstance(host, Matmul) else names.get(host, host) if host is not None else None
    return attrs.evolve(statement, host=host, inputs=inputs)


def _value(value: Value, names: Mapping[str, str]) -> Value:
    return names.get(value, value) if isinstance(value, str) else value


def _matmul(matmul: Matmul, names: Mapping[str, str]) -> Matmul:
    return attrs.evolve(matmul, a=names.get(matmul.a, matmul.a), b=names.get(matmul.b, matmul.b))


def _makes(statement: Statement, names: Mapping[str, str]) -> Statement:
    """A statement whose results have other names."""
    if not any(name in names for name in statement.makes):
        return statement
    if isinstance(statement, Apply):
        results = tuple(names.get(name, name) if name is not None else None for name in statement.results)
        return attrs.evolve(statement, results=results)
    name = names[statement.result]
    if isinstance(statement, Product):
        return attrs.evolve(statement, result=name)
    (output,) = statement.expression.outputs
    expression = attrs.evolve(statement.expression, outputs=(attrs.evolve(output, name=name),))
    return attrs.evolve(statement, result=name, expression=expression)


def _expression_of(expression: Epilogue, names: Mapping[str, str]) -> Epilogue:
    """An auxiliary step's expression of values by other names, of which two may have become one."""
    if not any(p.name in names for p in expression.params):
        return expression
    params = tuple(dict.fromkeys(attrs.evolve(p, name=names.get(p.name, p.name)) for p in expression.params))
    nodes = []
    for node in expression.nodes:
        name = names.get(str(node.attr)) if node.op == "param" else None
        nodes.append(node if name is None else attrs.evolve(node, attr=name, hint=name))
    return attrs.evolve(expression, params=params, nodes=tuple(nodes))


# What no result depends on


def _dropped(program: Program) -> Program:
    needed = set(program.results)
    statements: list[Statement] = []
    for statement in reversed(program.statements):
        if needed.isdisjoint(statement.makes):
            continue
        if isinstance(statement, Apply):
            statement = _without_outputs(statement, needed)
        needed.update(statement.reads)
        statements.append(statement)
    namer = Namer({program.name})
    names: dict[Epilogue, Epilogue] = {}
    kept = []
    for statement in reversed(statements):
        if isinstance(statement, Apply):
            if statement.epilogue not in names:
                name = namer.fresh(statement.epilogue.name)
                names[statement.epilogue] = attrs.evolve(statement.epilogue, name=name)
            statement = attrs.evolve(statement, epilogue=names[statement.epilogue])
        kept.append(statement)
    return attrs.evolve(program, statements=tuple(kept))


def _without_outputs(statement: Apply, needed: set[str]) -> Apply:
    """The application without outputs that nobody needs, and without the inputs that only those are made of."""
    results = tuple(name for name in statement.results if name in needed)
    outputs = tuple(o for o, name in zip(statement.epilogue.outputs, statement.results, strict=True) if name in needed)
    if len(outputs) == len(statement.epilogue.outputs):
        return statement
    epilogue = canonical(attrs.evolve(statement.epilogue, outputs=outputs))
    read = {node.attr for node in epilogue.nodes if node.op == "param"}
    epilogue = attrs.evolve(epilogue, params=tuple(p for p in epilogue.params if p.name in read))
    count = 3 if epilogue.has_samples else 2
    epilogue = attrs.evolve(epilogue, dims=epilogue.dims[:count])
    host = statement.host if statement.epilogue.params and statement.epilogue.params[0].name in read else None
    inputs = tuple((name, value) for name, value in statement.inputs if name in read)
    if host is None and epilogue.accumulator is not None:
        (_, first), *rest = inputs
        assert isinstance(first, str)
        host, inputs = first, tuple(rest)
    return Apply(results, epilogue, host, inputs, statement.extents[:count], statement.loc)
