"""What a .coda file looks like: the syntax tree, before names and types mean anything.

    file       = Function* and Epilogue*
    Function   = fn name(params) = result, with lets before the result in a block body
    Epilogue   = epilogue name[dims](params) { statements }
    statement  = Let | LetPair | Store | Reduce | Return
    expression = Name | Literal | Apply(op, operands) | Call(function, arguments)

Every part knows its `Span`.
"""

from __future__ import annotations

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
    """A constant.  `bare` is a number without sign or parentheses, into which a minus before it is folded."""

    value: float | bool
    span: Span
    bare: bool


@attrs.frozen
class Apply:
    """An operator, by its name in the table of operations, and its operands."""

    op: str
    operands: tuple[Expression, ...]
    span: Span


@attrs.frozen
class Call:
    """A call of a built-in function or of an `fn`."""

    function: Word
    operands: tuple[Expression, ...]
    span: Span


Expression = Name | Literal | Apply | Call


@attrs.frozen
class Extent:
    """One extent of a shape: `width` times a dimension; `symbol` is None for a plain number."""

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
class LetPair:
    """`let (first, second) = value`, where value must be a call of split."""

    names: tuple[Word, Word]
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
class Return:
    """`return value`, the last statement of an fn's block."""

    value: Expression
    span: Span


Statement = Let | LetPair | Store | Reduce | Return


@attrs.frozen
class Function:
    """An `fn`.  `statements` holds any statement that the grammar lets into a block; see names.py for the rules."""

    name: Word
    params: tuple[Word, ...]
    statements: tuple[Statement, ...]
    end: Span


@attrs.frozen
class Epilogue:
    """An `epilogue`; `dims` is its `[M, N]`, if written."""

    name: Word
    dims: tuple[Word, Word] | None
    params: tuple[Param, ...]
    statements: tuple[Statement, ...]
    end: Span


Definition = Function | Epilogue
