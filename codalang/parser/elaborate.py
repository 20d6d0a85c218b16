"""Syntax tree -> IR: shapes become types, statements become outputs.  Expressions are evaluated in evaluate.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from codalang.errors import CodaTypeError, Loc
from codalang.ir.build import EpilogueBuilder
from codalang.ir.epilogue import Epilogue
from codalang.ir.names import AXES, DISCARD, default_dims
from codalang.ir.states import StateDef
from codalang.ir.types import (
    INTEGER_DTYPES,
    PARAM_DTYPES,
    STORAGE_DTYPES,
    WIDTHS,
    Dims,
    Dtype,
    Kind,
    ValueType,
    register_dtype,
)
from codalang.parser import syntax
from codalang.parser.complaints import shorten, suggestion
from codalang.parser.dtypes import storage_dtype
from codalang.parser.evaluate import Evaluator
from codalang.parser.files import File
from codalang.parser.syntax import Span, Word

_OR_PER_SAMPLE = ", or `row[B, N]` for one row per sample"
_EXAMPLES = {"scalar": "scalar", "row": "row[N]", "col": "col[M]", "tile": "tile[M, N]"}
_FOLDED_HINTS = {
    Dtype.F32: "`float(i)` makes a number of an index or a mask",
    Dtype.I32: "an index comes from `row_index()`, `col_index()` or a parameter",
    Dtype.BOOL: "compare first: `x != 0` makes a mask of a number",
}


def elaborate(definition: syntax.Epilogue, file: File, state: Callable[[File, Word], StateDef]) -> Epilogue:
    """The IR of one epilogue; `state` gives the definition that a name means in a file.

    Raises CodaTypeError where shapes, dimensions or types do not fit.
    """
    return _Elaborator(definition, file, state).run()


class _Elaborator:
    def __init__(self, definition: syntax.Epilogue, file: File, state: Callable[[File, Word], StateDef]) -> None:
        self.definition = definition
        self.file = file
        self.state = state
        self.builder = EpilogueBuilder(definition.name.text, self._dims(), self._loc(definition.name.span))
        self.builder.precise = definition.precise
        self.evaluator = Evaluator(self.builder, file)
        self.stored: dict[str, int] = {}

    def run(self) -> Epilogue:
        for param in self.definition.params:
            dtype = self._dtype(param.dtype, PARAM_DTYPES)
            type_ = self._type(param.shape, register_dtype(dtype))
            loc = self._loc(param.name.span.to((param.dtype or param.shape).span))
            self.evaluator.bind(param.name.text, self.builder.param(param.name.text, type_, dtype, loc))
        for statement in self.definition.statements:
            self._statement(statement)
        self.evaluator.finish()
        return self.builder.finish()

    def _loc(self, span: Span) -> Loc:
        return self.file.locate(span)

    # Shapes and dimensions

    def _dims(self) -> Dims:
        """The symbols of rows, columns and samples: as declared after the name, or where they are first used."""
        found: dict[str, Word] = dict(zip(AXES, self.definition.dims or (), strict=False))
        for shape in self._shapes():
            kind = self._kind(shape)
            extents = list(shape.extents)
            if kind.has_rows:
                self._same_dim(found, extents.pop(0), "samples" if kind is Kind.ROWS else "rows", shape)
            if kind.has_columns:
                self._same_dim(found, extents.pop(0), "columns", shape)
        self._check_different(found)
        return default_dims(*(found[axis].text if axis in found else None for axis in AXES))

    def _check_different(self, found: dict[str, Word]) -> None:
        """One symbol means one number."""
        for first, second in (("rows", "columns"), ("rows", "samples"), ("columns", "samples")):
            if first in found and second in found and found[first].text == found[second].text:
                raise CodaTypeError(
                    f"{first} and {second} are both called `{shorten(found[first].text)}`",
                    self._loc(found[second].span),
                    notes=((self._loc(found[first].span), f"these are the {first}"),),
                    hint="one symbol means one number; give the two dimensions two names"
                    if second == "columns"
                    else "`row[B, N]` has one row per sample of M/B rows; a number for each row and column is a tile",
                )

    def _shapes(self) -> Iterable[syntax.Shape]:
        yield from (p.shape for p in self.definition.params)
        for statement in self.definition.statements:
            if isinstance(statement, syntax.Store | syntax.Reduce | syntax.Fold) and statement.shape is not None:
                yield statement.shape

    def _kind(self, shape: syntax.Shape) -> Kind:
        """The kind of a shape, its number of extents checked."""
        word = shape.kind
        if word.text not in _EXAMPLES:
            raise CodaTypeError(
                f"unknown shape `{shorten(word.text)}`",
                self._loc(word.span),
                hint="a parameter declares a shape, then a dtype: `scalar: i32`"
                if word.text in PARAM_DTYPES
                else suggestion(word.text, [*_EXAMPLES]) or f"there are {', '.join(_EXAMPLES.values())}",
            )
        kind = Kind.written(word.text, len(shape.extents))
        if kind is None:
            wanted = Kind(word.text).axes
            raise CodaTypeError(
                f"a {word.text} has {wanted} dimension{'' if wanted == 1 else 's'}, got {len(shape.extents)}",
                self._loc(shape.span),
                hint=f"write `{_EXAMPLES[word.text]}`" + ("" if word.text != "row" else _OR_PER_SAMPLE),
            )
        return kind

    def _same_dim(self, found: dict[str, Word], extent: syntax.Extent, axis: str, shape: syntax.Shape) -> None:
        """Note the symbol of an axis.  Raises CodaTypeError where it is another one than before, or no symbol."""
        if extent.symbol is None:
            raise CodaTypeError(
                f"`{shorten(extent.text)}` is no dimension: dimensions are symbols, bound at the call",
                self._loc(extent.span),
                hint="write a name, such as M or N",
            )
        if axis != "columns" and extent.width != 1:
            raise CodaTypeError(
                f"the {axis} of a {shape.kind.text} cannot be `{shorten(extent.text)}`",
                self._loc(extent.span),
                hint="only columns are halved (`split`) or doubled (`join`)",
            )
        if extent.width not in WIDTHS:
            raise CodaTypeError(
                f"`{shorten(extent.text)}` is no width",
                self._loc(extent.span),
                hint="widths are {0}/2, {0} and 2*{0}".format(shorten(extent.symbol)),
            )
        known = found.setdefault(axis, Word(extent.symbol, extent.span))
        if known.text != extent.symbol:
            vector = shape.kind.text in ("row", "col") and axis != "samples"
            have, want = shorten(extent.symbol), shorten(known.text)
            raise CodaTypeError(
                f"the {axis} of this {shape.kind.text} are `{have}`, expected `{want}`",
                self._loc(extent.span),
                notes=((self._loc(known.span), f"the {axis} are `{want}` here"),),
                hint="a col has a number for each row, a row a number for each column" if vector else None,
            )

    def _type(self, shape: syntax.Shape, dtype: Dtype = Dtype.F32) -> ValueType:
        kind = self._kind(shape)
        return ValueType(kind, shape.extents[-1].width if kind.has_columns else None, dtype)

    def _dtype(self, word: Word | None, known: tuple[str, ...] = STORAGE_DTYPES) -> str | None:
        return storage_dtype(word, self.file, known)

    # Statements

    def _statement(self, statement: syntax.Statement) -> None:
        if isinstance(statement, syntax.Let | syntax.LetTuple):
            self.evaluator.let(statement)
        elif isinstance(statement, syntax.Keep):
            self._keep(statement)
        elif isinstance(statement, syntax.Fold):
            self._fold(statement)
        elif isinstance(statement, syntax.Store):
            self._store(statement)
        elif isinstance(statement, syntax.Reduce):
            self._reduce(statement)

    def _declared(self, name: Word, shape: syntax.Shape | None, keyword: str, example: str) -> ValueType:
        if shape is not None:
            return self._type(shape)
        raise CodaTypeError(
            f"`{keyword} {shorten(name.text)}` does not declare its shape",
            self._loc(name.span),
            hint=f"write `{keyword} {shorten(name.text)}: {example} = ...`",
        )

    def _store(self, statement: syntax.Store) -> None:
        (expression,) = syntax.expressions(statement)
        value = self.evaluator.node(expression)
        type_ = self._declared(statement.name, statement.shape, "store", self._show(value))
        dtype, loc = self._dtype(statement.dtype), self._where(statement)
        name = statement.name.text
        self._fitting([(value, expression.span)], lambda: self.builder.store(name, value, type_, dtype, loc))
        self.stored[name] = value

    def _reduce(self, statement: syntax.Reduce) -> None:
        call = statement.value
        assert isinstance(call, syntax.Call)
        value = self.evaluator.node(call.operands[0])
        type_ = self._declared(statement.name, statement.shape, "reduce", "col[M]")
        dtype, loc = self._dtype(statement.dtype), self._where(statement)
        name, how = statement.name.text, call.function.text
        spans = [(value, call.operands[0].span)]
        self._fitting(spans, lambda: self.builder.reduce(name, value, type_, how, dtype, loc))

    def _fold(self, statement: syntax.Fold) -> None:
        call = statement.value
        assert isinstance(call, syntax.Call)
        definition = self.state(self.file, call.function)
        values = [
            self.evaluator.node(operand, dtype)
            for operand, (_, dtype) in zip(call.operands, definition.inputs, strict=True)
        ]
        for operand, value, wanted in zip(call.operands, values, definition.inputs, strict=True):
            self._check_folded(call.function, operand, value, wanted)
        type_ = self._declared(statement.names[0], statement.shape, "state", "col[M]")
        names = [n.text for n in statement.names]
        self._check_count(statement, definition)
        dtype = self._result_dtype(statement.dtype, definition, names)
        loc = self._where(statement)
        spans = [(v, operand.span) for v, operand in zip(values, call.operands, strict=True)]
        self._fitting(spans, lambda: self.builder.state(names, values, type_, definition, dtype, loc))

    def _check_folded(self, state: Word, operand: syntax.Expression, value: int, wanted: tuple[str, Dtype]) -> None:
        name, dtype = wanted
        if self.builder.nodes[value].type.dtype is not dtype:
            raise CodaTypeError(
                f"`{shorten(name)}` of `{shorten(state.text)}` must be {dtype.value}, got {self._show(value)}",
                self._loc(operand.span),
                hint=_FOLDED_HINTS[dtype],
            )

    def _check_count(self, statement: syntax.Fold, definition: StateDef) -> None:
        if len(statement.names) > len(definition.results):
            results = ", ".join(shorten(name) for name, _ in definition.results)
            raise CodaTypeError(
                f"`{shorten(definition.name)}` has fewer results than there are names: {results}",
                self._loc(statement.names[len(definition.results)].span),
            )

    def _result_dtype(self, word: Word | None, definition: StateDef, names: list[str]) -> str | None:
        """An annotation that suits every result that is named."""
        named = zip(names, definition.results, strict=False)  # too many names are an error of their own
        dtypes = {dtype for name, (_, dtype) in named if name != DISCARD}
        if word is not None and len(dtypes) > 1:
            raise CodaTypeError(
                f"`{shorten(word.text)}` cannot be the dtype of all results of `{shorten(definition.name)}`",
                self._loc(word.span),
                hint="leave it out: numbers are stored as f32, indices as i32",
            )
        return self._dtype(word, INTEGER_DTYPES if Dtype.I32 in dtypes else STORAGE_DTYPES)

    def _keep(self, statement: syntax.Keep) -> None:
        for name in statement.names:
            value = self.evaluator.node(syntax.Name(name.text, name.span)) if self.evaluator.has(name.text) else None
            node = value if value is not None else self.stored[name.text]
            self.builder.keep(node, statement.how, self._loc(name.span))

    def _where(self, statement: syntax.Store | syntax.Reduce | syntax.Fold) -> Loc:
        """From a declared name to the end of its declaration."""
        assert statement.shape is not None
        first = statement.names[0] if isinstance(statement, syntax.Fold) else statement.name
        return self._loc(first.span.to((statement.dtype or statement.shape).span))

    def _show(self, value: int) -> str:
        return self.builder.nodes[value].type.show(self.builder.dims)

    def _fitting(self, values: list[tuple[int, Span]], declare: Callable[[], None]) -> None:
        """Declare an output; an error about it also points at its values."""
        try:
            declare()
        except CodaTypeError as error:
            notes = tuple((self._loc(span), f"this is {self._show(value)}") for value, span in values)
            raise CodaTypeError(error.message, error.loc, notes=notes, hint=error.hint) from None
