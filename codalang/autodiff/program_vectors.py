"""The derivative of an auxiliary step: each gradient is an auxiliary step, too.

The expression is an epilogue on [1, length], so that `derive` differentiates it.  What comes out is put back into the
form of auxiliary steps:

| derived                              | written as                                                       |
|--------------------------------------|------------------------------------------------------------------|
| reduce to a row of a row             | that row: there is one row only                                  |
| reduce to a row of a scalar          | that scalar, which stands for the row                            |
| reduce to a scalar of a scalar       | that scalar, times the length                                    |
| where(row_index() == 0, d, 0)        | d                                                                |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs

from codalang.autodiff.derivative import Derivative
from codalang.autodiff.program_fuse import Term, fused, with_outputs
from codalang.ir.build_program import ExpressionBuilder
from codalang.ir.dims import ONE, Dim
from codalang.ir.epilogue import Epilogue, Reduce, Store
from codalang.ir.program import Apply, Program, Statement, TensorType, Vector
from codalang.ir.simplify import simplify
from codalang.ir.types import Kind, ValueType


def gradient_expressions(
    derivative: Derivative, terms: Mapping[str, Sequence[Term]], length: Dim
) -> dict[str, Epilogue]:
    """For each output of a derived expression, the expression of an auxiliary step.

    `terms`: what the parameters that are cotangents are the sum of.
    """
    backward = derivative.backward
    kinds = [p.type.kind for p in backward.params if p.name not in terms]
    kinds += [t.type.kind for some in terms.values() for t in some]
    at_zero = {"row_index"} if Kind.ROW in kinds else {"row_index", "col_index"}
    whole = simplify(fused(backward, terms, frozenset(at_zero)))
    return {o.name: _expression(with_outputs(whole, [o]), length) for o in whole.outputs}


def _expression(epilogue: Epilogue, length: Dim) -> Epilogue:
    """One output in the form of auxiliary steps."""
    (output,) = epilogue.outputs
    value = epilogue.nodes[output.values[0]].type
    if isinstance(output, Reduce) and output.type.kind is Kind.SCALAR and value.kind is Kind.ROW:
        return attrs.evolve(epilogue, outputs=(attrs.evolve(output, dtype=None),))
    if isinstance(output, Reduce) and output.type.kind is Kind.SCALAR and length != ONE:
        return _times(epilogue, output, length)
    type_ = ValueType(value.kind, value.width)
    return attrs.evolve(epilogue, outputs=(Store(output.name, output.values[0], type_),))


def _times(epilogue: Epilogue, output: Reduce, length: Dim) -> Epilogue:
    """The scalar of an output, times an extent."""
    builder = ExpressionBuilder()
    places: list[int] = []
    for node in epilogue.nodes:
        if node.op == "param":
            param = epilogue.param(str(node.attr))
            type_ = TensorType(() if param.type.kind is Kind.SCALAR else (length,), param.type.dtype)
            places.append(builder.value(param.name, type_))
        else:
            builder.nodes.append(attrs.evolve(node, args=tuple(places[a] for a in node.args)))
            places.append(len(builder.nodes) - 1)
    return builder.result(output.name, builder.op("mul", builder.extent(length), places[output.value]))


def with_extremes_applied(program: Program, active: Collection[str]) -> Program:
    """The program in which each maximum or minimum of a vector, if it is `active`, is an epilogue's: its derivative
    needs to know where it is attained, which an epilogue can tell."""
    dims = set(program.dims)
    statements: list[Statement] = []
    for statement in program.statements:
        if isinstance(statement, Vector) and statement.result in active and _is_extreme(statement):
            expression = statement.expression
            output = expression.outputs[0]
            assert isinstance(output, Reduce)
            epilogue = attrs.evolve(expression, name=f"{output.how}_of_vector", dims=("M", "N"))
            inputs = tuple((p.name, Dim.of(p.name) if p.name in dims else p.name) for p in expression.params)
            extents = (ONE, statement.length)
            statements.append(Apply((statement.result,), epilogue, None, inputs, extents, statement.loc))
        else:
            statements.append(statement)
    return attrs.evolve(program, statements=tuple(statements))


def _is_extreme(statement: Vector) -> bool:
    output = statement.expression.outputs[0]
    return isinstance(output, Reduce) and output.how != "sum"
