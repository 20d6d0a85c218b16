"""Text -> syntax tree: lark's LALR parser with a callback per rule.

The callbacks run as the parser reduces, from the leaves up, so nothing here recurses however deep the text nests.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import attrs
from lark import Lark, Token, Transformer, UnexpectedInput, v_args

from codalang.errors import CodaSyntaxError, Loc, Source
from codalang.ir.ops import OPS
from codalang.parser import syntax
from codalang.parser.complaints import complaint, shorten
from codalang.parser.newlines import NewlineFilter
from codalang.parser.syntax import Span

_INFIX = {info.infix: name for name, info in OPS.items() if len(info.operands) == 2 and info.infix}
_PREFIX = {"-": "neg", "not": "not"}
_CONSTANTS = {"true": True, "false": False, "inf": float("inf"), "nan": float("nan")}


def read(source: Source) -> tuple[syntax.Definition, ...]:
    """The definitions of a file, in textual order.  `source` must be normalized.  Raises CodaSyntaxError &c."""
    try:
        definitions: Any = parser().parse(source.text)  # what the callback for `start` made
    except UnexpectedInput as error:
        raise complaint(error, source) from None
    except _BadNumber as error:
        span = error.span
        raise CodaSyntaxError(
            f"the number `{shorten(error.text)}` is too large",
            Loc(source, span.line, span.column, span.end_column),
            hint="the largest double is about 1.8e308; write `inf` for infinity",
        ) from None
    return definitions


@functools.cache
def parser() -> Lark:
    """The one parser, made at first use."""
    return Lark.open(
        "grammar.lark",
        rel_to=__file__,
        parser="lalr",
        lexer="basic",
        postlex=NewlineFilter(),
        transformer=_ToSyntax(),
        propagate_positions=False,
    )


class _BadNumber(Exception):
    def __init__(self, text: str, span: Span) -> None:
        super().__init__(text)
        self.text, self.span = text, span


def _span(token: Token) -> Span:
    return Span(token.line or 1, token.column or 1, token.end_line or 1, token.end_column or 1)


def _word(token: Token) -> syntax.Word:
    return syntax.Word(str(token), _span(token))


def _number(token: Token) -> float:
    value = float(token)
    if value == float("inf"):
        raise _BadNumber(str(token), _span(token))
    return value


@v_args(inline=True)
class _ToSyntax(Transformer):
    """One method per rule or alias of the grammar."""

    def start(self, *definitions: syntax.Definition) -> tuple[syntax.Definition, ...]:
        return definitions

    def function(self, *parts: Any) -> syntax.Function:
        _fn, name, _open, params, close, _equal, result = parts
        body = (syntax.Return(result, result.span),)
        return syntax.Function(_word(name), params or (), body, _span(close))

    def function_block(self, *parts: Any) -> syntax.Function:
        _fn, name, _open, params, _close, _brace, block, end = parts
        return syntax.Function(_word(name), params or (), block, _span(end))

    def epilogue(self, *parts: Any) -> syntax.Epilogue:
        _epilogue, name, dims, _open, params, _close, _brace, block, end = parts
        return syntax.Epilogue(_word(name), dims, params or (), block, _span(end))

    def names(self, *names: Token) -> tuple[syntax.Word, ...]:
        return tuple(_word(n) for n in names)

    def dims(self, _open: Token, rows: Token, columns: Token, _close: Token) -> tuple[syntax.Word, syntax.Word]:
        return _word(rows), _word(columns)

    def params(self, *params: syntax.Param) -> tuple[syntax.Param, ...]:
        return params

    def param(self, name: Token, shape: syntax.Shape, dtype: Token | None) -> syntax.Param:
        return syntax.Param(_word(name), shape, _word(dtype) if dtype else None)

    def shape(
        self, kind: Token, open: Token | None, extents: tuple[syntax.Extent, ...] | None, close: Token | None
    ) -> syntax.Shape:
        start = _span(kind)
        return syntax.Shape(_word(kind), extents or (), start.to(_span(close)) if close else start)

    def extents(self, *extents: syntax.Extent) -> tuple[syntax.Extent, ...]:
        return extents

    def extent(self, symbol: Token) -> syntax.Extent:
        return syntax.Extent(str(symbol), Fraction(1), str(symbol), _span(symbol))

    def extent_divided(self, symbol: Token, slash: Token, number: Token) -> syntax.Extent:
        return _extent(symbol, number, Fraction(1, 2), [symbol, slash, number])

    def extent_times(self, number: Token, star: Token, symbol: Token) -> syntax.Extent:
        return _extent(symbol, number, Fraction(2), [number, star, symbol])

    def extent_number(self, number: Token) -> syntax.Extent:
        return syntax.Extent(None, Fraction(1), str(number), _span(number))

    def block(self, *statements: syntax.Statement) -> tuple[syntax.Statement, ...]:
        return statements

    def let(self, let: Token, name: Token, _equal: Token, value: syntax.Expression) -> syntax.Let:
        return syntax.Let(_word(name), value, _span(let).to(value.span))

    def let_pair(self, *parts: Any) -> syntax.LetPair:
        let, _open, first, second, _close, _equal, value = parts
        return syntax.LetPair((_word(first), _word(second)), value, _span(let).to(value.span))

    def store(
        self, store: Token, name: Token, shape: Any, dtype: Token | None, _equal: Any, value: Any
    ) -> syntax.Store:
        end = value.span if value else _span(dtype) if dtype else shape.span if shape else _span(name)
        return syntax.Store(_word(name), shape, _word(dtype) if dtype else None, value, _span(store).to(end))

    def reduce(self, *parts: Any) -> syntax.Reduce:
        reduce, name, shape, dtype, _equal, value = parts
        span = _span(reduce).to(value.span)
        return syntax.Reduce(_word(name), shape, _word(dtype) if dtype else None, value, span)

    def result(self, keyword: Token, value: syntax.Expression) -> syntax.Return:
        return syntax.Return(value, _span(keyword).to(value.span))

    def binary(self, left: syntax.Expression, operator: Token, right: syntax.Expression) -> syntax.Apply:
        return syntax.Apply(_INFIX[str(operator)], (left, right), left.span.to(right.span))

    def unary(self, operator: Token, operand: syntax.Expression) -> syntax.Expression:
        span = _span(operator).to(operand.span)
        if operator == "-" and isinstance(operand, syntax.Literal) and operand.bare:
            return syntax.Literal(-operand.value, span, bare=False)
        return syntax.Apply(_PREFIX[str(operator)], (operand,), span)

    def name(self, name: Token) -> syntax.Name:
        return syntax.Name(str(name), _span(name))

    def number(self, number: Token) -> syntax.Literal:
        return syntax.Literal(_number(number), _span(number), bare=True)

    def constant(self, word: Token) -> syntax.Literal:
        value = _CONSTANTS[str(word)]
        return syntax.Literal(value, _span(word), bare=not isinstance(value, bool))

    def call(
        self, name: Token, _open: Token, arguments: tuple[syntax.Expression, ...] | None, close: Token
    ) -> syntax.Call:
        return syntax.Call(_word(name), arguments or (), _span(name).to(_span(close)))

    def arguments(self, *arguments: syntax.Expression) -> tuple[syntax.Expression, ...]:
        return arguments

    def parenthesized(self, open: Token, inner: syntax.Expression, close: Token) -> syntax.Expression:
        span = _span(open).to(_span(close))
        # A number in parentheses is one that a minus does not reach: -(1) negates, -1 is a constant.
        if isinstance(inner, syntax.Literal):
            return syntax.Literal(inner.value, span, bare=False)
        return attrs.evolve(inner, span=span)


def _extent(symbol: Token, number: Token, width: Fraction, tokens: Sequence[Token]) -> syntax.Extent:
    # Only halves and doubles are widths; for anything else 0, which is no width, lets the check of shapes complain.
    text = "".join(str(t) for t in tokens)
    return syntax.Extent(
        str(symbol), width if number == "2" else Fraction(0), text, _span(tokens[0]).to(_span(tokens[-1]))
    )
