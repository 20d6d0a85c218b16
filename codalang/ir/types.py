"""What a value is: a shape kind, a width, and a dtype.

The kinds are the ways a value can vary over one GEMM output of shape [M, N]:

| kind     | varies over | shape    |
|----------|-------------|----------|
| scalar   | nothing     | []       |
| row      | columns     | [w*N]    |
| col      | rows        | [M]      |
| tile     | both        | [M, w*N] |
| rows     | both        | [B, w*N] |

`rows`, written `row[B, N]`, is one row per *sample*: the M rows are B samples of M/B consecutive rows each, which share
it.  It is small, as a row is, and what is computed from it, from rows and from scalars alone is so, too.

`w`, the *width*, counts columns in units of the epilogue's base extent N: `split` halves it, `join` doubles it.
A col or a scalar has no columns of its own, hence no width (None).

In registers a value is f32, i32 for an index or a target, or bool for a mask.  *Storage* dtypes belong to the tensors
an epilogue loads and stores: bf16, f16 and f32 are widened to f32; i32 and i64 are i32 in registers (an i64 that
does not fit is the nearest that does), bool is bool.
None stands for "the floating dtype of the tensor passed at the call".
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from fractions import Fraction

import attrs

# The widths a value may have.  Quarter and quadruple widths have no register layout of their own.
WIDTHS = (Fraction(1, 2), Fraction(1), Fraction(2))

STORAGE_DTYPES = ("bf16", "f16", "f32")
INTEGER_DTYPES = ("i32", "i64")
PARAM_DTYPES = (*STORAGE_DTYPES, *INTEGER_DTYPES, "bool")


# The symbols of an epilogue's extents: rows and columns, and samples where there are values of one row per sample.
Dims = tuple[str, ...]


class Kind(enum.Enum):
    """How a value varies over the output; see the table above."""

    SCALAR = "scalar"
    ROW = "row"
    COL = "col"
    TILE = "tile"
    ROWS = "rows"

    @property
    def has_rows(self) -> bool:
        """True where the value may differ from row to row (col, tile, rows)."""
        return self in (Kind.COL, Kind.TILE, Kind.ROWS)

    @property
    def has_columns(self) -> bool:
        """True where the value differs from column to column (row, tile, rows)."""
        return self in (Kind.ROW, Kind.TILE, Kind.ROWS)

    @property
    def per_row(self) -> bool:
        """True where there is an element, or more, for each single row (col, tile)."""
        return self in (Kind.COL, Kind.TILE)

    @property
    def word(self) -> str:
        """How the language calls it: one row per sample is a `row`, too, of two extents."""
        return "row" if self is Kind.ROWS else self.value

    @property
    def axes(self) -> int:
        """How many extents its shape has."""
        return self.has_rows + self.has_columns

    @staticmethod
    def joined(kinds: Collection[Kind]) -> Kind:
        """The kind of what is computed from values of these kinds, elementwise."""
        if Kind.ROWS in kinds and not any(k.per_row for k in kinds):
            return Kind.ROWS
        return _KIND_OF[any(k.has_rows for k in kinds), any(k.has_columns for k in kinds)]

    @staticmethod
    def written(word: str, extents: int) -> Kind | None:
        """The kind that is written as this word with so many extents."""
        return next((k for k in Kind if (k.word, k.axes) == (word, extents)), None)


_KIND_OF = {
    (False, False): Kind.SCALAR,
    (False, True): Kind.ROW,
    (True, False): Kind.COL,
    (True, True): Kind.TILE,
}


class Dtype(enum.Enum):
    """The dtype of a value in registers."""

    F32 = "f32"
    I32 = "i32"
    BOOL = "bool"


def register_dtype(storage: str | None) -> Dtype:
    """The register dtype of a loaded storage dtype; see the module's docstring."""
    if storage in INTEGER_DTYPES:
        return Dtype.I32
    return Dtype.BOOL if storage == "bool" else Dtype.F32


@attrs.frozen
class ValueType:
    """The type of an SSA value: kind, width (None without columns) and register dtype."""

    kind: Kind
    width: Fraction | None = None
    dtype: Dtype = Dtype.F32

    def __attrs_post_init__(self) -> None:
        if (self.width is None) == self.kind.has_columns:
            raise ValueError(f"a {self.kind.value} cannot have width {self.width}")

    def show(self, dims: Dims) -> str:
        """The type as it is written in the language, e.g. `tile[M, N/2]`."""
        text = show_shape(self.kind, self.width, dims)
        return text if self.dtype is Dtype.F32 else f"{text} of {self.dtype.value}"


def show_extent(width: Fraction, n: str) -> str:
    """A number of columns as written: `N`, `N/2` or `2*N`."""
    if width == 1:
        return n
    return f"{n}/{width.denominator}" if width < 1 else f"{width.numerator}*{n}"


def show_shape(kind: Kind, width: Fraction | None, dims: Dims) -> str:
    """A declared shape as written: `scalar`, `row[N]`, `col[M]`, `tile[M, N/2]`, `row[B, N]`."""
    rows = [dims[2]] if kind is Kind.ROWS else [dims[0]] if kind.has_rows else []
    parts = rows + ([show_extent(width, dims[1])] if width is not None else [])
    return kind.word + (f"[{', '.join(parts)}]" if parts else "")


SCALAR = ValueType(Kind.SCALAR)
COL = ValueType(Kind.COL)


def row(width: Fraction | int = 1) -> ValueType:
    """The type of an f32 row of `width * N` columns."""
    return ValueType(Kind.ROW, Fraction(width))


def tile(width: Fraction | int = 1) -> ValueType:
    """The type of an f32 tile of `width * N` columns."""
    return ValueType(Kind.TILE, Fraction(width))
