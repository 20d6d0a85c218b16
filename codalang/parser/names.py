"""What names mean: checked over the syntax tree, before types are.

    definitions   `fn`s, states and epilogues share one namespace; what a file sees is said in files.py
    values        parameters and `let`s; each name once in its definition, used only below its definition
    outputs       `store`, `reduce` and `state`; each name once.  They define no value: a reduction is known only after
                  every tile is done, so reading one is a locality error

Functions are called, values are not, so the two may share a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs

from codalang.errors import CodaError, CodaLocalityError, CodaNameError, CodaSyntaxError, CodaTypeError, Loc
from codalang.ir.builtin_states import BUILTIN_STATES
from codalang.ir.names import DISCARD
from codalang.ir.ops import OPS, REDUCTIONS
from codalang.ir.types import STORAGE_DTYPES
from codalang.parser import syntax
from codalang.parser.clauses import Part, parts
from codalang.parser.complaints import shorten, suggestion
from codalang.parser.files import File
from codalang.parser.recursion import check_recursion
from codalang.parser.syntax import Span, Word

# Functions that are ops, with their numbers of arguments, a static attribute counted.  even and odd are the two results
# of `split`, which is no expression.
BUILTINS = {n: len(i.operands) + (i.attr is not None) for n, i in OPS.items() if i.infix is None} | {"neg": 1, "i32": 1}
for _half in ("even", "odd"):
    del BUILTINS[_half]

# Functions of two results, with their numbers of arguments.
PAIRS = {"split": 1, "rotate": 3}

_SPLIT_HINT = "`let (even, odd) = split(x)` gives the even and the odd columns"
_REDUCE_HINT = "`reduce s: col[M] = {0}(x)` is a statement of its own; its result is there when every tile is done"
_FOLD_HINT = "`state s: col[M] = {0}(x)` is a statement of its own; its result is there when every tile is done"
_ADVICE = {
    "split": _SPLIT_HINT,
    "even": _SPLIT_HINT,
    "odd": _SPLIT_HINT,
    "rotate": "`let (x, y) = rotate(a, b, angle)` gives the rotated pair",
    "sum": _REDUCE_HINT.format("sum"),
}
_LOCALITY_HINT = (
    "a reduction is complete only after every tile: read it in a later epilogue, as a parameter; a factor of each row "
    "commutes with the next matmul, so apply it to that matmul's result"
)
_WORDS = {
    syntax.Store: "`store`",
    syntax.Reduce: "`reduce`",
    syntax.Fold: "fold a `state`",
    syntax.Keep: "`save` or `recompute`",
}

_Output = syntax.Store | syntax.Reduce | syntax.Fold


def check_names(file: File) -> None:
    """Raise CodaNameError, CodaLocalityError &c. for the first name of a file that does not mean anything.

    Those inside of programs are checked in program_names.py.
    """
    _Names(file).check()


def check_call(file: File, call: syntax.Call) -> None:
    """Raise CodaNameError or CodaTypeError where a call in a program's expression is none of a function."""
    _Names(file).auxiliary_call(call)


@attrs.define
class _Scope:
    """The names of one definition, as far as it has been read."""

    values: dict[str, Span]
    outputs: dict[str, tuple[_Output, Span]]
    reductions: Mapping[str, Span]  # of the whole epilogue, those below included
    dims: frozenset[str]  # symbols in its shapes


