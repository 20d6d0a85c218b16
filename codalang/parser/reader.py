"""Text -> syntax tree: lark's LALR parser with a callback per rule.

The callbacks run as the parser reduces, from the leaves up, so nothing here recurses however deep the text nests.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import attrs
from lark import Lark, Token, Transformer, UnexpectedInput, v_args

from codalang.errors import CodaSyntaxError, Loc, Source
from codalang.ir.ops import OPS
from codalang.parser import syntax, table
from codalang.parser.complaints import complaint, shorten
from codalang.parser.newlines import NewlineFilter
from codalang.parser.syntax import Span

_INFIX = {info.infix: name for name, info in OPS.items() if len(info.operands) == 2 and info.infix}
_PREFIX = {"-": "neg", "not": "not"}
_CONSTANTS = {"true": True, "false": False, "inf": float("inf"), "nan": float("nan")}


def read(source: Source) -> tuple[syntax.Import | syntax.Definition, ...]:
    """The imports and definitions of a file, in textual order.

    `source` must be normalized.  Raises CodaSyntaxError or CodaUnsupportedError.
    """
    try:
        items: Any = parser().parse(source.text)  # what the callback for `start` made
    except UnexpectedInput as error:
        raise complaint(error, source) from None
    except _BadNumber as error:
        span = error.span
        raise CodaSyntaxError(
            f"the number `{shorten(error.text)}` is too large",
            Loc(source, span.line, span.column, span.end_column),
            hint="the largest double is about 1.8e308; write `inf` for infinity",
        ) from None
    return items


@functools.cache
def parser() -> Lark:
    """The one parser, made at first use."""
    return table.parser(postlex=NewlineFilter(), transformer=_ToSyntax())


class _BadNumber(Exception):
    def __init__(self, text: str, span: Span) -> None:
        super().__init__(text)
        self.text, self.span = text, span


class _Declared(NamedTuple):
    """The shape of a program's parameter."""

    kind: syntax.Word | None
    extents: tuple[syntax.Expression, ...]
    span: Span


