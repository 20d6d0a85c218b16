"""Putting the derivative of a program together: what is alive, its parameters, and its names.

The backward has the parameters that its statements read: cotangents, what was kept, parameters of the forward; and,
where their shapes do not say what every dimension is, further parameters of the forward that do, which nothing reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from codalang.autodiff.derivative import Decision, Load
from codalang.autodiff.program_delay import with_scales_delayed
from codalang.autodiff.program_derivative import ProgramDerivative
from codalang.autodiff.program_emit import Emission
from codalang.autodiff.program_fuse import renamed
from codalang.autodiff.program_keep import Kept
from codalang.autodiff.program_replay import replay, replayed
from codalang.ir.build_program import ProgramBuilder
from codalang.ir.dims import Dim
from codalang.ir.names import Namer
from codalang.ir.program import Apply, Matmul, Product, Program, ProgramParam, Statement, TensorType, Value, Vector


def assemble(
    program: Program,
    walked: Program,
    kept: Kept,
    emission: Emission,
    cotangent_of: Mapping[str, str],
    gradients: Mapping[str, str | None],
    plan: Mapping[str, tuple[Decision, ...]],
    delay_scales: bool,
) -> ProgramDerivative:
    """The derivative, from what the walk over the statements of `walked` left."""
    results = list(dict.fromkeys(g for g in gradients.values() if g is not None))
    statements = list(_alive(emission.statements, results))
    read = {name for statement in statements for name in statement.reads} | set(results)
    forward, saved = _forward(program, walked, kept, read)
    types = replayed(forward).types
    names = _names(forward, emission, statements, cotangent_of, gradients, read)
    builder = ProgramBuilder(f"{program.name}_backward", program.loc)
    loads: dict[str, Load] = {}
    for param, load in _params(forward, types, kept, saved, cotangent_of, names, read, statements):
        builder.param(param.name, param.type.shape, param.dtype, param.default)
        loads[param.name] = load
    for statement in statements:
        replay(builder, _renamed(statement, names))
    backward = builder.finish([names[name] for name in results])
    if delay_scales:
        scales = [name for name, load in loads.items() if load.source != "cotangent"]
        backward = with_scales_delayed(backward, scales, [names[n] for n in kept.again.values() if n in names])
    return ProgramDerivative(
        forward=forward,
        backward=backward,
        saved=tuple(saved),
        gradients={name: None if value is None else names[value] for name, value in gradients.items()},
        cotangents={result: names[value] for result, value in cotangent_of.items() if value in read},
        loads=loads,
        plan=dict(plan),
    )


def _alive(statements: Sequence[Statement], results: Sequence[str]) -> Iterator[Statement]:
    """The statements that the results are made of, without what nobody reads."""
    alive: list[Statement] = []
    read = set(results)
    for statement in reversed(statements):
        if read.isdisjoint(statement.makes):
            continue
        if isinstance(statement, Apply):
            wanted = tuple(r if r in read else None for r in statement.results)
            statement = attrs.evolve(statement, results=wanted)
        read.update(statement.reads)
        alive.append(statement)
    return reversed(alive)


def _forward(program: Program, walked: Program, kept: Kept, read: set[str]) -> tuple[Program, list[str]]:
    """The forward that keeps what is read, and what that is."""
    own = {name for statement in walked.statements for name in statement.makes}
    statements: list[Statement] = []
    saved: list[str] = []
    for statement in kept.statements:
        if isinstance(statement, Apply):
            results = tuple(r if r in own or r in read else None for r in statement.results)
            statement = attrs.evolve(statement, results=results)
        saved += [name for name in statement.makes if name in read and name not in program.results]
        statements.append(statement)
    if not saved:
        return program, []
    builder = replayed(attrs.evolve(walked, statements=tuple(statements)))
    return builder.finish([*program.results, *saved]), saved


def _names(
    forward: Program,
    emission: Emission,
    statements: Sequence[Statement],
    cotangent_of: Mapping[str, str],
    gradients: Mapping[str, str | None],
    read: set[str],
) -> dict[str, str]:
    """Names for the values of the backward: cotangents and gradients first, then the others as they come."""
    taken = {p.name for p in forward.params} | set(forward.dims)
    taken |= {name for statement in forward.statements for name in statement.makes}
    namer = Namer(taken)
    names: dict[str, str] = {}
    for name, value in cotangent_of.items():
        if value in read:
            names[value] = namer.fresh(f"d_{name}")
    for name, gradient in gradients.items():
        if gradient is not None and gradient in emission.wanted and gradient not in names:
            names[gradient] = namer.fresh(f"d_{name}")
    for statement in statements:
        for value in statement.makes:
            if value not in names:
                names[value] = namer.fresh(emission.wanted[value])
    return names


def _renamed(statement: Statement, names: Mapping[str, str]) -> Statement:
    """The statement with the names of values."""

    def name(value: Value) -> Value:
        return names.get(value, value) if isinstance(value, str) else value

    def matmul(m: Matmul) -> Matmul:
        return attrs.evolve(m, a=names.get(m.a, m.a), b=names.get(m.b, m.b))

    if isinstance(statement, Product):
        return Product(names[statement.result], matmul(statement.matmul))
    if isinstance(statement, Vector):
        result = names[statement.result]
        return Vector(result, renamed(statement.expression, names, result), statement.length)
    host = statement.host
    return attrs.evolve(
        statement,
        results=tuple(None if r is None else names[r] for r in statement.results),
        host=matmul(host) if isinstance(host, Matmul) else None if host is None else names.get(host, host),
        inputs=tuple((param, name(value)) for param, value in statement.inputs),
    )


# ---- parameters ------------------------------------------------------------------------------------------------------


def _params(
    forward: Program,
    types: Mapping[str, TensorType],
    kept: Kept,
    saved: Sequence[str],
    cotangent_of: Mapping[str, str],
    names: Mapping[str, str],
    read: set[str],
    statements: Sequence[Statement],
) -> list[tuple[ProgramParam, Load]]:
    """The parameters of the backward, and what each is given."""
    found: list[tuple[ProgramParam, Load]] = []
    for result, value in cotangent_of.items():
        if value in read:
            found.append((ProgramParam(names[value], types[result]), Load("cotangent", result)))
    for statement in forward.statements:
        for name in statement.makes:
            if name in read:
                source = "saved" if name in saved else "output"
                found.append((ProgramParam(name, types[name], kept.storage.get(name)), Load(source, name)))
    own = {p.name for p in forward.params if p.name in read}
    shown = [p.type for p, _ in found] + [p.type for p in forward.params if p.name in own]
    used = {name for statement in statements for name in _dims(statement)} & set(forward.dims)
    missing = _open(shown, used)
    for param in sorted(forward.params, key=lambda p: len(p.type.shape)):
        if param.name not in own and missing & _names_of(param.type):
            own.add(param.name)
            shown.append(param.type)
            missing = _open(shown, used)
    return found + [(p, Load("param", p.name)) for p in forward.params if p.name in own]


def _dims(statement: Statement) -> Iterator[str]:
    """The dimension names that a statement uses, among other names."""
    if isinstance(statement, Vector):
        yield from statement.reads
    elif isinstance(statement, Apply):
        for extent in (*statement.extents, *(value for _, value in statement.inputs)):
            if isinstance(extent, Dim):
                yield from extent.names


def _names_of(type_: TensorType) -> set[str]:
    return {name for extent in type_.shape for name in extent.names}


def _open(types: Sequence[TensorType], dims: set[str]) -> set[str]:
    """The dimension names that the shapes have, or that are asked for, and that the shapes do not say: as
    `program_reference.sizes` finds them."""
    extents = [extent for type_ in types for extent in type_.shape if extent.names]
    known: set[str] = set()
    while True:
        found = {
            name
            for extent in extents
            for name in extent.names - known
            if len(extent.names - known) == 1 and all(m.count(name) <= 1 for m, _ in extent.terms)
        }
        if not found:
            break
        known |= found
    return {name for extent in extents for name in extent.names - known} | (dims - known)
