"""What names mean: checked over the syntax tree, before types are.

    definitions   `fn`s and epilogues share one namespace; an `fn` may be used before it is defined, but not by itself
    values        parameters and `let`s; each name once in its definition, used only below its definition
    outputs       `store` and `reduce`; each name once.  They define no value: a reduction is known only after every
                  tile is done, so reading one is a locality error

Functions are called, values are not, so the two may share a name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping

import attrs

from codalang.errors import CodaError, CodaLocalityError, CodaNameError, CodaSyntaxError, CodaTypeError, Loc, Source
from codalang.ir.names import DISCARD
from codalang.ir.ops import OPS, REDUCTIONS
from codalang.parser import syntax
from codalang.parser.complaints import shorten
from codalang.parser.syntax import Span, Word

# Functions that are ops.  even and odd are the two results of `split`, which is no expression.
BUILTINS = {name: len(info.operands) for name, info in OPS.items() if info.infix is None} | {"neg": 1}
for _half in ("even", "odd"):
    del BUILTINS[_half]

_SPLIT_HINT = "`let (even, odd) = split(x)` gives the even and the odd columns"
_FUTURE_FUNCTIONS = frozenset("sin cos pow rotate cast row_index col_index".split())
_ADVICE = {
    "split": _SPLIT_HINT,
    "even": _SPLIT_HINT,
    "odd": _SPLIT_HINT,
    "sum": "`reduce s: col[M] = sum(x)` is a statement of its own; its result is there when every tile is done",
}
_LOCALITY_HINT = (
    "a reduction is complete only after every tile: read it in a later epilogue, as a parameter; a factor of each row "
    "commutes with the next matmul, so apply it to that matmul's result"
)


def check_names(definitions: Iterable[syntax.Definition], source: Source) -> None:
    """Raise CodaNameError, CodaLocalityError &c. for the first name that does not mean anything."""
    _Names(tuple(definitions), source).check()


def locate(source: Source, lines: list[str], span: Span) -> Loc:
    """The location of a span; of several lines, the part on the first."""
    same_line = span.end_line == span.line
    end = span.end_column if same_line else len(lines[span.line - 1]) + 1
    return Loc(source, span.line, span.column, end)


def suggestion(name: str, known: Iterable[str]) -> str | None:
    """`did you mean ...` for a name that nearly is one of the known ones."""
    if len(name) > 60:
        return None
    close = difflib.get_close_matches(name, [k for k in known if len(k) <= 60], n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else None


@attrs.define
class _Scope:
    """The names of one definition, as far as it has been read."""

    values: dict[str, Span]
    outputs: dict[str, syntax.Store | syntax.Reduce]
    reductions: Mapping[str, syntax.Reduce]  # of the whole epilogue, those below included
    dims: frozenset[str]  # symbols in its shapes


class _Names:
    def __init__(self, definitions: tuple[syntax.Definition, ...], source: Source) -> None:
        self.definitions = definitions
        self.source = source
        self.lines = source.text.split("\n")
        self.functions: dict[str, syntax.Function] = {}
        self.epilogues: dict[str, syntax.Epilogue] = {}

    def check(self) -> None:
        for definition in self.definitions:
            self._define(definition)
        for definition in self.definitions:
            self._definition(definition)
        self._recursion()

    def _loc(self, span: Span) -> Loc:
        return locate(self.source, self.lines, span)

    def _twice(self, what: str, name: Word, first: Span) -> CodaError:
        notes = ((self._loc(first), "first defined here"),)
        shown = f"{what} `{shorten(name.text)}`".lstrip()
        return CodaNameError(f"{shown} is defined twice", self._loc(name.span), notes=notes)

    def _define(self, definition: syntax.Definition) -> None:
        name = definition.name
        first = self.functions.get(name.text) or self.epilogues.get(name.text)
        if first is not None:
            raise self._twice("", name, first.name.span)
        self._not_discard(name)
        if isinstance(definition, syntax.Epilogue):
            self.epilogues[name.text] = definition
            return
        if name.text in BUILTINS or name.text in _ADVICE or name.text in _FUTURE_FUNCTIONS:
            raise CodaNameError(f"`{name.text}` is a function of the language", self._loc(name.span), hint="rename it")
        self.functions[name.text] = definition

    def _not_discard(self, name: Word) -> None:
        if name.text == DISCARD:
            raise CodaNameError(
                f"`{DISCARD}` is no name", self._loc(name.span), hint=f"`{DISCARD}` stands for a half of a split only"
            )

    def _definition(self, definition: syntax.Definition) -> None:
        reductions = {s.name.text: s for s in definition.statements if isinstance(s, syntax.Reduce)}
        scope = _Scope({}, {}, reductions, frozenset(_symbols(definition)))
        is_function = isinstance(definition, syntax.Function)
        for param in definition.params:
            self._value(param if isinstance(param, Word) else param.name, scope, "parameter")
        for position, statement in enumerate(definition.statements):
            if is_function:
                self._allowed_in_function(statement, last=position == len(definition.statements) - 1)
            elif isinstance(statement, syntax.Return):
                raise CodaSyntaxError(
                    "an epilogue returns nothing",
                    self._loc(statement.span),
                    hint="`store` and `reduce` are its outputs",
                )
            self._statement(statement, scope)
        if is_function and not (definition.statements and isinstance(definition.statements[-1], syntax.Return)):
            raise CodaSyntaxError(
                f"`{shorten(definition.name.text)}` returns nothing",
                self._loc(definition.end),
                hint="the last statement of an `fn` is `return expression`",
            )
        if not is_function and not scope.outputs:
            raise CodaTypeError(
                f"epilogue `{shorten(definition.name.text)}` has no output",
                self._loc(definition.name.span),
                hint="give it a `store` or a `reduce`",
            )

    def _allowed_in_function(self, statement: syntax.Statement, last: bool) -> None:
        if isinstance(statement, syntax.Store | syntax.Reduce):
            word = "store" if isinstance(statement, syntax.Store) else "reduce"
            raise CodaSyntaxError(
                f"an `fn` cannot `{word}`", self._loc(statement.span), hint="an `fn` is a function of values: return it"
            )
        if isinstance(statement, syntax.Return) and not last:
            raise CodaSyntaxError("nothing can follow a `return`", self._loc(statement.span))

    def _statement(self, statement: syntax.Statement, scope: _Scope) -> None:
        value = statement.value
        if isinstance(statement, syntax.LetPair):
            value = self._split_operand(statement)
        elif isinstance(statement, syntax.Reduce):
            value = self._reduced_operand(statement)
        elif isinstance(statement, syntax.Store):
            self._stored(statement, scope)
            value = value or syntax.Name(statement.name.text, statement.name.span)
        assert value is not None
        self._expression(value, scope)
        if isinstance(statement, syntax.Let):
            self._value(statement.name, scope, "value")
        elif isinstance(statement, syntax.LetPair):
            for name in statement.names:
                if name.text != DISCARD:
                    self._value(name, scope, "value")
        elif isinstance(statement, syntax.Store | syntax.Reduce):
            self._not_discard(statement.name)
            if statement.name.text in scope.outputs:
                raise self._twice("output", statement.name, scope.outputs[statement.name.text].name.span)
            scope.outputs[statement.name.text] = statement

    def _stored(self, statement: syntax.Store, scope: _Scope) -> None:
        name = statement.name.text
        if statement.value is None and name not in scope.values and name not in scope.reductions:
            raise CodaNameError(
                f"there is no value `{shorten(name)}` to store",
                self._loc(statement.name.span),
                hint=suggestion(name, scope.values) or f"write `store {shorten(name)}: ... = value`",
            )

    def _value(self, name: Word, scope: _Scope, what: str) -> None:
        self._not_discard(name)
        if name.text in scope.values:
            raise self._twice(what, name, scope.values[name.text])
        if name.text in scope.outputs:
            raise self._twice(what, name, scope.outputs[name.text].name.span)
        scope.values[name.text] = name.span

    def _split_operand(self, statement: syntax.LetPair) -> syntax.Expression:
        value = statement.value
        if isinstance(value, syntax.Call) and value.function.text == "split" and len(value.operands) == 1:
            return value.operands[0]
        raise CodaSyntaxError(
            "two names need two values, as only `split(x)` gives", self._loc(value.span), hint=_SPLIT_HINT
        )

    def _reduced_operand(self, statement: syntax.Reduce) -> syntax.Expression:
        value = statement.value
        name = shorten(statement.name.text)
        known = ", ".join(REDUCTIONS)
        if not isinstance(value, syntax.Call):
            raise CodaSyntaxError(
                f"`reduce {name}` does not say how",
                self._loc(value.span),
                hint=f"write `= sum(...)`; there is {known}",
            )
        how = value.function
        if how.text not in REDUCTIONS:
            raise CodaNameError(
                f"unknown reduction `{shorten(how.text)}`",
                self._loc(how.span),
                hint=suggestion(how.text, REDUCTIONS) or f"there is {known}",
            )
        if len(value.operands) != 1:
            raise CodaTypeError(f"`{how.text}` takes 1 argument, got {len(value.operands)}", self._loc(value.span))
        return value.operands[0]

    def _expression(self, root: syntax.Expression, scope: _Scope) -> None:
        for part in walk(root):
            if isinstance(part, syntax.Name) and part.text not in scope.values:
                raise self._unknown_value(part, scope)
            if isinstance(part, syntax.Call):
                self._call(part, scope)

    def _unknown_value(self, name: syntax.Name, scope: _Scope) -> CodaError:
        loc, shown = self._loc(name.span), shorten(name.text)
        if name.text in scope.reductions:
            reduce = scope.reductions[name.text]
            return CodaLocalityError(
                f"`{shown}` is a reduction of this same epilogue",
                loc,
                notes=((self._loc(reduce.span), "it is reduced here"),),
                hint=_LOCALITY_HINT,
            )
        if name.text in scope.outputs:
            notes = ((self._loc(scope.outputs[name.text].span), "it is stored here"),)
            return CodaNameError(
                f"`{shown}` is an output, not a value",
                loc,
                notes=notes,
                hint=f"write `let {shown} = ...` and store that",
            )
        if name.text in self.functions or name.text in BUILTINS:
            return CodaNameError(f"`{shown}` is a function", loc, hint=f"call it: `{shown}(...)`")
        if name.text in scope.dims:
            return CodaNameError(
                f"`{shown}` is a dimension, not a value", loc, hint="pass what is needed of it as a `scalar` parameter"
            )
        hint = suggestion(name.text, scope.values) or _known("values", scope.values)
        return CodaNameError(f"unknown name `{shown}`", loc, hint=hint)

    def _call(self, call: syntax.Call, scope: _Scope) -> None:
        name = call.function.text
        if name in self.functions:
            self._count(call, len(self.functions[name].params), self.functions[name].name.span)
        elif name in BUILTINS:
            self._count(call, BUILTINS[name], None)
        else:
            raise self._unknown_function(call.function, scope)

    def _count(self, call: syntax.Call, wanted: int, defined: Span | None) -> None:
        if len(call.operands) == wanted:
            return
        name = call.function.text
        notes = ((self._loc(defined), "defined here"),) if defined else ()
        plural = "" if wanted == 1 else "s"
        hint = f"nest them: `{name}(a, {name}(b, c))`" if name in ("min", "max") and len(call.operands) > 2 else None
        raise CodaTypeError(
            f"`{shorten(name)}` takes {wanted} argument{plural}, got {len(call.operands)}",
            self._loc(call.span),
            notes=notes,
            hint=hint,
        )

    def _unknown_function(self, function: Word, scope: _Scope) -> CodaError:
        name, loc = function.text, self._loc(function.span)
        shown = shorten(name)
        if name in _ADVICE:
            return CodaNameError(f"`{name}` cannot be used inside an expression", loc, hint=_ADVICE[name])
        if name in _FUTURE_FUNCTIONS:
            return CodaNameError(f"`{name}` is not supported yet", loc, hint=_known("functions", BUILTINS))
        if name in scope.values:
            notes = ((self._loc(scope.values[name]), "defined here"),)
            return CodaNameError(f"`{shown}` is a value, not a function", loc, notes=notes)
        if name in self.epilogues:
            return CodaNameError(
                f"`{shown}` is an epilogue, not a function", loc, hint="put what both need into an `fn`"
            )
        hint = suggestion(name, [*self.functions, *BUILTINS, "sum", "split"])
        return CodaNameError(f"unknown function `{shown}`", loc, hint=hint or _known("functions", BUILTINS))

    def _recursion(self) -> None:
        """Raise CodaNameError where an `fn` calls itself, by itself or through others.  Depth first, iterative."""
        finished: set[str] = set()
        for root in self.functions:
            path: dict[str, syntax.Call | None] = {}
            stack: list[tuple[str, syntax.Call | None, Iterator[syntax.Call]]] = []

            def enter(name: str, call: syntax.Call | None, path: dict = path, stack: list = stack) -> None:
                path[name] = call
                stack.append((name, call, self._calls(self.functions[name])))

            if root not in finished:
                enter(root, None)
            while stack:
                name, _, calls = stack[-1]
                call = next(calls, None)
                if call is None:
                    finished.add(name)
                    del path[name]
                    stack.pop()
                elif call.function.text in path:
                    raise self._cycle(call, path)
                elif call.function.text not in finished:
                    enter(call.function.text, call)

    def _cycle(self, last: syntax.Call, path: Mapping[str, syntax.Call | None]) -> CodaError:
        names = list(path)
        cycle = names[names.index(last.function.text) + 1 :]
        calls = [path[name] for name in cycle][:4]
        notes = tuple((self._loc(c.span), f"which calls `{shorten(c.function.text)}`") for c in calls if c is not None)
        return CodaNameError(
            f"`{shorten(last.function.text)}` calls itself" + (" through other functions" if cycle else ""),
            self._loc(last.span),
            notes=notes,
            hint="an `fn` is inlined where it is called, so it cannot be recursive",
        )

    def _calls(self, function: syntax.Function) -> Iterator[syntax.Call]:
        for statement in function.statements:
            if statement.value is not None:
                for part in walk(statement.value):
                    if isinstance(part, syntax.Call) and part.function.text in self.functions:
                        yield part


def _symbols(definition: syntax.Definition) -> Iterator[str]:
    """The dimensions that an epilogue's shapes are made of."""
    things = [*definition.params, *definition.statements]
    shapes = [t.shape for t in things if isinstance(t, syntax.Param | syntax.Store | syntax.Reduce)]
    for extent in (e for shape in shapes if shape is not None for e in shape.extents):
        if extent.symbol is not None:
            yield extent.symbol


def walk(root: syntax.Expression) -> Iterator[syntax.Expression]:
    """All parts of an expression, from left to right, each before its operands."""
    stack = [root]
    while stack:
        part = stack.pop()
        yield part
        if isinstance(part, syntax.Apply | syntax.Call):
            stack.extend(reversed(part.operands))


def _known(what: str, names: Iterable[str]) -> str | None:
    listed = sorted(names)
    if not listed or len(listed) > 40:
        return None
    return f"the {what} here are {', '.join(listed)}"
