"""A `state` definition -> `StateDef`: each of its functions becomes a graph of scalars."""

from __future__ import annotations

from codalang.errors import CodaTypeError
from codalang.ir.build import EpilogueBuilder, function_of
from codalang.ir.epilogue import Node
from codalang.ir.states import Function, Named, StateDef
from codalang.ir.types import Dtype, Kind, ValueType
from codalang.parser import syntax
from codalang.parser.clauses import Part, parts
from codalang.parser.complaints import shorten
from codalang.parser.evaluate import Evaluator
from codalang.parser.files import File


def define_state(definition: syntax.State, file: File) -> StateDef:
    """The IR of a state, whose names must have been checked.  Raises CodaTypeError where a value does not fit."""
    p = parts(definition, file)
    update = _function(p.update, p.carried + p.inputs, p.carried, file)
    merge = _function(p.merge, tuple((f"{side}_{c}", d) for side in "ab" for c, d in p.carried), p.carried, file)
    finalize = _function(p.finalize, p.carried, tuple((r.text, None) for r in p.results), file)
    results = tuple((r.text, finalize.nodes[i].type.dtype) for r, i in zip(p.results, finalize.results, strict=True))
    vjp = None
    if p.vjp is not None:
        _no_cotangent_of_an_index(p.vjp, results, file)
        floats = tuple((f"d_{r}", d) for r, d in results if d is Dtype.F32)
        wanted = tuple((name, d) for name, d in p.inputs if d is Dtype.F32)
        vjp = _function(p.vjp, p.inputs + results + floats, wanted, file)
    initial = tuple(
        int(literal.value) if dtype is Dtype.I32 else float(literal.value)
        for literal, (_, dtype) in zip(p.initial, p.carried, strict=True)
    )
    loc = file.locate(definition.name.span)
    return StateDef(definition.name.text, p.inputs, p.carried, initial, update, merge, finalize, results, vjp, loc)


def _function(part: Part, params: Named, wanted: tuple[tuple[str, Dtype | None], ...], file: File) -> Function:
    """The graph of a part.  `wanted` are the names and dtypes of its results; None takes what comes, but for a mask."""
    builder = EpilogueBuilder(part.function.name.text, ("M", "N"))
    evaluator = Evaluator(builder, file)
    for name, dtype in params:
        evaluator.bind(name, builder.param(name, ValueType(Kind.SCALAR, None, dtype)))
    *lets, result = part.function.statements
    for let in lets:
        assert isinstance(let, syntax.Let | syntax.LetTuple)
        evaluator.let(let)
    assert isinstance(result, syntax.Return)
    values = [evaluator.node(value, of or Dtype.F32) for (_, of), value in zip(wanted, result.values, strict=True)]
    for node in builder.nodes:
        _check_scalar(node)
    for (name, of), expression, value in zip(wanted, result.values, values, strict=True):
        _check_result(builder, value, name, of, file, expression)
    evaluator.finish()
    return function_of(builder, params, values)


def _check_scalar(node: Node) -> None:
    if node.type.kind is not Kind.SCALAR:
        raise CodaTypeError(
            f"`{node.op}` has no meaning in a state: it folds one element at a time",
            node.loc,
            hint="pass it as an input: `state (value, index): col[M] = argmax(x, col_index())`",
        )


def _check_result(
    builder: EpilogueBuilder, node: int, name: str, dtype: Dtype | None, file: File, value: syntax.Expression
) -> None:
    have = builder.nodes[node].type
    if have.dtype is not (dtype or have.dtype) or have.dtype is Dtype.BOOL:
        wanted = dtype.value if dtype else "f32 or i32"
        raise CodaTypeError(
            f"`{shorten(name)}` must be {wanted}, got {have.dtype.value}",
            file.locate(value.span),
            hint="`where(mask, 1, 0)` makes a number of a mask" if have.dtype is Dtype.BOOL else None,
        )


def _no_cotangent_of_an_index(part: Part, results: Named, file: File) -> None:
    indices = {f"d_{name}": name for name, dtype in results if dtype is not Dtype.F32}
    for statement in part.function.statements:
        for root in syntax.expressions(statement):
            for name in syntax.walk(root):
                if isinstance(name, syntax.Name) and name.text in indices:
                    raise CodaTypeError(
                        f"there is no `{shorten(name.text)}`: `{shorten(indices[name.text])}` is an index, "
                        "and has no cotangent",
                        file.locate(name.span),
                    )