class _Names:
    def __init__(self, file: File) -> None:
        self.file = file

    def check(self) -> None:
        defined: dict[str, syntax.Definition] = {}
        for definition in self.file.definitions:
            self._define(definition, defined)
        for definition in self.file.definitions:
            if isinstance(definition, syntax.Epilogue):
                self._epilogue(definition)
            elif isinstance(definition, syntax.Function):
                self._block(definition)
            elif isinstance(definition, syntax.State):
                for part in parts(definition, self.file).functions:
                    self._part(part)
        check_recursion(self.file, syntax.Function)
        check_recursion(self.file, syntax.Program)

    def auxiliary_call(self, call: syntax.Call) -> None:
        """Check a call in an auxiliary expression."""
        name, loc, shown = call.function.text, self.file.locate(call.function.span), shorten(call.function.text)
        found = self.file.find(call.function, syntax.Epilogue | syntax.Program)
        is_function = self.file.find(call.function, syntax.Function) is not None
        if is_function or name in BUILTINS:
            self._call(call, None, several=True)
            function = self.file.find(call.function, syntax.Function)
            results = _result_count(function.definition) if function is not None else 1
            if results != 1:
                raise CodaTypeError(
                    f"`{shown}` gives {_values(results)}",
                    self.file.locate(call.span),
                    hint="in a program a function gives one value: write an `fn` that returns the one you want",
                )
        elif found is not None:
            what = "an epilogue" if isinstance(found.definition, syntax.Epilogue) else "a program"
            raise CodaSyntaxError(
                f"`{shown}` is {what}, and no part of an expression",
                loc,
                hint=f"it is the whole right side of a line: `y = {shown}(...)`",
            )
        elif name in PAIRS:
            raise CodaNameError(
                f"`{name}` gives two values, and no part of an expression", loc, hint="use it in an epilogue"
            )
        elif name in self._states():
            raise CodaNameError(
                f"`{shown}` is a state, not a function",
                loc,
                hint=f"an epilogue folds values with it: `state s: col[M] = {shown}(x)`",
            )
        else:
            known_ = [*self.file.names(syntax.Function), *BUILTINS, *REDUCTIONS]
            near = suggestion(name, [*known_, *self.file.names(syntax.Epilogue), *self.file.names(syntax.Program)])
            raise CodaNameError(f"unknown function `{shown}`", loc, hint=near or _known("functions", known_))

    def _twice(self, what: str, name: Word, first: Span) -> CodaError:
        notes = ((self.file.locate(first), "first defined here"),)
        shown = f"{what} `{shorten(name.text)}`".lstrip()
        return CodaNameError(f"{shown} is defined twice", self.file.locate(name.span), notes=notes)

    def _define(self, definition: syntax.Definition, defined: dict[str, syntax.Definition]) -> None:
        name = definition.name
        if name.text in defined:
            raise self._twice("", name, defined[name.text].name.span)
        self._not_discard(name)
        defined[name.text] = definition
        is_called = isinstance(definition, syntax.Function | syntax.Program)
        if is_called and (name.text in BUILTINS or name.text in _ADVICE):
            raise CodaNameError(
                f"`{name.text}` is a function of the language", self.file.locate(name.span), hint="rename it"
            )

    def _not_discard(self, name: Word) -> None:
        if name.text == DISCARD:
            raise CodaNameError(
                f"`{DISCARD}` is no name",
                self.file.locate(name.span),
                hint=f"`{DISCARD}` stands for one of several results only",
            )

    # Definitions

    def _epilogue(self, definition: syntax.Epilogue) -> None:
        reductions = {n.text: s.span for s in definition.statements for n in _reduced_names(s)}
        scope = _Scope({}, {}, reductions, frozenset(_symbols(definition)))
        for param in definition.params:
            self._value(param.name, scope, "parameter")
        for statement in definition.statements:
            if isinstance(statement, syntax.Return):
                raise CodaSyntaxError(
                    "an epilogue returns nothing",
                    self.file.locate(statement.span),
                    hint="`store` and `reduce` are its outputs",
                )
            self._statement(statement, scope)
        if not scope.outputs:
            raise CodaTypeError(
                f"epilogue `{shorten(definition.name.text)}` has no output",
                self.file.locate(definition.name.span),
                hint="give it a `store` or a `reduce`",
            )

    def _block(self, definition: syntax.Function, what: str = "an `fn`") -> None:
        """A block of `let`s that ends with what it returns."""
        scope = _Scope({}, {}, {}, frozenset())
        for param in definition.params:
            self._value(param, scope, "parameter")
        for position, statement in enumerate(definition.statements, start=1):
            self._allowed_in_block(statement, what, last=position == len(definition.statements))
            self._statement(statement, scope)
        if not (definition.statements and isinstance(definition.statements[-1], syntax.Return)):
            raise CodaSyntaxError(
                f"`{shorten(definition.name.text)}` returns nothing",
                self.file.locate(definition.end),
                hint=f"the last statement of {what} is `return expression`",
            )

    def _part(self, part: Part) -> None:
        function = part.function
        self._block(function, f"`{function.name.text}`")
        result = function.statements[-1]
        assert isinstance(result, syntax.Return)
        if len(result.values) != part.wanted:
            raise CodaTypeError(
                f"`{function.name.text}` returns {_values(len(result.values))}, but {part.because}",
                self.file.locate(result.span),
            )

    def _allowed_in_block(self, statement: syntax.Statement, what: str, last: bool) -> None:
        loc = self.file.locate(statement.span)
        if type(statement) in _WORDS:
            raise CodaSyntaxError(
                f"{what} cannot {_WORDS[type(statement)]}", loc, hint=f"{what} is a function of values: return it"
            )
        if isinstance(statement, syntax.Return) and not last:
            raise CodaSyntaxError("nothing can follow a `return`", loc)

    # Statements

    def _statement(self, statement: syntax.Statement, scope: _Scope) -> None:
        for value in syntax.expressions(statement):
            self._no_program(value)
        if isinstance(statement, syntax.Keep):
            for name in statement.names:
                self._kept(name, scope)
            return
        if isinstance(statement, syntax.LetTuple):
            values = self._several(statement)
        elif isinstance(statement, syntax.Reduce):
            values = (self._reduced_operand(statement),)
        elif isinstance(statement, syntax.Fold):
            values = self._folded_operands(statement)
        else:
            if isinstance(statement, syntax.Store):
                self._stored(statement, scope)
            values = syntax.expressions(statement)
        for value in values:
            self._expression(value, scope)
        if isinstance(statement, syntax.Let):
            self._value(statement.name, scope, "value")
        elif isinstance(statement, syntax.LetTuple):
            for name in statement.names:
                if name.text != DISCARD:
                    self._value(name, scope, "value")
        elif isinstance(statement, syntax.Store | syntax.Reduce):
            self._not_discard(statement.name)
            self._output(statement.name, statement, scope)
        elif isinstance(statement, syntax.Fold):
            self._some_name(statement)
            for name in statement.names:
                if name.text != DISCARD:
                    self._output(name, statement, scope)

    def _no_program(self, root: syntax.Expression) -> None:
        """Raise CodaSyntaxError for what only expressions of programs have."""
        for part in syntax.walk(root):
            if isinstance(part, syntax.Matmul):
                raise CodaSyntaxError(
                    "there is no matmul inside an epilogue",
                    self.file.locate(part.operator),
                    hint="the matmul is not written: the first parameter is its result",
                )
            if isinstance(part, syntax.Attribute):
                raise CodaSyntaxError("a value has no attributes", self.file.locate(part.name.span))
            if isinstance(part, syntax.Call):
                self._by_position(part)

    def _by_position(self, call: syntax.Call) -> None:
        """Raise CodaSyntaxError where a function is called as only an epilogue or a program can be."""
        if call.keywords:
            raise CodaSyntaxError(
                "`=` is no operator",
                self.file.locate(call.keywords[0].name.span.to(call.keywords[0].value.span)),
                hint="`==` compares; arguments are given by position",
            )
        if call.extents:
            raise CodaSyntaxError("a function has no extents", self.file.locate(call.extents[0].span))

    def _output(self, name: Word, statement: _Output, scope: _Scope) -> None:
        if name.text in scope.outputs:
            raise self._twice("output", name, scope.outputs[name.text][1])
        scope.outputs[name.text] = (statement, name.span)

    def _some_name(self, statement: syntax.Fold) -> None:
        if all(n.text == DISCARD for n in statement.names):
            raise CodaNameError(
                "no result of this state has a name",
                self.file.locate(statement.span),
                hint=f"`{DISCARD}` stands for a result that is not wanted: name another one",
            )

    def _stored(self, statement: syntax.Store, scope: _Scope) -> None:
        name = statement.name.text
        if statement.value is None and name not in scope.values and name not in scope.reductions:
            raise CodaNameError(
                f"there is no value `{shorten(name)}` to store",
                self.file.locate(statement.name.span),
                hint=suggestion(name, scope.values) or f"write `store {shorten(name)}: ... = value`",
            )

    def _kept(self, name: Word, scope: _Scope) -> None:
        """What is saved or recomputed is a value, or the value that a store has."""
        if name.text in scope.values or isinstance(scope.outputs.get(name.text, (None,))[0], syntax.Store):
            return
        if name.text in scope.reductions:
            raise CodaNameError(
                f"`{shorten(name.text)}` is a reduction, which is an output already",
                self.file.locate(name.span),
                notes=((self.file.locate(scope.reductions[name.text]), "it is reduced here"),),
                hint="save or recompute a value, or what a `store` stores",
            )
        raise self._unknown_value(syntax.Name(name.text, name.span), scope)

    def _value(self, name: Word, scope: _Scope, what: str) -> None:
        self._not_discard(name)
        if name.text in scope.values:
            raise self._twice(what, name, scope.values[name.text])
        if name.text in scope.outputs:
            raise self._twice(what, name, scope.outputs[name.text][1])
        scope.values[name.text] = name.span

    def _several(self, statement: syntax.LetTuple) -> tuple[syntax.Expression, ...]:
        """The operands of a call of what gives as many results as there are names."""
        value, names = statement.value, len(statement.names)
        loc = self.file.locate(value.span)
        if not isinstance(value, syntax.Call):
            raise CodaSyntaxError(
                f"{names} name{'s need' if names > 1 else ' needs'} {_values(names)}, as `split(x)` gives",
                loc,
                hint=_SPLIT_HINT,
            )
        found = self.file.find(value.function, syntax.Function)
        if value.function.text in PAIRS:
            self._count(value, PAIRS[value.function.text], None)
            results = 2
        elif found is not None or value.function.text in BUILTINS:
            self._call(value, None, several=True)
            results = _result_count(found.definition) if found is not None else 1
        else:
            raise self._unknown_function(value.function, None)
        if results != names:
            raise CodaTypeError(
                f"`{shorten(value.function.text)}` gives {_values(results)}, got {names} name{'s' * (names > 1)}",
                loc,
                hint=_SPLIT_HINT if results == 1 else f"`{DISCARD}` stands for a result that is not wanted",
            )
        return syntax.value_operands(value)

    def _reduced_operand(self, statement: syntax.Reduce) -> syntax.Expression:
        value = statement.value
        name = shorten(statement.name.text)
        known = ", ".join(REDUCTIONS)
        if not isinstance(value, syntax.Call):
            raise CodaSyntaxError(
                f"`reduce {name}` does not say how",
                self.file.locate(value.span),
                hint=f"write `= sum(...)`; there is {known}",
            )
        how = value.function
        if how.text not in REDUCTIONS:
            is_state = how.text in self._states()
            raise CodaNameError(
                f"unknown reduction `{shorten(how.text)}`",
                self.file.locate(how.span),
                hint=f"`{shorten(how.text)}` is a state: write `state {name}: ... = {shorten(how.text)}(...)`"
                if is_state
                else suggestion(how.text, REDUCTIONS) or f"there is {known}",
            )
        if len(value.operands) != 1:
            raise CodaTypeError(
                f"`{how.text}` takes 1 argument, got {len(value.operands)}", self.file.locate(value.span)
            )
        return value.operands[0]

    def _states(self) -> list[str]:
        return [*self.file.names(syntax.State), *BUILTIN_STATES]

    def _folded_operands(self, statement: syntax.Fold) -> tuple[syntax.Expression, ...]:
        value = statement.value
        name = shorten(statement.names[0].text)
        if not isinstance(value, syntax.Call):
            raise CodaSyntaxError(
                f"`state {name}` does not say which state",
                self.file.locate(value.span),
                hint=_known("states", self._states()),
            )
        function = value.function
        found = self.file.find(function, syntax.State)
        if found is None and function.text not in BUILTIN_STATES:
            raise CodaNameError(
                f"unknown state `{shorten(function.text)}`",
                self.file.locate(function.span),
                hint=f"write `reduce {name}: ... = {function.text}(...)`"
                if function.text in REDUCTIONS
                else suggestion(function.text, self._states()) or _known("states", self._states()),
            )
        notes: tuple[tuple[Loc, str], ...] = ()
        if found is not None:
            assert isinstance(found.definition, syntax.State)
            wanted = len(found.definition.inputs)
            notes = ((found.file.locate(found.definition.name.span), "defined here"),)
        else:
            wanted = len(BUILTIN_STATES[function.text].inputs)
        if len(value.operands) != wanted:
            raise CodaTypeError(
                f"`{shorten(function.text)}` takes {wanted} argument{'' if wanted == 1 else 's'}, "
                f"got {len(value.operands)}",
                self.file.locate(value.span),
                notes=notes,
            )
        return value.operands

    # Expressions

    def _expression(self, root: syntax.Expression, scope: _Scope) -> None:
        for part in syntax.walk(root):
            if isinstance(part, syntax.Name) and part.text not in scope.values:
                raise self._unknown_value(part, scope)
            if isinstance(part, syntax.Call):
                self._call(part, scope)

    def _unknown_value(self, name: syntax.Name, scope: _Scope) -> CodaError:
        loc, shown = self.file.locate(name.span), shorten(name.text)
        if name.text in scope.reductions:
            return CodaLocalityError(
                f"`{shown}` is a reduction of this same epilogue",
                loc,
                notes=((self.file.locate(scope.reductions[name.text]), "it is reduced here"),),
                hint=_LOCALITY_HINT,
            )
        if name.text in scope.outputs:
            notes = ((self.file.locate(scope.outputs[name.text][0].span), "it is stored here"),)
            return CodaNameError(
                f"`{shown}` is an output, not a value",
                loc,
                notes=notes,
                hint=f"write `let {shown} = ...` and store that",
            )
        if name.text in BUILTINS or name.text in self.file.names(syntax.Function):
            arguments = "" if BUILTINS.get(name.text) == 0 else "..."
            return CodaNameError(f"`{shown}` is a function", loc, hint=f"call it: `{shown}({arguments})`")
        if name.text in scope.dims:
            return CodaNameError(
                f"`{shown}` is a dimension, not a value", loc, hint="pass what is needed of it as a `scalar` parameter"
            )
        hint = suggestion(name.text, scope.values) or _known("values", scope.values)
        return CodaNameError(f"unknown name `{shown}`", loc, hint=hint)

    def _call(self, call: syntax.Call, scope: _Scope | None, several: bool = False) -> None:
        """`several` results are allowed in a `let (a, b) = ...` only."""
        name = call.function.text
        self._by_position(call)
        found = self.file.find(call.function, syntax.Function)
        if found is not None:
            function = found.definition
            assert isinstance(function, syntax.Function)
            self._count(call, len(function.params), (found.file, function.name.span))
            results = _result_count(function)
            if results != 1 and not several:
                names = ", ".join("abcdefgh"[: min(results, 8)])
                raise CodaTypeError(
                    f"`{shorten(name)}` gives {_values(results)}",
                    self.file.locate(call.span),
                    hint=f"`let ({names}) = {shorten(name)}(...)` names them",
                )
        elif name in BUILTINS:
            self._count(call, BUILTINS[name], None)
            if name == "cast":
                self._cast_dtype(call.operands[1])
        else:
            raise self._unknown_function(call.function, scope)

    def _cast_dtype(self, word: syntax.Expression) -> None:
        if not (isinstance(word, syntax.Name) and word.text in STORAGE_DTYPES):
            raise CodaTypeError(
                f"`cast` rounds to {', '.join(STORAGE_DTYPES[:-1])} or {STORAGE_DTYPES[-1]}",
                self.file.locate(word.span),
                hint="write `cast(x, bf16)`; `float(i)` makes a number of an index",
            )

    def _count(self, call: syntax.Call, wanted: int, defined: tuple[File, Span] | None) -> None:
        if len(call.operands) == wanted:
            return
        name = call.function.text
        notes = ((defined[0].locate(defined[1]), "defined here"),) if defined else ()
        plural = "" if wanted == 1 else "s"
        hint = None
        if name in ("min", "max") and defined is None:
            nest = f"nest them: `{name}(a, {name}(b, c))`"
            hint = nest if len(call.operands) > 2 else _REDUCE_HINT.format(name) if len(call.operands) == 1 else None
        raise CodaTypeError(
            f"`{shorten(name)}` takes {wanted} argument{plural}, got {len(call.operands)}",
            self.file.locate(call.span),
            notes=notes,
            hint=hint,
        )

    def _unknown_function(self, function: Word, scope: _Scope | None) -> CodaError:
        name, loc = function.text, self.file.locate(function.span)
        shown = shorten(name)
        if name in _ADVICE:
            return CodaNameError(f"`{name}` cannot be used inside an expression", loc, hint=_ADVICE[name])
        if name in STORAGE_DTYPES:
            return CodaNameError(f"`{name}` is a dtype, not a function", loc, hint=f"`cast(x, {name})` rounds a value")
        if scope is not None and name in scope.values:
            notes = ((self.file.locate(scope.values[name]), "defined here"),)
            return CodaNameError(f"`{shown}` is a value, not a function", loc, notes=notes)
        if self.file.find(function, syntax.Epilogue):
            return CodaNameError(
                f"`{shown}` is an epilogue, not a function", loc, hint="put what both need into an `fn`"
            )
        if name in self._states():
            return CodaNameError(
                f"`{shown}` is a state, not a function",
                loc,
                hint=_FOLD_HINT.format(shown),
            )
        hint = suggestion(name, [*self.file.names(syntax.Function), *BUILTINS, *PAIRS, "sum"])
        return CodaNameError(f"unknown function `{shown}`", loc, hint=hint or _known("functions", BUILTINS))


