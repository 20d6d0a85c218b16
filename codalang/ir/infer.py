"""Type inference: the type of an op's result from those of its operands, or an error that says what does not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from codalang.errors import CodaTypeError, Loc
from codalang.ir.ops import OPS, OpInfo
from codalang.ir.types import STORAGE_DTYPES, WIDTHS, Dims, Dtype, Kind, ValueType, show_extent


def infer(
    op: str,
    operands: Sequence[ValueType],
    dims: Dims,
    loc: Loc | None = None,
    attr: str | float | int | None = None,
) -> ValueType:
    """The type of `op(operands)`, with its static attribute.

    Kinds broadcast: a row with a col gives a tile.  Widths must agree.
    Raises CodaTypeError (at `loc`) for a wrong count, dtype, kind, width or attribute, KeyError for an unknown op.
    """
    info = OPS[op]
    spelled = info.infix or op
    if len(operands) != len(info.operands):
        raise CodaTypeError(f"`{spelled}` takes {len(info.operands)} operands, got {len(operands)}", loc)
    result = _result_dtype(info, spelled, operands, dims, loc)
    _check_attribute(info, op, attr, loc)
    if not operands:
        assert info.kind is not None
        return ValueType(info.kind, Fraction(1) if info.kind.has_columns else None, result)
    widths = [t.width for t in operands if t.width is not None]
    for other in widths[1:]:
        if other != widths[0]:
            raise CodaTypeError(
                f"`{spelled}` combines {show_extent(widths[0], dims[1])} columns with {show_extent(other, dims[1])}",
                loc,
                hint="split the wider value, or join two of the narrower ones",
            )
    kind = Kind.joined([t.kind for t in operands])
    width = widths[0] if widths else None
    if info.resize:
        spelled = "split" if info.resize == "halve" else "join"
        if width is None:
            raise CodaTypeError(
                f"`{spelled}` needs a value with columns (row or tile), got {operands[0].show(dims)}",
                loc,
            )
        resized = width / 2 if info.resize == "halve" else width * 2
        if resized not in WIDTHS:
            raise CodaTypeError(
                f"`{spelled}` of {show_extent(width, dims[1])} columns would make "
                f"a value of {resized} * {dims[1]} columns; widths are {dims[1]}/2, {dims[1]} and 2*{dims[1]}",
                loc,
            )
        width = resized
    if info.attr == "group" and width is None:
        raise CodaTypeError(f"`{op}` needs a value with columns (row or tile), got {operands[0].show(dims)}", loc)
    return ValueType(kind, width, result)


def _result_dtype(info: OpInfo, spelled: str, operands: Sequence[ValueType], dims: Dims, loc: Loc | None) -> Dtype:
    """The result's dtype by the first signature that fits, or an error about the operand that fits none."""
    have = tuple(t.dtype for t in operands)
    for wanted, result in info.signatures:
        if wanted == have:
            return result
    for position, operand in enumerate(operands, start=1):
        allowed = {wanted[position - 1] for wanted, _ in info.signatures}
        if operand.dtype not in allowed:
            names = " or ".join(sorted(d.value for d in allowed))
            raise CodaTypeError(
                f"operand {position} of `{spelled}` must be {names}, got {operand.show(dims)}",
                loc,
                hint=_dtype_hint(operand.dtype, allowed),
            )
    shown = ", ".join(t.show(dims) for t in operands)
    raise CodaTypeError(f"the operands of `{spelled}` must agree in dtype, got {shown}", loc, hint=_INDEX_HINT)


_INDEX_HINT = "`float(i)` makes a number of an index, `i32(3)` is the index 3"
_MASK_HINT = "compare first: `x != 0` makes a mask of a number, `where(mask, 1, 0)` a number of a mask"


def _dtype_hint(have: Dtype, allowed: set[Dtype]) -> str:
    """What to do with an operand of another dtype than those allowed."""
    if have is Dtype.I32:
        return _INDEX_HINT if Dtype.F32 in allowed else "compare first: `i == 3` makes a mask of an index"
    if have is Dtype.F32 and Dtype.I32 in allowed:
        return "it is a number already, and no number becomes an index"
    return _MASK_HINT


def _check_attribute(info: OpInfo, op: str, attr: str | float | int | None, loc: Loc | None) -> None:
    fits = {
        None: attr is None,
        "exponent": isinstance(attr, float) and math.isfinite(attr),
        "dtype": attr in STORAGE_DTYPES,
        "group": isinstance(attr, int) and not isinstance(attr, bool) and attr >= 2 and attr & (attr - 1) == 0,
    }[info.attr]
    wanted = {
        None: "no attribute",
        "exponent": "a finite constant exponent",
        "dtype": f"a storage dtype ({', '.join(STORAGE_DTYPES)})",
        "group": "a constant group size that is a power of two",
    }[info.attr]
    if not fits:
        raise CodaTypeError(f"`{op}` needs {wanted}, got {attr!r}", loc)
