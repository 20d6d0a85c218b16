"""Syntax tree -> IR: shapes become types, expressions become nodes, `fn`s are inlined.

An `fn` is inlined by binding: its parameters name the nodes of the arguments and its body is evaluated once per
distinct list of arguments, so a chain of functions costs what its results cost.  Names inside cannot meet names
outside.  A node made inside an `fn` has the location of the call in the epilogue, which is the user's expression.

Evaluation keeps a stack of its own, so neither nesting nor chains of functions are limited by Python's.
Names must have been checked (names.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from codalang.errors import CodaError, CodaTypeError, CodaUnsupportedError, Loc, Source
from codalang.ir.build import EpilogueBuilder
from codalang.ir.epilogue import Epilogue
from codalang.ir.names import DISCARD, default_dims
from codalang.ir.types import STORAGE_DTYPES, WIDTHS, Kind, ValueType
from codalang.parser import syntax
from codalang.parser.complaints import shorten
from codalang.parser.names import locate, suggestion
from codalang.parser.syntax import Span, Word

# Steps taken inside `fn`s, per epilogue.  f(x) = g(g(x)), g(x) = h(h(x)), ... doubles with every line.
INLINING_LIMIT = 250_000

_DTYPE_NAMES = {
    "float32": "f32",
    "fp32": "f32",
    "float": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "fp16": "f16",
    "half": "f16",
}
_EXAMPLES = {Kind.SCALAR: "scalar", Kind.ROW: "row[{1}]", Kind.COL: "col[{0}]", Kind.TILE: "tile[{0}, {1}]"}


def elaborate(
    definition: syntax.Epilogue, functions: Mapping[str, syntax.Function], source: Source, lines: list[str]
) -> Epilogue:
    """The IR of one epilogue.  Raises CodaTypeError where shapes, dimensions or types do not fit."""
    return _Elaborator(definition, functions, source, lines).run()


@attrs.define
class _Frame:
    """The values that names mean in an epilogue, or in one call of an `fn`."""

    values: dict[str, int]
    call: syntax.Call | None = None  # the call that this frame is of
    caller: _Frame | None = None
    site: Loc | None = None  # the call in the epilogue that led here


@attrs.frozen
class _Apply:
    """The operands are evaluated: apply the op."""

    expression: syntax.Apply | syntax.Call


@attrs.frozen
class _Enter:
    """The arguments are evaluated: evaluate the `fn`'s body."""

    call: syntax.Call


@attrs.frozen
class _Bind:
    """A `let` of an `fn` is evaluated: name its value."""

    statement: syntax.Let | syntax.LetPair


@attrs.frozen
class _Leave:
    """An `fn`'s result is evaluated: remember it."""

    key: tuple[str, tuple[int, ...]]


_Task = syntax.Expression | _Apply | _Enter | _Bind | _Leave


