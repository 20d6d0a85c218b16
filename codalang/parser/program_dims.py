"""Extents in programs: `T`, `2*F`, `(Q + 2*KV)*HD`, `N/2` -> `Dim`."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import attrs

from codalang.errors import CodaTypeError
from codalang.ir.dims import Dim
from codalang.parser import syntax
from codalang.parser.complaints import shorten
from codalang.parser.files import File
from codalang.parser.syntax import Span

# An extent is short: these keep the arithmetic of a long one cheap.
_MOST_TERMS = 64
_LARGEST = 10**18


@attrs.frozen
class _Apply:
    """The operands are evaluated: apply the operator."""

    op: str
    count: int
    span: Span


class NoExtent(Exception):
    """The expression is no extent, because of the part at `span`."""

    def __init__(self, span: Span, why: str) -> None:
        super().__init__(why)
        self.span, self.why = span, why


def read_extent(root: syntax.Expression, is_dim: Callable[[str], bool]) -> Dim:
    """The extent that an expression of dimension names and whole numbers is.  Raises NoExtent."""
    todo: list[syntax.Expression | _Apply] = [root]
    done: list[Dim] = []
    while todo:
        part = todo.pop()
        if isinstance(part, syntax.Name):
            if not is_dim(part.text):
                raise NoExtent(part.span, f"`{shorten(part.text)}` is no dimension")
            done.append(Dim.of(part.text))
        elif isinstance(part, syntax.Literal):
            if isinstance(part.value, bool) or not part.whole:
                raise NoExtent(part.span, "an extent has whole numbers only")
            if abs(part.value) > _LARGEST:
                raise NoExtent(part.span, "this number is too large for an extent")
            done.append(Dim.of(int(part.value)))
        elif isinstance(part, syntax.Apply) and part.op in ("add", "sub", "mul", "div", "neg"):
            todo.append(_Apply(part.op, len(part.operands), part.span))
            todo.extend(reversed(part.operands))
        elif isinstance(part, _Apply):
            operands = done[len(done) - part.count :]
            del done[len(done) - part.count :]
            done.append(_apply(part, operands))
        else:
            raise NoExtent(part.span, "an extent is made of names, numbers, `+`, `-`, `*`, and `/` by a number")
    (extent,) = done
    return extent


def _apply(part: _Apply, operands: list[Dim]) -> Dim:
    first, second = operands[0], operands[-1]
    if part.op == "neg":
        return first * -1
    if part.op == "div":
        number = second.number
        if number is None:
            raise NoExtent(part.span, "an extent is divided by numbers only")
        if not number:
            raise NoExtent(part.span, "an extent is divided by zero")
        result = first * (Fraction(1) / number)
    else:
        if part.op == "mul" and len(first.terms) * len(second.terms) > _MOST_TERMS**2:
            raise NoExtent(part.span, "this extent is too long")
        result = first + second if part.op == "add" else first - second if part.op == "sub" else first * second
    if len(result.terms) > _MOST_TERMS or any(_is_large(m, c) for m, c in result.terms):
        raise NoExtent(part.span, "this extent is too long")
    return result


def _is_large(monomial: tuple[str, ...], coefficient: Fraction) -> bool:
    return len(monomial) > _MOST_TERMS or max(abs(coefficient.numerator), coefficient.denominator) > _LARGEST


def declared_extent(root: syntax.Expression, file: File) -> Dim:
    """An extent of a parameter's shape, where any name is a dimension.  Raises CodaTypeError."""
    try:
        extent = read_extent(root, lambda name: name != "_")
    except NoExtent as error:
        raise CodaTypeError(error.why, file.locate(error.span), hint="such as `T`, `2*F` or `(Q + 2*KV)*HD`") from None
    number = extent.number
    if number is not None and (number < 1 or number.denominator != 1):
        raise CodaTypeError(f"an axis cannot have {number} elements", file.locate(root.span))
    return extent
