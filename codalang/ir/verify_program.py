"""Checks any program, however it was made: what the builder guarantees.

What passes can be printed, parsed back to an equal program, interpreted and differentiated.  A program is built again,
statement by statement, and must come out as it is.
"""

from __future__ import annotations

from codalang.errors import CodaError, CodaNameError, CodaTypeError, Loc
from codalang.ir.build_program import ProgramBuilder, elementwise
from codalang.ir.dims import Dim
from codalang.ir.epilogue import Epilogue, Reduce, State
from codalang.ir.names import FUNCTIONS, is_name
from codalang.ir.ops import OPS
from codalang.ir.program import Apply, Matmul, Product, Program, ProgramParam, Statement, TensorType, Vector
from codalang.ir.types import PARAM_DTYPES, Dtype, Kind, register_dtype
from codalang.ir.verify import verify


def verify_program(program: Program) -> None:
    """Raise CodaNameError or CodaTypeError for the first fault."""
    _check_name(program.name, "a program", program.loc)
    if program.name in FUNCTIONS or program.name in OPS:
        raise CodaNameError(f"`{program.name}` is a function of the language, and cannot name a program", program.loc)
    builder = ProgramBuilder(program.name, program.loc)
    for param in program.params:
        _check_param(param)
        builder.param(param.name, param.type.shape, param.dtype, param.default, param.loc)
    _check_epilogues(program)
    for statement in program.statements:
        _check_statement(statement)
        for name in statement.makes:
            _check_name(name, "a value", statement.loc)
        _build(builder, statement)
    if not isinstance(program.results, tuple):
        raise CodaTypeError(f"the results of program `{program.name}` must be a tuple of names", program.loc)
    built = builder.finish(program.results, program.loc)
    for given, made in zip(program.statements, built.statements, strict=True):
        if given != made:
            raise _not_canonical(given, made)


def check_determined(program: Program) -> None:
    """Raise CodaTypeError where the arguments' shapes cannot say what a dimension is: no call of the program would run.

    A derived program may be one, since it lacks parameters of its forward: whoever runs it knows the sizes.
    """
    found: set[str] = set()
    open_ = [(param, extent) for param in program.params for extent in param.type.shape]
    while open_:
        later = []
        for param, extent in open_:
            unknown = extent.names - found
            if len(unknown) == 1 and all(m.count(next(iter(unknown))) <= 1 for m, _ in extent.terms):
                found |= unknown
            elif unknown:
                later.append((param, extent))
        if len(later) == len(open_):
            param, extent = later[0]
            names = sorted(extent.names - found)
            raise CodaTypeError(
                f"the shapes of the arguments do not say what {' and '.join(f'`{name}`' for name in names)} of "
                f"`{program.name}` {'is' if len(names) == 1 else 'are'}",
                param.loc,
                hint=f"give `{extent}` a name of its own, or each of the names an axis of some parameter",
            )
        open_ = later


def _check_name(name: object, what: str, loc: Loc | None) -> None:
    if not is_name(name):
        raise CodaNameError(
            f"{name!r} cannot name {what}",
            loc,
            hint="a name is made of letters, digits and _, does not begin with a digit, and is no word of the grammar",
        )


def _check_param(param: ProgramParam) -> None:
    _check_name(param.name, "a parameter", param.loc)
    if not isinstance(param.type, TensorType) or not all(isinstance(e, Dim) for e in param.type.shape):
        raise CodaTypeError(f"`{param.name}` has no shape, but {param.type!r}", param.loc)
    for extent in param.type.shape:
        for name in extent.names:
            _check_name(name, "a dimension", param.loc)
        number = extent.number
        if number is not None and (number < 1 or number.denominator != 1):
            raise CodaTypeError(f"`{param.name}` has an axis of {number} elements", param.loc)
    if param.dtype is not None and param.dtype not in PARAM_DTYPES:
        raise CodaTypeError(
            f"`{param.name}` has unknown dtype {param.dtype!r}", param.loc, hint=f"there are {', '.join(PARAM_DTYPES)}"
        )
    if param.type.dtype is not register_dtype(param.dtype):
        raise CodaTypeError(
            f"`{param.name}` holds {param.type.dtype.value}, but is declared {param.dtype or 'without a dtype'}",
            param.loc,
        )
    _check_default(param)


def _check_default(param: ProgramParam) -> None:
    if param.default is None:
        return
    if param.type.shape:
        raise CodaTypeError(f"`{param.name}` is {param.type}, and only a scalar has a default", param.loc)
    wanted = {Dtype.F32: float, Dtype.I32: int, Dtype.BOOL: bool}[param.type.dtype]
    if type(param.default) is not wanted:
        raise CodaTypeError(
            f"the default of `{param.name}` must be a {wanted.__name__}, got {param.default!r}", param.loc
        )


