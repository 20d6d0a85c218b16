"""The derivative of an auxiliary step: each gradient is an auxiliary step, too.

The expression is an epilogue on [1, length], so that `derive` differentiates it.  What comes out is put back into the
form of auxiliary steps:

| derived                              | written as                                                       |
|--------------------------------------|------------------------------------------------------------------|
| reduce to a row of a row             | that row: there is one row only                                  |
| reduce to a row of a scalar          | that scalar, which stands for the row                            |
| reduce to a scalar of a scalar       | that scalar, times the length                                    |
| where(row_index() == 0, d, 0)        | d                                                                |

`max` and `min` of a vector share the cotangent among the places where it is attained, as torch.amax does: an auxiliary
step has no indices to find the first by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from codalang.autodiff.derivative import Derivative
from codalang.autodiff.program_fuse import Term, fused, with_outputs
from codalang.ir.build_program import ExpressionBuilder
from codalang.ir.dims import ONE, Dim
from codalang.ir.epilogue import Epilogue, Reduce, Store
from codalang.ir.names import Namer
from codalang.ir.program import Program, Statement, TensorType, Vector
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


def is_extreme(statement: object) -> bool:
    """Is it the maximum or minimum of a vector?"""
    if not isinstance(statement, Vector):
        return False
    output = statement.expression.outputs[0]
    return isinstance(output, Reduce) and output.how in ("max", "min")


def extreme_gradient(value: str, extreme: str, cotangent: str, length: Dim) -> tuple[Epilogue, Epilogue]:
    """How many elements of a vector attain its extreme, and its gradient; the latter reads the former as `count`.

    A NaN is what the extreme of a vector with one is, and is where that is attained.
    """

    def attained(builder: ExpressionBuilder) -> int:
        v = builder.value(value, TensorType((length,)))
        m = builder.value(extreme, TensorType(()))
        return builder.op("or", builder.op("eq", v, m), builder.op("ne", v, v))

    counting = ExpressionBuilder()
    ones = counting.op("where", attained(counting), counting.const(1.0), counting.const(0.0))
    count = counting.total("count", ones, "sum")
    builder = ExpressionBuilder()
    mask = attained(builder)
    share = builder.op("div", builder.value(cotangent, TensorType(())), builder.value("count", TensorType(())))
    return count, builder.result("d", builder.op("where", mask, share, builder.const(0.0)))


def without_inner_extremes(program: Program) -> Program:
    """The program in which each maximum or minimum is of a vector that has a name."""
    taken = {p.name for p in program.params} | set(program.dims)
    taken |= {name for statement in program.statements for name in statement.makes}
    namer = Namer(taken)
    statements: list[Statement] = []
    for statement in program.statements:
        if isinstance(statement, Vector) and is_extreme(statement):
            expression = statement.expression
            (output,) = expression.outputs
            node = expression.nodes[output.values[0]]
            if node.op != "param":
                inner = namer.fresh(f"{statement.result}_of")
                type_ = ValueType(node.type.kind, node.type.width)
                stored = Store(inner, output.values[0], type_)
                statements.append(Vector(inner, attrs.evolve(expression, outputs=(stored,)), statement.length))
                builder = ExpressionBuilder()
                value = builder.value(inner, TensorType((statement.length,)))
                assert isinstance(output, Reduce)
                again = builder.total(output.name, value, output.how)
                statements.append(attrs.evolve(statement, expression=again))
                continue
        statements.append(statement)
    return attrs.evolve(program, statements=tuple(statements))
