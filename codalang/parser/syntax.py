"""What a .coda file looks like: the syntax tree, before names and types mean anything.

    file       = Import*, Function*, State*, Epilogue* and Program*, in any order
    Function   = fn name(params) = result, with lets before the results in a block body
    State      = state name(inputs) { clauses }
    clause     = Carry | Clause(word, statements), such as update and merge
    Epilogue   = [precise] epilogue name[dims](params) { statements }
    statement  = Let | LetTuple | Store | Reduce | Fold | Keep | Return
    Program    = program name(params) { Bind*, Return }
    expression = Name | Literal | Apply(op, operands) | Call(function, arguments)
               | Matmul(left, right) | Attribute(operand, name), and keywords and extents of calls: in programs only

Every part knows its `Span`.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import attrs


class Span(NamedTuple):
    """From (line, column) up to but not including (end_line, end_column), 1-based."""

    line: int
    column: int
    end_line: int
    end_column: int

    def to(self, other: Span) -> Span:
        """The span from this one's start to the other's end."""
        return Span(self.line, self.column, other.end_line, other.end_column)


@attrs.frozen
class Word:
    """A name where it stands."""

    text: str
    span: Span


@attrs.frozen
class Name:
    """A value's name used in an expression."""

    text: str
    span: Span


@attrs.frozen
class Literal:
    """A constant.

    `bare` is a number without sign or parentheses, into which a minus before it is folded.  `whole` is one without
    point and exponent, which is an index where its neighbour is one.
    """

    value: float | bool
    span: Span
    bare: bool
    whole: bool = False


@attrs.frozen
class Apply:
    """An operator, by its name in the table of operations, and its operands."""

    op: str
    operands: tuple[Expression, ...]
    span: Span


@attrs.frozen
class Keyword:
    """`name = value` among the arguments of a call."""

    name: Word
    value: Expression


@attrs.frozen
class Call:
    """A call of a built-in function or of an `fn`, or of an epilogue or a program in a program.

    `extents` are those in brackets, `f[M, N](x)`.
    """

    function: Word
    operands: tuple[Expression, ...]
    span: Span
    keywords: tuple[Keyword, ...] = ()
    extents: tuple[Expression, ...] = ()


@attrs.frozen
class Matmul:
    """`left @ right`; `operator` is where the `@` stands."""

    left: Expression
    right: Expression
    operator: Span
    span: Span


@attrs.frozen
class Attribute:
    """`operand.name`, where the name must be T."""

    operand: Expression
    name: Word
    span: Span


Expression = Name | Literal | Apply | Call | Matmul | Attribute


@attrs.frozen
class Extent:
    """One extent of a shape: `width` times a dimension; `symbol` is None for a plain number.

    A width of 0 stands for an expression that is no multiple of one dimension.
    """

    symbol: str | None
    width: Fraction
    text: str
    span: Span


@attrs.frozen
class Shape:
    """`tile[M, N/2]` as written; `kind` need not be one there is."""

    kind: Word
    extents: tuple[Extent, ...]
    span: Span


@attrs.frozen
class Param:
    """A parameter of an epilogue."""

    name: Word
    shape: Shape
    dtype: Word | None


@attrs.frozen
class Let:
    """`let name = value`"""

    name: Word
    value: Expression
    span: Span


@attrs.frozen
class LetTuple:
    """`let (first, second) = value`, where value must be a call of what has so many results."""

    names: tuple[Word, ...]
    value: Expression
    span: Span


@attrs.frozen
class Store:
    """`store name: shape: dtype = value`; without a value it is that of the same name."""

    name: Word
    shape: Shape | None
    dtype: Word | None
    value: Expression | None
    span: Span


@attrs.frozen
class Reduce:
    """`reduce name: shape: dtype = value`, where value must be a call of a reduction."""

    name: Word
    shape: Shape | None
    dtype: Word | None
    value: Expression
    span: Span


@attrs.frozen
class Fold:
    """`state (name, ...): shape: dtype = value`, where value must be a call of a state."""

    names: tuple[Word, ...]
    shape: Shape | None
    dtype: Word | None
    value: Expression
    span: Span