class _Elaborator:
    def __init__(
        self,
        definition: syntax.Epilogue,
        functions: Mapping[str, syntax.Function],
        source: Source,
        lines: list[str],
    ) -> None:
        self.definition = definition
        self.functions = functions
        self.source = source
        self.lines = lines
        self.builder = EpilogueBuilder(definition.name.text, self._dims(), self._loc(definition.name.span))
        self.frame = _Frame({})
        self.called: dict[tuple[str, tuple[int, ...]], int] = {}
        self.steps = 0
        # Names given inside `fn`s count only where the epilogue itself gives none.
        self.hints: list[tuple[int, str]] = []

    def run(self) -> Epilogue:
        for param in self.definition.params:
            type_, dtype = self._type(param.shape), self._dtype(param.dtype)
            loc = self._loc(param.name.span.to((param.dtype or param.shape).span))
            self.frame.values[param.name.text] = self.builder.param(param.name.text, type_, dtype, loc)
        for statement in self.definition.statements:
            self._statement(statement)
        for value, name in self.hints:
            self.builder.hint(value, name)
        return self.builder.finish()

    def _loc(self, span: Span) -> Loc:
        return locate(self.source, self.lines, span)

    # Shapes and dimensions

    def _dims(self) -> tuple[str, str]:
        """The symbols of rows and columns: as declared after the name, or where they are first used."""
        rows, columns = self.definition.dims or (None, None)
        for shape in self._shapes():
            kind = self._kind(shape)
            extents = list(shape.extents)
            if kind.has_rows:
                rows = self._same_dim(rows, extents.pop(0), "rows", shape)
            if kind.has_columns:
                columns = self._same_dim(columns, extents.pop(0), "columns", shape)
        names = default_dims(rows.text if rows else None, columns.text if columns else None)
        if names[0] == names[1] and rows and columns:
            raise CodaTypeError(
                f"rows and columns are both called `{shorten(names[0])}`",
                self._loc(columns.span),
                notes=((self._loc(rows.span), "these are the rows"),),
                hint="one symbol means one number; give the two dimensions two names",
            )
        return names

    def _shapes(self) -> Iterable[syntax.Shape]:
        yield from (p.shape for p in self.definition.params)
        for statement in self.definition.statements:
            if isinstance(statement, syntax.Store | syntax.Reduce) and statement.shape is not None:
                yield statement.shape

    def _kind(self, shape: syntax.Shape) -> Kind:
        """The kind of a shape, its number of extents checked."""
        word = shape.kind
        names = [k.value for k in Kind]
        if word.text not in names:
            raise CodaTypeError(
                f"unknown shape `{shorten(word.text)}`",
                self._loc(word.span),
                hint=suggestion(word.text, names)
                or f"there are {', '.join(_EXAMPLES[k].format('M', 'N') for k in Kind)}",
            )
        kind = Kind(word.text)
        wanted = kind.has_rows + kind.has_columns
        if len(shape.extents) != wanted:
            raise CodaTypeError(
                f"a {word.text} has {wanted} dimension{'' if wanted == 1 else 's'}, got {len(shape.extents)}",
                self._loc(shape.span),
                hint=f"write `{_EXAMPLES[kind].format('M', 'N')}`",
            )
        return kind

    def _same_dim(self, known: Word | None, extent: syntax.Extent, axis: str, shape: syntax.Shape) -> Word:
        if extent.symbol is None:
            raise CodaTypeError(
                f"`{shorten(extent.text)}` is no dimension: dimensions are symbols, bound at the call",
                self._loc(extent.span),
                hint="write a name, such as M or N",
            )
        if axis == "rows" and extent.width != 1:
            raise CodaTypeError(
                f"the rows of a {shape.kind.text} cannot be `{shorten(extent.text)}`",
                self._loc(extent.span),
                hint="only columns are halved (`split`) or doubled (`join`)",
            )
        if extent.width not in WIDTHS:
            raise CodaTypeError(
                f"`{shorten(extent.text)}` is no width",
                self._loc(extent.span),
                hint="widths are {0}/2, {0} and 2*{0}".format(shorten(extent.symbol)),
            )
        if known is not None and known.text != extent.symbol:
            vector = shape.kind.text in ("row", "col")
            have, want = shorten(extent.symbol), shorten(known.text)
            raise CodaTypeError(
                f"the {axis} of this {shape.kind.text} are `{have}`, expected `{want}`",
                self._loc(extent.span),
                notes=((self._loc(known.span), f"the {axis} are `{want}` here"),),
                hint="a col has a number for each row, a row a number for each column" if vector else None,
            )
        return known or Word(extent.symbol, extent.span)

    def _type(self, shape: syntax.Shape) -> ValueType:
        kind = self._kind(shape)
        return ValueType(kind, shape.extents[-1].width if kind.has_columns else None)

    def _dtype(self, word: Word | None) -> str | None:
        if word is None or word.text in STORAGE_DTYPES:
            return word.text if word else None
        near = _DTYPE_NAMES.get(word.text)
        raise CodaTypeError(
            f"unknown dtype `{shorten(word.text)}`",
            self._loc(word.span),
            hint=f"did you mean `{near}`?" if near else f"there are {', '.join(STORAGE_DTYPES)}",
        )

    # Statements

    def _statement(self, statement: syntax.Statement) -> None:
        if isinstance(statement, syntax.Let):
            self._let(statement.name, self._value(statement.value))
        elif isinstance(statement, syntax.LetPair):
            self._let_pair(statement, self._value(_operand(statement.value)))
        elif isinstance(statement, syntax.Store):
            value = statement.value or syntax.Name(statement.name.text, statement.name.span)
            self._output(statement, self._value(value), value.span)
        elif isinstance(statement, syntax.Reduce):
            value = _operand(statement.value)
            self._output(statement, self._value(value), value.span)

    def _let(self, name: Word, value: int) -> None:
        self.frame.values[name.text] = value
        if self.frame.caller is None:
            self.builder.hint(value, name.text)
        else:
            self.hints.append((value, name.text))

    def _let_pair(self, statement: syntax.LetPair, value: int) -> None:
        for op, name in zip(("even", "odd"), statement.names, strict=True):
            half = self._op(op, (value,), statement.value.span)
            if name.text != DISCARD:
                self._let(name, half)

    def _output(self, statement: syntax.Store | syntax.Reduce, value: int, span: Span) -> None:
        name, shape = statement.name, statement.shape
        if shape is None:
            keyword = "store" if isinstance(statement, syntax.Store) else "reduce"
            have = self.builder.nodes[value].type.show(self.builder.dims)
            raise CodaTypeError(
                f"`{keyword} {shorten(name.text)}` does not declare its shape",
                self._loc(name.span),
                hint=f"write `{keyword} {shorten(name.text)}: {have if keyword == 'store' else 'col[M]'} = ...`",
            )
        type_, dtype = self._type(shape), self._dtype(statement.dtype)
        loc = self._loc(name.span.to((statement.dtype or shape).span))
        try:
            if isinstance(statement, syntax.Store):
                self.builder.store(name.text, value, type_, dtype, loc)
            else:
                assert isinstance(statement.value, syntax.Call)
                self.builder.reduce(name.text, value, type_, statement.value.function.text, dtype, loc)
        except CodaTypeError as error:
            have = self.builder.nodes[value].type.show(self.builder.dims)
            note = ((self._loc(span), f"this is {have}"),)
            raise CodaTypeError(error.message, error.loc, notes=note, hint=error.hint) from None

    # Expressions

    def _value(self, root: syntax.Expression) -> int:
        """The node of an expression."""
        tasks: list[tuple[_Task, _Frame]] = [(root, self.frame)]
        results: list[int] = []
        outer = self.frame
        while tasks:
            task, self.frame = tasks.pop()
            if self.frame.caller is not None:
                self._count_step()
            if isinstance(task, syntax.Name):
                results.append(self.frame.values[task.text])
            elif isinstance(task, syntax.Literal):
                results.append(self.builder.const(task.value, self._here(task.span)))
            elif isinstance(task, syntax.Apply | syntax.Call):
                then = (
                    _Enter(task)
                    if isinstance(task, syntax.Call) and task.function.text in self.functions
                    else _Apply(task)
                )
                tasks.append((then, self.frame))
                tasks.extend((operand, self.frame) for operand in reversed(task.operands))
            elif isinstance(task, _Apply):
                e = task.expression
                op = e.op if isinstance(e, syntax.Apply) else e.function.text
                results.append(self._op(op, _take(results, len(e.operands)), e.span))
            elif isinstance(task, _Enter):
                arguments = _take(results, len(task.call.operands))
                key = (task.call.function.text, arguments)
                if key in self.called:
                    results.append(self.called[key])
                else:
                    tasks.extend(self._enter(task.call, arguments))
            elif isinstance(task, _Bind):
                if isinstance(task.statement, syntax.Let):
                    self._let(task.statement.name, results.pop())
                else:
                    self._let_pair(task.statement, results.pop())
            else:
                self.called[task.key] = results[-1]
        self.frame = outer
        return results.pop()

    def _enter(self, call: syntax.Call, arguments: tuple[int, ...]) -> list[tuple[_Task, _Frame]]:
        """The tasks of an `fn`'s body, the first one last."""
        function = self.functions[call.function.text]
        values = {name.text: value for name, value in zip(function.params, arguments, strict=True)}
        frame = _Frame(values, call, self.frame, self.frame.site or self._loc(call.span))
        *lets, result = function.statements
        tasks: list[_Task] = []
        for let in lets:
            assert isinstance(let, syntax.Let | syntax.LetPair)
            tasks += [let.value if isinstance(let, syntax.Let) else _operand(let.value), _Bind(let)]
        assert isinstance(result, syntax.Return)
        tasks += [result.value, _Leave((call.function.text, arguments))]
        return [(task, frame) for task in reversed(tasks)]

    def _here(self, span: Span) -> Loc:
        """Where a node stands: its expression, or the epilogue's call that it was inlined for."""
        return self.frame.site or self._loc(span)

    def _op(self, op: str, operands: tuple[int, ...], span: Span) -> int:
        try:
            return self.builder.op(op, *operands, loc=self._here(span))
        except CodaTypeError as error:
            raise self._inside(error, span) from None

    def _inside(self, error: CodaTypeError, span: Span) -> CodaError:
        """The error with the way from the call in the epilogue to the place in the `fn`."""
        notes = list(error.notes)
        frame: _Frame | None = self.frame
        while frame is not None and frame.call is not None and len(notes) < 4:
            notes.append((self._loc(span), f"inside `{shorten(frame.call.function.text)}`"))
            span, frame = frame.call.span, frame.caller
        return CodaTypeError(error.message, error.loc, notes=tuple(notes), hint=error.hint)

    def _count_step(self) -> None:
        self.steps += 1
        if self.steps > INLINING_LIMIT:
            raise CodaUnsupportedError(
                f"inlining this call takes more than {INLINING_LIMIT:,} steps",
                self.frame.site,
                hint="functions that call each other twice double with every level",
            )


def _operand(call: syntax.Expression) -> syntax.Expression:
    """What a `split` or a reduction is of."""
    assert isinstance(call, syntax.Call)
    return call.operands[0]


def _take(results: list[int], count: int) -> tuple[int, ...]:
    """The last `count` results, removed."""
    taken = tuple(results[len(results) - count :])
    del results[len(results) - count :]
    return taken
