"""A call of a program: its statements, with the caller's values and extents in place of parameters and dimensions.

The callee's dimension names are solved for, axis by axis, so that its declared shapes are those of the arguments.  What
a statement has made has no more axes than two: as an argument for [B, S, D] it is [B*S, D].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from codalang.errors import CodaTypeError, Loc
from codalang.ir.build_program import ExpressionBuilder, ProgramBuilder
from codalang.ir.dims import Dim
from codalang.ir.epilogue import Epilogue, Reduce
from codalang.ir.program import Apply, Matmul, Product, Program, ProgramParam, Value, Vector
from codalang.ir.types import Dtype


def inline(
    builder: ProgramBuilder,
    program: Program,
    arguments: Mapping[str, Value],
    results: Sequence[str | None],
    fresh: Callable[[str], str],
    loc: Loc | None = None,
    places: Mapping[str, Loc] | None = None,
) -> tuple[Value, ...]:
    """Append the statements of a program.  Returns its results: `results` says how those that it makes are called.

    Args:
        arguments: a value for every parameter; a scalar with a default may be left out.
        results: a name for every result, or None for one that needs none.
        fresh: gives a free name like a wanted one.
        places: where the arguments stand, by parameter.

    Raises CodaTypeError where an argument does not fit its parameter.
    """
    extents = _extents(builder, program, arguments, loc, places or {})
    values: dict[str, Value] = {}
    for param in program.params:
        values[param.name] = arguments[param.name] if param.name in arguments else _default(param)
    called: dict[str, str] = {}
    for result, name in zip(program.results, results, strict=True):
        if name is not None:
            called.setdefault(result, name)

    def made(name: str | None) -> str | None:
        if name is None:
            return None
        values[name] = new = called[name] if name in called else fresh(name)
        return new

    for statement in program.statements:
        if isinstance(statement, Apply):
            builder.apply(
                statement.epilogue,
                _host(statement.host, values),
                {name: _value(value, values, extents) for name, value in statement.inputs},
                [made(name) for name in statement.results],
                loc,
                [extent.substitute(extents) for extent in statement.extents],
            )
        elif isinstance(statement, Product):
            matmul = _host(statement.matmul, values)
            assert isinstance(matmul, Matmul)
            builder.matmul(made(statement.result) or "", matmul, loc)
        else:
            name = made(statement.result) or ""
            builder.vector(name, _expression(builder, statement, name, values, extents), loc)
    return tuple(values[name] for name in program.results)


def _default(param: ProgramParam) -> Value:
    assert param.default is not None
    return int(param.default) if param.type.dtype is Dtype.I32 else param.default


def _value(value: Value, values: Mapping[str, Value], extents: Mapping[str, Dim]) -> Value:
    if isinstance(value, str):
        return values[value]
    return value.substitute(extents) if isinstance(value, Dim) else value


def _name(value: str, values: Mapping[str, Value]) -> str:
    name = values[value]
    assert isinstance(name, str)
    return name


def _host(host: Matmul | str | None, values: Mapping[str, Value]) -> Matmul | str | None:
    if isinstance(host, Matmul):
        return Matmul(_name(host.a, values), _name(host.b, values), host.a_transposed, host.b_transposed)
    return None if host is None else _name(host, values)


def _expression(
    builder: ProgramBuilder, statement: Vector, name: str, values: Mapping[str, Value], extents: Mapping[str, Dim]
) -> Epilogue:
    """An auxiliary step's expression of the caller's values."""
    expression = ExpressionBuilder(statement.expression.loc)
    index: list[int] = []
    for node in statement.expression.nodes:
        if node.op == "param":
            given = values.get(str(node.attr), extents.get(str(node.attr), 0.0))
            if isinstance(given, str):
                index.append(expression.value(given, builder.types[given], node.loc))
            elif isinstance(given, Dim):
                index.append(expression.extent(given, node.loc))
            elif node.type.dtype is Dtype.I32:
                index.append(expression.integer(int(given), node.loc))
            else:
                index.append(expression.const(given, node.loc))
        elif node.op == "const":
            whole = node.type.dtype is Dtype.I32
            number = node.attr
            assert not isinstance(number, str) and number is not None
            index.append(expression.integer(int(number), node.loc) if whole else expression.const(number, node.loc))
        else:
            args = [index[a] for a in node.args]
            index.append(expression.op(node.op, *args, attr=node.attr, loc=node.loc, hint=node.hint))
    (output,) = statement.expression.outputs
    value = index[output.values[0]]
    if isinstance(output, Reduce):
        return expression.total(name, value, output.how, statement.loc)
    return expression.result(name, value, statement.loc)


def _extents(
    builder: ProgramBuilder,
    program: Program,
    arguments: Mapping[str, Value],
    loc: Loc | None,
    places: Mapping[str, Loc],
) -> dict[str, Dim]:
    """What each dimension name of the callee is in the caller."""
    unknown = {name: Dim.of(_unknown(name)) for name in program.dims}
    pending: list[tuple[_Axis, Dim]] = []
    for param in program.params:
        if param.name in arguments:
            axes = _axes(builder, program, param, arguments[param.name], places.get(param.name, loc))
            pending += [(axis, axis.declared.substitute(unknown)) for axis in axes]
    found: dict[str, Dim] = {}
    while pending:
        later: list[tuple[_Axis, Dim]] = []
        for axis, wanted in pending:
            extent = wanted.substitute(found)
            open_ = [name for name in extent.names if name[0] == "?"]
            if not open_ and extent != axis.have:
                raise _unfitting(builder, program, axis, extent)
            solved = _solve(extent, open_[0], axis.have) if len(open_) == 1 else None
            if solved is not None:
                found[open_[0]] = solved
            elif open_:
                later.append((axis, wanted))
        if len(later) == len(pending):
            raise _unfitting(builder, program, later[0][0], None)
        pending = later
    return {name: found[_unknown(name)] for name in program.dims}


@attrs.frozen
class _Axis:
    """An extent that a parameter declares, and what an argument has there; `shown` says what it is."""

    shown: str
    declared: Dim
    have: Dim
    param: ProgramParam
    argument: str
    loc: Loc | None


def _axes(builder: ProgramBuilder, program: Program, param: ProgramParam, value: Value, loc: Loc | None) -> list[_Axis]:
    """What is compared of a parameter and its argument: each axis; or, where they have different numbers of axes, what
    a statement sees of them: rows and columns, or elements.  Raises CodaTypeError where they cannot be compared."""
    what = f"`{param.name}` of `{program.name}` is {param.type}"
    notes = ((param.loc, "declared here"),) if param.loc else ()
    if not isinstance(value, str):
        if param.type.shape:
            raise CodaTypeError(f"{what}, got the number {value}", loc, notes=notes)
        return []
    declared, have = param.type, builder.type_of(value, loc)
    if have.dtype is not declared.dtype:
        raise CodaTypeError(
            f"{what} of {declared.dtype.value}, and `{value}` holds {have.dtype.value}",
            loc,
            notes=(*notes, *builder.notes(value)),
        )

    def axes(names: Sequence[str], wanted: Sequence[Dim], given: Sequence[Dim]) -> list[_Axis]:
        return [_Axis(n, w, g, param, value, loc) for n, w, g in zip(names, wanted, given, strict=True)]

    if len(have.shape) == len(declared.shape) and have.pair_axis == declared.pair_axis:
        return axes([f"axis {axis}" for axis in range(len(have.shape))], declared.shape, have.shape)
    is_flat = have.pair_axis is None and declared.pair_axis is None and have.shape and declared.shape
    if is_flat and declared.matrix is not None and have.matrix is not None:
        return axes(("the number of rows", "the number of columns"), declared.matrix, have.matrix)
    if is_flat and have.matrix is None:
        return axes(("the length",), (declared.vector,), (have.vector,))
    raise CodaTypeError(f"{what}, and `{value}` is {have}", loc, notes=(*notes, *builder.notes(value)))


def _unknown(name: str) -> str:
    """A name that no dimension of the caller can have."""
    return f"?{name}"


def _solve(extent: Dim, name: str, have: Dim) -> Dim | None:
    """What a name must be for `extent`, in which it is the only unknown, to be `have`."""
    factor, rest = Dim(), have
    for monomial, coefficient in extent.terms:
        others = tuple(n for n in monomial if n != name)
        if len(monomial) - len(others) > 1:
            return None
        term = Dim.of(coefficient)
        for other in others:
            term = term * Dim.of(other)
        if len(others) < len(monomial):
            factor = factor + term
        else:
            rest = rest - term
    return rest.divide(factor)


def _unfitting(builder: ProgramBuilder, program: Program, axis: _Axis, extent: Dim | None) -> CodaTypeError:
    declared = axis.declared
    needs = f"needs {str(extent).replace('?', '')}" if extent is not None else f"declares {declared}"
    return CodaTypeError(
        f"{axis.shown} of `{axis.argument}` is {axis.have} where `{program.name}` {needs}"
        + (f", its {declared}" if extent is not None and str(extent) != str(declared) else ""),
        axis.loc,
        notes=(*(((axis.param.loc, "declared here"),) if axis.param.loc else ()), *builder.notes(axis.argument)),
        hint=None if extent is not None else f"the arguments do not say what the names in {declared} are",
    )