def _result_count(function: syntax.Definition) -> int:
    """How many values an `fn` returns; 1 where what it returns is not right yet."""
    assert isinstance(function, syntax.Function)
    last = function.statements[-1] if function.statements else None
    return len(last.values) if isinstance(last, syntax.Return) else 1


def _reduced_names(statement: syntax.Statement) -> tuple[Word, ...]:
    """The names of results that are known only after every tile."""
    if isinstance(statement, syntax.Reduce):
        return (statement.name,)
    return statement.names if isinstance(statement, syntax.Fold) else ()


def _symbols(definition: syntax.Epilogue) -> Iterator[str]:
    """The dimensions that an epilogue's shapes are made of."""
    things = [*definition.params, *definition.statements]
    shapes = [t.shape for t in things if isinstance(t, syntax.Param | syntax.Store | syntax.Reduce | syntax.Fold)]
    for extent in (e for shape in shapes if shape is not None for e in shape.extents):
        if extent.symbol is not None:
            yield extent.symbol


def _values(count: int) -> str:
    return f"{count} value{'' if count == 1 else 's'}"


def _known(what: str, names: Iterable[str]) -> str | None:
    listed = sorted(set(names))
    if not listed or len(listed) > 40:
        return None
    return f"the {what} here are {', '.join(listed)}"
