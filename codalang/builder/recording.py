"""What a running Python function is recorded into: an epilogue in the making.

Recordings are per thread and may nest (a decorator inside a function that is being recorded).  Every node gets the
place in the epilogue's own function as its location; an error points at the innermost line of the user's, with notes
on the calls that lead there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import NoReturn

from codalang.builder import place
from codalang.builder.place import Here
from codalang.builder.shapes import Dim, Shape
from codalang.errors import CodaError, CodaTypeError, Loc
from codalang.ir.build import EpilogueBuilder
from codalang.ir.names import AXES, default_dims, is_name
from codalang.ir.types import WIDTHS, Kind, ValueType, show_extent


class Recording:
    """The builder, and the dimensions as far as they are known."""

    def __init__(self, what: str, name: str, code: CodeType, loc: Loc) -> None:
        self.what = what
        self.code = code
        self.builder = EpilogueBuilder(name, default_dims(None, None), loc)
        self._dims: dict[str, tuple[str, Loc]] = {}

    @property
    def name(self) -> str:
        """The epilogue's name."""
        return self.builder.name

    def chain(self) -> list[Here]:
        """The user's frames from the innermost to the function's own."""
        chain = []
        for found in place.frames():
            chain.append(found)
            if found.frame.f_code is self.code:
                return chain
        return chain[:1]

    def op(self, op: str, *operands: int, attr: str | float | int | None = None, result: int = 0) -> int:
        """Record an op.  `result` says which of the names in `a, b = ...` is this node's."""
        chain = self.chain()
        hint = place.name_of(chain, result)
        hint = hint if hint is not None and is_name(hint) else None
        try:
            node = self.builder.op(op, *operands, attr=attr, loc=chain[-1].loc, hint=hint)
            if self.what == "state" and self.builder.nodes[node].type.kind is not Kind.SCALAR:
                raise CodaTypeError(f"a state works on single elements: it has no `{op}`")
        except CodaError as error:
            raise self.located(error, chain) from None
        return node

    def located(self, error: CodaError, chain: list[Here] | None = None) -> CodaError:
        """The error at the innermost line of the user's."""
        chain = chain or self.chain()
        return type(error)(error.message, chain[0].loc, notes=(*error.notes, *place.notes(chain)), hint=error.hint)

    def fail(self, message: str, hint: str | None = None) -> NoReturn:
        """Raise CodaTypeError at the innermost line of the user's."""
        raise self.located(CodaTypeError(message, hint=hint))

    def declare(self, shape: Shape, loc: Loc) -> ValueType:
        """The type that a shape means here.  Its symbols become the epilogue's, or must be them."""
        extents = list(shape.extents)
        if shape.kind.has_rows:
            self._dim("samples" if shape.kind is Kind.ROWS else "rows", extents.pop(0), shape, loc)
        width = None
        if shape.kind.has_columns:
            width = extents[0].width
            self._dim("columns", extents[0], shape, loc)
        known = [self._dims[axis][0] if axis in self._dims else None for axis in AXES]
        self.builder.dims = default_dims(*known)
        return ValueType(shape.kind, width)

    def fix_dims(self, dims: tuple[Dim, Dim], loc: Loc) -> None:
        """Declare the symbols of rows and columns before any shape does."""
        self.declare(Shape(Kind.TILE, dims), loc)

    def _dim(self, axis: str, extent: Dim, shape: Shape, loc: Loc) -> None:
        have, kind = extent.symbol, shape.kind.word
        if axis != "columns" and extent.width != 1:
            raise CodaTypeError(
                f"the {axis} of a {kind} cannot be `{extent}`",
                loc,
                hint="only columns are halved (`split`) or doubled (`join`)",
            )
        if extent.width not in WIDTHS:
            widths = ", ".join(show_extent(w, have) for w in WIDTHS[:-1])
            raise CodaTypeError(
                f"`{extent}` is no width", loc, hint=f"widths are {widths} and {show_extent(WIDTHS[-1], have)}"
            )
        want, first = self._dims.setdefault(axis, (have, loc))
        if have != want:
            raise CodaTypeError(
                f"the {axis} of this {kind} are `{have}`, expected `{want}`",
                loc,
                notes=((first, f"the {axis} are `{want}` here"),),
                hint="a col has a number for each row, a row a number for each column"
                if kind in ("row", "col") and axis != "samples"
                else None,
            )
        for other in AXES:
            if other != axis and other in self._dims and self._dims[other][0] == have:
                earlier, later = sorted((axis, other), key=AXES.index)
                raise CodaTypeError(
                    f"{earlier} and {later} are both called `{have}`",
                    loc,
                    notes=((self._dims[other][1], f"these are the {other}"),),
                    hint="one symbol means one number; give the two dimensions two names"
                    if later == "columns"
                    else "`row[B, N]` has one row per sample of M/B rows; a number for each row and column is a tile",
                )


class _Active(threading.local):
    """The recordings of this thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Recording] = []


_active = _Active()


def current() -> Recording | None:
    """The recording that Python is in, or None."""
    return _active.stack[-1] if _active.stack else None


def wanted(what: str) -> Recording:
    """The recording that Python is in.  Raises CodaTypeError where there is none."""
    recording = current()
    if recording is None:
        raise CodaTypeError(
            f"{what} is used outside of an epilogue",
            place.here(),
            hint="use it in a function decorated with `@codalang.epilogue`, or in one that such a function calls",
        )
    return recording


@contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    """Record what Python does inside."""
    _active.stack.append(recording)
    try:
        yield
    finally:
        _active.stack.pop()
