"""Type inference: the type of an op's result from those of its operands, or an error that says what does not fit."""

from __future__ import annotations

from collections.abc import Sequence

from codalang.errors import CodaTypeError, Loc
from codalang.ir.ops import OPS
from codalang.ir.types import WIDTHS, Kind, ValueType, show_extent


def infer(op: str, operands: Sequence[ValueType], dims: tuple[str, str], loc: Loc | None = None) -> ValueType:
    """The type of `op(operands)`.

    Kinds broadcast: a row with a col gives a tile.  Widths must agree.
    Raises CodaTypeError (at `loc`) for a wrong count, dtype, kind or width, KeyError for an unknown op.
    """
    info = OPS[op]
    spelled = info.infix or op
    if len(operands) != len(info.operands):
        raise CodaTypeError(f"`{spelled}` takes {len(info.operands)} operands, got {len(operands)}", loc)
    for position, (want, have) in enumerate(zip(info.operands, operands, strict=True), start=1):
        if want is not have.dtype:
            raise CodaTypeError(
                f"operand {position} of `{spelled}` must be {want.value}, got {have.show(dims)}",
                loc,
                hint="compare first: `x != 0` makes a mask of a number, `where(mask, 1, 0)` a number of a mask",
            )
    widths = [t.width for t in operands if t.width is not None]
    for other in widths[1:]:
        if other != widths[0]:
            raise CodaTypeError(
                f"`{spelled}` combines {show_extent(widths[0], dims[1])} columns with {show_extent(other, dims[1])}",
                loc,
                hint="split the wider value, or join two of the narrower ones",
            )
    kind = Kind.of(any(t.kind.has_rows for t in operands), any(t.kind.has_columns for t in operands))
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
    return ValueType(kind, width, info.result)
