"""Shapes as Python writes them: `tile[M, N / 2]`, `col[M].i32`, `"tile[M, N/2]: bf16"`.

A dimension is a symbol, and columns come in multiples of it: `N / 2` (or `N // 2`), `2 * N`.  Symbols may be objects
(`N = Dim("N")`; M, N and B are there already) or text (`tile["M", "N/2"]`).  A shape may also be the text that the
language has for it.  A storage dtype is an attribute of a shape, or torch's own dtype where one is asked for by name.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import attrs

from codalang.builder.place import here
from codalang.errors import CodaError, CodaNameError, CodaTypeError
from codalang.ir.names import is_name
from codalang.ir.types import PARAM_DTYPES, Kind, show_extent

EXAMPLES = {Kind.SCALAR: "scalar", Kind.ROW: "row[N]", Kind.COL: "col[M]", Kind.TILE: "tile[M, N]"}
_ALIASES = {
    "float32": "f32",
    "float": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "half": "f16",
    "int32": "i32",
    "int": "i32",
    "int64": "i64",
    "long": "i64",
}
_EXTENT = re.compile(r"\s*(?:(\d+)\s*\*\s*)?([A-Za-z_]\w*)\s*(?://?\s*(\d+))?\s*")
_SHAPE = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\[([^\[\]]*)\])?\s*(?::\s*(\w+)\s*)?")


def _no_dimension(shown: str) -> CodaError:
    return CodaTypeError(
        f"{shown} is no dimension: dimensions are symbols, bound at the call",
        here(),
        hint='write `N`, `N / 2` or `2 * N`, with `N = Dim("N")`',
    )


@attrs.frozen
class Dim:
    """A multiple of a symbol: `N`, `N / 2`, `2 * N`.  `Dim("N")` is the symbol."""

    symbol: str = attrs.field()
    width: Fraction = Fraction(1)

    @symbol.validator
    def _check(self, _: object, symbol: object) -> None:
        if not is_name(symbol):
            raise CodaNameError(f"{symbol!r} cannot be the name of a dimension", here())

    def __mul__(self, factor: object) -> Dim:
        if not isinstance(factor, int) or isinstance(factor, bool) or factor < 1:
            raise _no_dimension(f"`{self} * {factor}`")
        return Dim(self.symbol, self.width * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> Dim:
        if not isinstance(divisor, int) or isinstance(divisor, bool) or divisor < 1:
            raise _no_dimension(f"`{self} / {divisor}`")
        return Dim(self.symbol, self.width / divisor)

    __floordiv__ = __truediv__

    def _refuse(self, *_: object) -> Any:
        raise CodaTypeError(
            f"`{self}` is a dimension, not a value",
            here(),
            hint="columns are halved or doubled; pass what is needed of a dimension as a `scalar` parameter",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __rtruediv__ = __rfloordiv__ = __pow__ = __rpow__ = __neg__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __int__ = __float__ = __index__ = __iter__ = __bool__ = _refuse

    def __str__(self) -> str:
        return show_extent(self.width, self.symbol)


def dim(extent: object) -> Dim:
    """A dimension given as an object or as text.  Raises CodaTypeError for anything else."""
    if isinstance(extent, Dim):
        return extent
    if isinstance(extent, str):
        match = _EXTENT.fullmatch(extent)
        if match is not None and int(match[3] or 1):
            return Dim(match[2], Fraction(int(match[1] or 1), int(match[3] or 1)))
    raise _no_dimension(f"`{extent}`" if isinstance(extent, str | int | float) else f"a {type(extent).__name__}")


@attrs.frozen
class Shape:
    """A declared shape: a kind, its dimensions, and a storage dtype or None.

    `shape.bf16` (`f16`, `f32`; of a parameter also `i32`, `i64`, `bool`) is the same shape of that dtype.
    """

    kind: Kind
    extents: tuple[Dim, ...] = ()
    dtype: str | None = None

    def __getattr__(self, name: str) -> Shape:
        if name in PARAM_DTYPES and self.dtype is None:
            return attrs.evolve(self, dtype=name)
        if name.startswith("_"):
            raise AttributeError(name)
        raise ShapeAttributeError(
            f"`{self}` has no dtype `{name}`" if self.dtype is None else f"`{self}` has a dtype already",
            here(),
            hint=f"did you mean `{_ALIASES[name]}`?" if name in _ALIASES else f"there are {', '.join(PARAM_DTYPES)}",
        )

    def __getitem__(self, _: object) -> Shape:
        has = "has its dimensions" if self.extents else "has no dimensions"
        raise CodaTypeError(f"`{self}` {has}", here())

    def __str__(self) -> str:
        extents = f"[{', '.join(map(str, self.extents))}]" if self.extents else ""
        return f"{self.kind.word}{extents}" + (f": {self.dtype}" if self.dtype else "")

    __repr__ = __str__


class ShapeAttributeError(CodaTypeError, AttributeError):
    """A shape has no such attribute."""


@attrs.frozen
class ShapeOf:
    """`tile`, `row` or `col`, which wants its dimensions: `tile[M, N]`; `row[B, N]` is one row per sample."""

    kind: Kind

    def __getitem__(self, extents: object) -> Shape:
        given = extents if isinstance(extents, tuple) else (extents,)
        kind = Kind.written(self.kind.word, len(given))
        if kind is None:
            wanted = self.kind.axes
            raise CodaTypeError(
                f"a {self.kind.value} has {wanted} dimension{'' if wanted == 1 else 's'}, got {len(given)}",
                here(),
                hint=f"write `{EXAMPLES[self.kind]}`",
            )
        return Shape(kind, tuple(map(dim, given)))

    def __repr__(self) -> str:
        return self.kind.value


M, N, B = Dim("M"), Dim("N"), Dim("B")
scalar = Shape(Kind.SCALAR)
row, col, tile = ShapeOf(Kind.ROW), ShapeOf(Kind.COL), ShapeOf(Kind.TILE)
_OF_KIND: dict[str, Shape | ShapeOf] = {"scalar": scalar, "row": row, "col": col, "tile": tile}


def shape(given: object) -> Shape | None:
    """A shape given as an object or as the language's text; None where it is nothing that means a shape.

    Raises CodaTypeError where a shape is meant, but is wrong.
    """
    if isinstance(given, Shape):
        return given
    if isinstance(given, ShapeOf):
        raise CodaTypeError(f"`{given}` has no dimensions", here(), hint=f"write `{EXAMPLES[given.kind]}`")
    match = _SHAPE.fullmatch(given) if isinstance(given, str) else None
    if match is None or match[1] not in _OF_KIND:
        return None
    found = _OF_KIND[match[1]]
    if match[2] is not None:
        found = found[tuple(match[2].split(","))]
    checked = shape(found)
    return checked if checked is None or match[3] is None else attrs.evolve(checked, dtype=storage(match[3]))


def storage(given: object) -> str:
    """A storage dtype given by name or as torch's.  Raises CodaTypeError where it is none."""
    text = str(given).removeprefix("torch.") if not isinstance(given, str) else given
    if isinstance(given, str) and text in PARAM_DTYPES:
        return text
    meant = _ALIASES.get(text, text if text == "bool" else None)
    if meant is not None and not isinstance(given, str | type):
        return meant
    raise CodaTypeError(
        f"unknown dtype `{text}`",
        here(),
        hint=f"did you mean `{meant}`?" if meant else f"there are {', '.join(PARAM_DTYPES)}",
    )
