"""Making a program's statements again, for a builder that then knows the type of each value."""

from __future__ import annotations

from codalang.ir.build_program import ProgramBuilder
from codalang.ir.program import Apply, Product, Program, Statement


def replayed(program: Program) -> ProgramBuilder:
    """A builder that holds the program, hence the type of each value."""
    builder = ProgramBuilder(program.name, program.loc)
    for param in program.params:
        builder.param(param.name, param.type.shape, param.dtype, param.default, param.loc)
    for statement in program.statements:
        replay(builder, statement)
    return builder


def replay(builder: ProgramBuilder, statement: Statement) -> None:
    """Make a statement again."""
    if isinstance(statement, Apply):
        builder.apply(
            statement.epilogue,
            statement.host,
            dict(statement.inputs),
            statement.results,
            statement.loc,
            statement.extents,
        )
    elif isinstance(statement, Product):
        builder.matmul(statement.result, statement.matmul, statement.loc)
    else:
        builder.vector(statement.result, statement.expression, statement.loc)