class _Results(NamedTuple):
    """One value, or several in parentheses."""

    values: tuple[syntax.Expression, ...]
    span: Span


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

    def start(self, *items: syntax.Import | syntax.Definition) -> tuple[syntax.Import | syntax.Definition, ...]:
        return items

    def import_file(self, keyword: Token, path: Token) -> syntax.Import:
        return syntax.Import(syntax.Word(str(path)[1:-1], _span(path)), True, _span(keyword).to(_span(path)))

    def import_library(self, keyword: Token, name: Token) -> syntax.Import:
        return syntax.Import(_word(name), False, _span(keyword).to(_span(name)))

    def function(self, *parts: Any) -> syntax.Function:
        _fn, name, _open, params, close, _equal, results = parts
        return syntax.Function(_word(name), params or (), _returned(results), _span(close))

    def function_block(self, *parts: Any) -> syntax.Function:
        _fn, name, _open, params, _close, _brace, block, end = parts
        return syntax.Function(_word(name), params or (), block, _span(end))

    def state(self, *parts: Any) -> syntax.State:
        _state, name, _open, inputs, _close, _brace, clauses, end = parts
        return syntax.State(_word(name), inputs or (), clauses, _span(end))

    def clauses(self, *clauses: syntax.Carry | syntax.Clause) -> tuple[syntax.Carry | syntax.Clause, ...]:
        return clauses

    def carry(self, word: Token, *carried: syntax.Carried) -> syntax.Carry:
        return syntax.Carry(_word(word), carried)

    def carried(self, name: Token, dtype: Token | None, _equal: Token, initial: syntax.Expression) -> syntax.Carried:
        return syntax.Carried(_word(name), _word(dtype) if dtype else None, initial)

    def clause_block(self, *parts: Any) -> syntax.Clause:
        word, _open, names, _close, _brace, block, end = parts
        return syntax.Clause(_word(word), names, block, _span(end))

    def clause(self, *parts: Any) -> syntax.Clause:
        word, _open, names, close, _equal, results = parts
        return syntax.Clause(_word(word), names, _returned(results), _span(close))

    def inputs(self, *inputs: syntax.Typed) -> tuple[syntax.Typed, ...]:
        return inputs

    def input(self, name: Token, dtype: Token | None) -> syntax.Typed:
        return syntax.Typed(_word(name), _word(dtype) if dtype else None)

    def epilogue(self, *parts: Any) -> syntax.Epilogue:
        precise, _epilogue, name, dims, _open, params, _close, _brace, block, end = parts
        return syntax.Epilogue(_word(name), dims, params or (), block, _span(end), precise is not None)

    def program(self, *parts: Any) -> syntax.Program:
        _program, name, _open, params, _close, _brace, block, end = parts
        return syntax.Program(_word(name), params or (), block, _span(end))

    def program_params(self, *params: syntax.ProgramParam) -> tuple[syntax.ProgramParam, ...]:
        return params

    def program_param(self, *parts: Any) -> syntax.ProgramParam:
        name, (kind, extents, span), dtype, _equal, default = parts
        return syntax.ProgramParam(_word(name), extents, kind, _word(dtype) if dtype else None, default, span)

    def declared(self, open: Token, extents: tuple[syntax.Expression, ...] | None, close: Token) -> _Declared:
        return _Declared(None, extents or (), _span(open).to(_span(close)))

    def declared_scalar(self, kind: Token) -> _Declared:
        return _Declared(_word(kind), (), _span(kind))

    def program_block(self, *statements: syntax.Bind | syntax.Return) -> tuple[syntax.Bind | syntax.Return, ...]:
        return statements

    def bind(self, name: Token, _equal: Token, value: syntax.Expression) -> syntax.Bind:
        return syntax.Bind((_word(name),), value, _span(name).to(value.span))

    def bind_tuple(self, *parts: Any) -> syntax.Bind:
        open_, names, _close, _equal, value = parts
        return syntax.Bind(names, value, _span(open_).to(value.span), parenthesized=True)

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

    def extent(self, *tokens: Token) -> syntax.Extent:
        return _extent(tokens)

    def block(self, *statements: syntax.Statement) -> tuple[syntax.Statement, ...]:
        return statements

    def let(self, let: Token, name: Token, _equal: Token, value: syntax.Expression) -> syntax.Let:
        return syntax.Let(_word(name), value, _span(let).to(value.span))

    def let_tuple(self, *parts: Any) -> syntax.LetTuple:
        let, _open, names, _close, _equal, value = parts
        return syntax.LetTuple(names, value, _span(let).to(value.span))

    def store(
        self, store: Token, name: Token, shape: Any, dtype: Token | None, _equal: Any, value: Any
    ) -> syntax.Store:
        end = value.span if value else _span(dtype) if dtype else shape.span if shape else _span(name)
        return syntax.Store(_word(name), shape, _word(dtype) if dtype else None, value, _span(store).to(end))

    def reduce(self, *parts: Any) -> syntax.Reduce:
        reduce, name, shape, dtype, _equal, value = parts
        span = _span(reduce).to(value.span)
        return syntax.Reduce(_word(name), shape, _word(dtype) if dtype else None, value, span)

    def fold(self, *parts: Any) -> syntax.Fold:
        state, name, shape, dtype, _equal, value = parts
        return _fold(state, (_word(name),), shape, dtype, value)

    def fold_tuple(self, *parts: Any) -> syntax.Fold:
        state, _open, names, _close, shape, dtype, _equal, value = parts
        return _fold(state, names, shape, dtype, value)

    def keep(self, keyword: Token, *names: Token) -> syntax.Keep:
        words = tuple(_word(n) for n in names)
        return syntax.Keep(str(keyword), words, _span(keyword).to(words[-1].span))

    def result(self, keyword: Token, results: _Results) -> syntax.Return:
        return syntax.Return(results.values, _span(keyword).to(results.span))

    def results(self, value: syntax.Expression) -> _Results:
        return _Results((value,), value.span)

    def result_tuple(self, open: Token, first: syntax.Expression, rest: Any, close: Token) -> _Results:
        return _Results((first, *(rest or ())), _span(open).to(_span(close)))

    def binary(self, left: syntax.Expression, operator: Token, right: syntax.Expression) -> syntax.Apply:
        return syntax.Apply(_INFIX[str(operator)], (left, right), left.span.to(right.span))

    def unary(self, operator: Token, operand: syntax.Expression) -> syntax.Expression:
        span = _span(operator).to(operand.span)
        if operator == "-" and isinstance(operand, syntax.Literal) and operand.bare:
            return syntax.Literal(-operand.value, span, bare=False, whole=operand.whole)
        return syntax.Apply(_PREFIX[str(operator)], (operand,), span)

    def name(self, name: Token) -> syntax.Name:
        return syntax.Name(str(name), _span(name))

    def number(self, number: Token) -> syntax.Literal:
        return syntax.Literal(_number(number), _span(number), bare=True, whole=number.isdecimal())

    def constant(self, word: Token) -> syntax.Literal:
        value = _CONSTANTS[str(word)]
        return syntax.Literal(value, _span(word), bare=not isinstance(value, bool))

    def call(self, *parts: Any) -> syntax.Call:
        name, _bracket, extents, _closed, _open, arguments, close = parts
        span = _span(name).to(_span(close))
        keywords = tuple(a for a in arguments or () if isinstance(a, syntax.Keyword))
        operands = tuple(a for a in arguments or () if not isinstance(a, syntax.Keyword))
        return syntax.Call(_word(name), operands, span, keywords, extents or ())

    def keyword(self, name: Token, _equal: Token, value: syntax.Expression) -> syntax.Keyword:
        return syntax.Keyword(_word(name), value)

    def call_arguments(
        self, *arguments: syntax.Expression | syntax.Keyword
    ) -> tuple[syntax.Expression | syntax.Keyword, ...]:
        return arguments

    def matmul(self, left: syntax.Expression, operator: Token, right: syntax.Expression) -> syntax.Matmul:
        return syntax.Matmul(left, right, _span(operator), left.span.to(right.span))

    def attribute(self, operand: syntax.Expression, _dot: Token, name: Token) -> syntax.Attribute:
        return syntax.Attribute(operand, _word(name), operand.span.to(_span(name)))

    def arguments(self, *arguments: syntax.Expression) -> tuple[syntax.Expression, ...]:
        return arguments

    def parenthesized(self, open: Token, inner: syntax.Expression, close: Token) -> syntax.Expression:
        span = _span(open).to(_span(close))
        # A number in parentheses is one that a minus does not reach: -(1) negates, -1 is a constant.
        if isinstance(inner, syntax.Literal):
            return syntax.Literal(inner.value, span, bare=False, whole=inner.whole)
        return attrs.evolve(inner, span=span)