@attrs.frozen
class Keep:
    """`save name, ...` or `recompute name, ...`"""

    how: str
    names: tuple[Word, ...]
    span: Span


@attrs.frozen
class Return:
    """`return value` or `return (value, ...)`, the last statement of a block that computes values."""

    values: tuple[Expression, ...]
    span: Span


Statement = Let | LetTuple | Store | Reduce | Fold | Keep | Return


@attrs.frozen
class Function:
    """An `fn`.  `statements` holds any statement that the grammar lets into a block; see names.py for the rules."""

    name: Word
    params: tuple[Word, ...]
    statements: tuple[Statement, ...]
    end: Span


@attrs.frozen
class Typed:
    """`name` or `name: dtype`"""

    name: Word
    dtype: Word | None


@attrs.frozen
class Carried:
    """`name: dtype = initial`"""

    name: Word
    dtype: Word | None
    initial: Expression


@attrs.frozen
class Carry:
    """`carry name = initial, ...`; `word` need not be `carry`."""

    word: Word
    carried: tuple[Carried, ...]


@attrs.frozen
class Clause:
    """`word (names) { statements }`, or without names; `= results` is a block that returns them."""

    word: Word
    names: tuple[Word, ...] | None
    statements: tuple[Statement, ...]
    end: Span


@attrs.frozen
class State:
    """A `state` definition.  `clauses` holds whatever is written; see states.py for the rules."""

    name: Word
    inputs: tuple[Typed, ...]
    clauses: tuple[Carry | Clause, ...]
    end: Span


@attrs.frozen
class Epilogue:
    """An `epilogue`; `dims` is its `[M, N]`, if written, `precise` whether it is a `precise epilogue`."""

    name: Word
    dims: tuple[Word, Word] | None
    params: tuple[Param, ...]
    statements: tuple[Statement, ...]
    end: Span
    precise: bool = False


@attrs.frozen
class ProgramParam:
    """A parameter of a program: `name: [extents]: dtype = default`, or `name: kind ...` where `kind` must be scalar."""

    name: Word
    extents: tuple[Expression, ...]
    kind: Word | None
    dtype: Word | None
    default: Expression | None
    shape_span: Span


@attrs.frozen
class Bind:
    """`name = value` or `(name, ...) = value`; `parenthesized` tells them apart."""

    names: tuple[Word, ...]
    value: Expression
    span: Span
    parenthesized: bool = False


@attrs.frozen
class Program:
    """A `program`."""

    name: Word
    params: tuple[ProgramParam, ...]
    statements: tuple[Bind | Return, ...]
    end: Span


@attrs.frozen
class Import:
    """`import "file"` with the text between the quotes, or `import name` of the standard library."""

    target: Word
    quoted: bool
    span: Span


Definition = Function | State | Epilogue | Program


def walk(root: Expression) -> Iterator[Expression]:
    """All parts of an expression, from left to right, each before its operands."""
    stack = [root]
    while stack:
        part = stack.pop()
        yield part
        stack.extend(reversed(value_operands(part)))


def value_operands(part: Expression) -> tuple[Expression, ...]:
    """The operands that are values: the second of `cast(x, bf16)` is not."""
    if isinstance(part, Matmul):
        return (part.left, part.right)
    if isinstance(part, Attribute):
        return (part.operand,)
    if isinstance(part, Call):
        operands = part.operands[:1] if part.function.text == "cast" else part.operands
        return operands + tuple(k.value for k in part.keywords) if part.keywords else operands
    return part.operands if isinstance(part, Apply) else ()


def expressions(statement: Statement | Bind) -> tuple[Expression, ...]:
    """The expressions that a statement evaluates; a store without a value has its name."""
    if isinstance(statement, Return):
        return statement.values
    if isinstance(statement, Keep):
        return tuple(Name(n.text, n.span) for n in statement.names)
    if isinstance(statement, Store) and statement.value is None:
        return (Name(statement.name.text, statement.name.span),)
    assert statement.value is not None
    return (statement.value,)
