"""What names mean in a program, and what to say where they mean nothing.

    values       parameters and results, in the order of the lines; each is made above the lines that read it
    dimensions   the names in the parameters' shapes; in an expression they are numbers

In a program every name means one thing: a value or a dimension.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from codalang.errors import CodaError, CodaLocalityError, CodaNameError, CodaSyntaxError, Loc
from codalang.ir.build_program import ProgramBuilder
from codalang.ir.dims import Dim
from codalang.ir.names import DISCARD
from codalang.ir.ops import REDUCTIONS
from codalang.ir.program import TensorType
from codalang.parser import syntax
from codalang.parser.complaints import shorten, suggestion
from codalang.parser.files import File
from codalang.parser.library import library_names
from codalang.parser.names import BUILTINS, PAIRS
from codalang.parser.syntax import Word

_SCALAR = TensorType(())

# Functions that others have -> how a program says it.
_WRITTEN = {
    **dict.fromkeys(("matmul", "mm", "dot", "linear"), "a matmul is `a @ b.T`, or `a @ b`"),
    "transpose": "a transposed operand of a matmul is `w.T`",
    "mean": "the mean of a vector of T elements is `sum(v) / T`; of a matrix's rows an epilogue makes one",
}


class ProgramNames:
    """The names of one program, as far as it has been read.

    `values` are the names written so far and what the builder calls their values; `written` are all names of values in
    the program's text.
    """

    def __init__(self, definition: syntax.Program, file: File, builder: ProgramBuilder) -> None:
        self.file = file
        self.builder = builder
        self.values: dict[str, str] = {}
        self.dims: dict[str, Loc] = {}
        self._spans: dict[str, Word] = {}
        self._statement: syntax.Bind | None = None
        self._makers = {
            name.text: statement
            for statement in reversed(definition.statements)
            if isinstance(statement, syntax.Bind)
            for name in statement.names
        }
        self.written = {p.name.text for p in definition.params} | self._makers.keys()

    def is_dim(self, name: str) -> bool:
        """True for a dimension of the program."""
        return name in self.dims

    def declare_dims(self, shape: Collection[Dim], loc: Loc) -> None:
        """The dimension names of a parameter's shape become known."""
        for name in sorted(n for extent in shape for n in extent.names):
            if name in self._spans:
                raise self._twice(name, "is a value and a dimension", loc, self.file.locate(self._spans[name].span))
            self.dims.setdefault(name, loc)

    def enter(self, statement: syntax.Bind) -> None:
        """What is read from now on is read by this statement."""
        self._statement = statement

    def define(self, name: Word, value: str) -> None:
        """A name means a value from now on."""
        self.values[name.text] = value
        self._spans[name.text] = name

    def check_new(self, name: Word, beside: Collection[Word] = ()) -> None:
        """Raise CodaNameError where a name cannot be that of a new value; `beside` are others of the same statement."""
        loc = self.file.locate(name.span)
        if name.text == DISCARD:
            raise CodaNameError(
                f"`{DISCARD}` is no name", loc, hint=f"`{DISCARD}` stands for a result of an epilogue or a program only"
            )
        other = self._spans.get(name.text) or next((w for w in beside if w.text == name.text), None)
        first = self.dims.get(name.text) or (self.file.locate(other.span) if other is not None else None)
        if first is not None:
            is_dim = name.text in self.dims
            raise self._twice(name.text, "is a dimension and a value" if is_dim else "is defined twice", loc, first)

    def _twice(self, name: str, what: str, loc: Loc, first: Loc) -> CodaError:
        return CodaNameError(
            f"`{shorten(name)}` {what}",
            loc,
            notes=((first, "first defined here"),),
            hint="in a program every name means one thing, a value or a dimension",
        )

    def read(self, name: syntax.Name, result: bool = False) -> str:
        """The value that a name means.  Raises CodaNameError &c. where it means none; `result` is said in messages."""
        if name.text in self.values:
            return self.values[name.text]
        raise self._unknown(name, result)

    def read_auxiliary(self, name: syntax.Name) -> tuple[str, TensorType]:
        """The value or the dimension that a name means in an auxiliary step, with its type."""
        if name.text in self.dims:
            return name.text, _SCALAR
        value = self.read(name)
        return value, self.builder.types[value]

    def check_epilogue(self, call: syntax.Call) -> None:
        """Raise CodaNameError for a call of what is neither an epilogue, nor a program, nor a function."""
        name, loc = call.function.text, self.file.locate(call.function.span)
        is_applied = any(isinstance(o, syntax.Matmul) for o in call.operands) or call.keywords or call.extents
        callables = [*self.file.names(syntax.Epilogue), *self.file.names(syntax.Program)]
        if name in library_names():
            hint: str | None = f"`import {name}` imports it from the standard library"
        elif name in _WRITTEN:
            raise CodaNameError(f"there is no `{name}`", loc, hint=_WRITTEN[name])
        elif is_applied:
            hint = suggestion(name, callables) or _listed("epilogues and programs", callables)
            hint = hint or "an epilogue is defined in this file, or imported"
        else:
            return
        raise CodaNameError(f"unknown epilogue `{shorten(name)}`", loc, hint=hint)

    # What is wrong with operators

    def check_operators(self, root: syntax.Expression) -> None:
        """Raise CodaSyntaxError for the first `@` or `.` of an expression."""
        for part in syntax.walk(root):
            self.check_operator(part)

    def check_operator(self, part: syntax.Expression) -> None:
        """Raise CodaSyntaxError where a part of an expression is a matmul or a transposed matrix."""
        if isinstance(part, syntax.Matmul):
            raise CodaSyntaxError(
                "a matmul is no part of an expression",
                self.file.locate(part.operator),
                hint="it is the whole right side of a line, `y = a @ b.T`, or the first argument of an epilogue",
            )
        if isinstance(part, syntax.Attribute):
            self.check_attribute(part)
            raise CodaSyntaxError(
                "only an operand of a matmul is transposed",
                self.file.locate(part.span),
                hint="write `.T` where the matrix is multiplied: `y = x @ w.T`",
            )

    def check_attribute(self, part: syntax.Attribute) -> None:
        """Raise CodaSyntaxError where it is another attribute than `.T`."""
        if part.name.text != "T":
            near = part.name.text.lower() in ("t", "mt", "transpose", "h", "mh")
            raise CodaSyntaxError(
                f"a value has no `.{shorten(part.name.text)}`",
                self.file.locate(part.name.span),
                hint="a transposed operand of a matmul is `w.T`" if near else "there is `.T`, in a matmul",
            )

    # What is wrong with names

    def _unknown(self, name: syntax.Name, result: bool) -> CodaError:
        text, loc, shown = name.text, self.file.locate(name.span), shorten(name.text)
        if text == DISCARD:
            return CodaNameError(f"`{DISCARD}` is no value", loc, hint="give the result a name where it is made")
        if text in self._makers:
            return self._early(text, loc)
        if text in self.dims:
            return CodaNameError(
                f"`{shown}` is a dimension, not a value",
                loc,
                notes=((self.dims[text], "declared here"),),
                hint="in an expression, or as an argument that is a scalar, it is a number",
            )
        found = self.file.find(Word(text, name.span), syntax.Epilogue | syntax.Program | syntax.Function)
        if found is not None:
            kinds = {syntax.Epilogue: "an epilogue", syntax.Program: "a program", syntax.Function: "a function"}
            what = kinds[type(found.definition)]
            return CodaNameError(f"`{shown}` is {what}, not a value", loc, hint=f"call it: `{shown}(...)`")
        if text in BUILTINS or text in REDUCTIONS or text in PAIRS:
            return CodaNameError(f"`{shown}` is a function, not a value", loc, hint=f"call it: `{shown}(...)`")
        near = suggestion(text, [*self.values, *self.dims])
        if result:
            return CodaNameError(
                f"the result `{shown}` is never made", loc, hint=near or f"no line says `{shown} = ...`"
            )
        return CodaNameError(f"unknown name `{shown}`", loc, hint=near or _listed("values", self.values))

    def _early(self, text: str, loc: Loc) -> CodaError:
        """A value is read by the statement that makes it, or by one above that."""
        maker, statement, shown = self._makers[text], self._statement, shorten(text)
        made = self.file.locate(next(n.span for n in maker.names if n.text == text))
        if maker is statement:
            return CodaLocalityError(
                f"`{shown}` is read by the statement that makes it",
                loc,
                notes=((made, "it is made here"),),
                hint="a result, a reduction too, is complete when the whole matmul is: read it in a later statement",
            )
        path = self._path(maker, statement) if statement is not None else None
        if path is None:
            return CodaNameError(
                f"`{shown}` is read before it is made",
                loc,
                notes=((made, "it is made here"),),
                hint="a program runs from top to bottom: move this line below that one",
            )
        notes = [(self.file.locate(name.span), f"which reads `{shorten(name.text)}`") for name in path]
        return CodaNameError(
            f"a cycle: `{shown}` is needed for `{shorten(path[-1].text)}`, of which it is made",
            loc,
            notes=((made, f"`{shown}` is made here"), *notes[:3]),
            hint="these statements need each other: none can be the first",
        )

    def _path(self, start: syntax.Bind, goal: syntax.Bind) -> list[syntax.Name] | None:
        """Where names are read on a way from a statement to one that it depends on, or None where it does not."""
        came: dict[int, tuple[syntax.Bind, syntax.Name] | None] = {id(start): None}
        queue = [start]
        for statement in queue:
            if statement is goal:
                path = []
                step = came[id(statement)]
                while step is not None:
                    path.append(step[1])
                    step = came[id(step[0])]
                return path[::-1]
            for name in _read(statement):
                maker = self._makers.get(name.text)
                if maker is not None and id(maker) not in came:
                    came[id(maker)] = (statement, name)
                    queue.append(maker)
        return None


def _read(statement: syntax.Bind) -> Iterator[syntax.Name]:
    return (part for part in syntax.walk(statement.value) if isinstance(part, syntax.Name))


def _listed(what: str, names: Collection[str]) -> str | None:
    return f"the {what} here are {', '.join(sorted(names))}" if 0 < len(names) <= 40 else None