def _returned(results: _Results) -> tuple[syntax.Statement, ...]:
    return (syntax.Return(results.values, results.span),)


def _fold(
    keyword: Token,
    names: tuple[syntax.Word, ...],
    shape: syntax.Shape | None,
    dtype: Token | None,
    value: syntax.Expression,
) -> syntax.Fold:
    return syntax.Fold(names, shape, _word(dtype) if dtype else None, value, _span(keyword).to(value.span))


def _extent(tokens: Sequence[Token]) -> syntax.Extent:
    """`N`, `N/2`, `2*N`, `4*N/2`: a product of numbers and one dimension; numbers alone; or no extent."""
    span = _span(tokens[0]).to(_span(tokens[-1]))
    words = [str(t) for t in tokens]
    symbols = [t for t in tokens if t.type == "NAME"]
    symbol = str(symbols[0]) if symbols else None
    return syntax.Extent(symbol, _width(words) if len(symbols) == 1 else Fraction(0), "".join(words), span)


_LARGEST_WIDTH = 10**12  # keeps the arithmetic of a long product cheap; every width that there is is far smaller


def _width(words: Sequence[str]) -> Fraction:
    """How many times its one dimension a product is; 0 where it is no such product."""
    width = Fraction(1)
    for operator, word in zip(("*", *words[1::2]), words[::2], strict=True):
        number = Fraction(int(word)) if len(word) < 10 and word.isdecimal() else Fraction(0)
        if word.isidentifier():
            number = Fraction(operator == "*")
        width = width * number if operator == "*" else width / (number or 1)
        if operator not in "*/" or not number or max(width.numerator, width.denominator) > _LARGEST_WIDTH:
            return Fraction(0)
    return width