def _check_epilogues(program: Program) -> None:
    """Each is well-formed, and what they are called tells them apart."""
    named: dict[str, Epilogue] = {}
    for statement in program.statements:
        if not isinstance(statement, Apply):
            continue
        epilogue = statement.epilogue
        if named.get(epilogue.name) is epilogue or named.get(epilogue.name) == epilogue:
            continue
        verify(epilogue)
        if epilogue.name in named:
            raise CodaNameError(
                f"two epilogues of program `{program.name}` are called `{epilogue.name}`", statement.loc
            )
        if epilogue.name == program.name:
            raise CodaNameError(f"program `{program.name}` applies an epilogue of its own name", statement.loc)
        named[epilogue.name] = epilogue


def _check_statement(statement: Statement) -> None:
    """What the types of the IR's parts promise, and the form of an auxiliary step."""
    loc = statement.loc
    if isinstance(statement, Vector):
        _check_vector(statement)
        return
    if isinstance(statement, Product):
        _check_matmul(statement.matmul, loc)
        return
    if isinstance(statement.host, Matmul):
        _check_matmul(statement.host, loc)
    elif not (statement.host is None or isinstance(statement.host, str)):
        raise CodaTypeError(f"{statement.host!r} cannot be the host of an epilogue", loc)
    for name, value in statement.inputs:
        if not isinstance(value, str | int | float | Dim):
            raise CodaTypeError(f"`{name}` of `{statement.epilogue.name}` cannot be {value!r}", loc)


def _check_matmul(matmul: object, loc: Loc | None) -> None:
    if not isinstance(matmul, Matmul) or not isinstance(matmul.a, str) or not isinstance(matmul.b, str):
        raise CodaTypeError(f"{matmul!r} is no matmul of two values", loc)


def _check_vector(statement: Vector) -> None:
    expression, loc = statement.expression, statement.loc
    if len(expression.outputs) != 1 or isinstance(expression.outputs[0], State):
        raise CodaTypeError(f"the expression of `{statement.result}` must store or reduce one value", loc)
    (output,) = expression.outputs
    if output.name != statement.result:
        raise CodaTypeError(f"the expression of `{statement.result}` calls its result `{output.name}`", loc)
    types = [p.type for p in expression.params] + [output.type]
    if any(t.kind not in (Kind.ROW, Kind.SCALAR) or t.width not in (None, 1) for t in types):
        raise CodaTypeError(f"the expression of `{statement.result}` must be of rows of width 1 and scalars", loc)
    value = expression.nodes[output.values[0]].type
    wanted = Kind.SCALAR if isinstance(output, Reduce) else value.kind
    if output.type.kind is not wanted:
        raise CodaTypeError(
            f"`{statement.result}` is a {output.type.kind.value}, and its expression gives a {wanted.value}", loc
        )
    if output.dtype is not None or any(p.dtype not in (None, "i32", "bool") for p in expression.params):
        raise CodaTypeError(f"the expression of `{statement.result}` declares a storage dtype", loc)
    verify(expression)
    if elementwise(expression, loc) != expression:
        raise CodaTypeError(
            f"the expression of `{statement.result}` is not in canonical form",
            loc,
            hint="codalang.ir.build_program.elementwise puts it in this form",
        )


def _build(builder: ProgramBuilder, statement: Statement) -> None:
    if isinstance(statement, Apply):
        inputs = dict(statement.inputs)
        if len(inputs) != len(statement.inputs):
            raise CodaTypeError(f"an input of `{statement.epilogue.name}` is given twice", statement.loc)
        builder.apply(statement.epilogue, statement.host, inputs, statement.results, statement.loc, statement.extents)
    elif isinstance(statement, Product):
        builder.matmul(statement.result, statement.matmul, statement.loc)
    else:
        builder.vector(statement.result, statement.expression, statement.loc)


def _not_canonical(given: Statement, made: Statement) -> CodaError:
    names = ", ".join(f"`{name}`" for name in given.makes) or "a statement without results"
    what = "is not what its operands say"
    if isinstance(given, Apply) and isinstance(made, Apply):
        if given.host != made.host:
            what = "has its accumulator among its inputs: it is the host"
        elif repr(given.inputs) != repr(made.inputs):
            what = "has its inputs in another order than its epilogue, or a number that is no f32"
    elif isinstance(given, Vector) and isinstance(made, Vector):
        what = f"has a length of {given.length}, and its vectors have {made.length}"
    return CodaTypeError(f"{names}: this {what}", given.loc)
