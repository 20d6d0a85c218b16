"""Text -> IR.

    source     files and bytes to text
    reader     text to syntax tree: grammar.lark, newlines (which line breaks count), complaints (errors for people)
    table      what lark makes of the grammar, kept
    syntax     the syntax tree
    files      imports: which definitions a file sees; library says where the standard library lies
    names      what names mean; clauses, what a state is made of; recursion; program_names, those inside programs
    elaborate  syntax tree to IR: shapes and outputs; evaluate: expressions, inlining; states: state definitions
    programs   syntax tree to IR: programs; program_dims, their extents
    format     text to canonical text, comments kept

Whatever the text is, the only exceptions are those of `codalang.errors`.
"""

from __future__ import annotations

import attrs

from codalang.errors import CodaNameError, Source
from codalang.ir.builtin_states import BUILTIN_STATES
from codalang.ir.epilogue import Epilogue
from codalang.ir.module import Module
from codalang.ir.program import Program
from codalang.ir.states import StateDef
from codalang.parser import syntax
from codalang.parser.complaints import shorten
from codalang.parser.elaborate import elaborate
from codalang.parser.files import File, Found, load
from codalang.parser.format import format_source
from codalang.parser.names import check_names
from codalang.parser.programs import elaborate_program
from codalang.parser.recursion import calls_of
from codalang.parser.source import decode, normalize, read_source
from codalang.parser.states import define_state
from codalang.parser.syntax import Word

__all__ = ["decode", "format_source", "parse", "read_source"]


def parse(source: Source | str) -> Module:
    """The epilogues, states and programs of a source file, after imported ones; text is named `<string>`.

    Imports are relative to the folder that the source's name is in.  The module's source has its line ends normalized
    to \\n.  Raises CodaError: CodaSyntaxError, CodaNameError, CodaTypeError, CodaLocalityError or CodaUnsupportedError,
    at the first fault.
    """
    source = normalize(source)
    files = load(source)
    for file in files:
        check_names(file)
    states, programs = _States(), _Programs()
    made: dict[File, _Made] = {}
    for file in files:
        made[file] = _made(file, states)
        programs.define(file, made)
    return attrs.evolve(_module(files[-1], made), imported=tuple(file.source for file in files[:-1]))


class _States:
    """State definitions, each elaborated once."""

    def __init__(self) -> None:
        self._known: dict[int, StateDef] = {}

    def find(self, file: File, name: Word) -> StateDef:
        """The state that a checked name means in a file."""
        found = file.find(name, syntax.State)
        if found is None:
            return BUILTIN_STATES[name.text]
        assert isinstance(found.definition, syntax.State)
        return self.of(found.definition, found.file)

    def of(self, definition: syntax.State, file: File) -> StateDef:
        """The IR of a definition."""
        if id(definition) not in self._known:
            self._known[id(definition)] = define_state(definition, file)
        return self._known[id(definition)]


@attrs.frozen
class _Made:
    """What a file itself defines."""

    states: dict[str, StateDef]
    epilogues: dict[str, Epilogue]
    programs: dict[str, Program]


class _Programs:
    """Programs, each elaborated once, those that it calls before it."""

    def __init__(self) -> None:
        self._known: dict[int, Program] = {}

    def define(self, file: File, made: dict[File, _Made]) -> None:
        """Elaborate a file's programs.  What it imports is made, and no program calls itself.  Iterative."""

        def epilogue(found: Found) -> Epilogue:
            return made[found.file].epilogues[found.definition.name.text]

        def program(found: Found) -> Program:
            return self._known[id(found.definition)]

        own = {d.name.text: d for d in file.definitions if isinstance(d, syntax.Program)}
        for root in own.values():
            stack = [(root, calls_of(root, own))]
            while stack:
                definition, calls = stack[-1]
                if id(definition) in self._known:
                    stack.pop()
                elif (call := next(calls, None)) is None:
                    self._known[id(definition)] = elaborate_program(definition, file, epilogue, program)
                else:
                    stack.append((called := own[call.function.text], calls_of(called, own)))
        made[file].programs.update({name: self._known[id(definition)] for name, definition in own.items()})


def _made(file: File, states: _States) -> _Made:
    made = _Made({}, {}, {})
    for definition in file.definitions:
        name = definition.name.text
        if isinstance(definition, syntax.State):
            made.states[name] = states.of(definition, file)
        elif isinstance(definition, syntax.Epilogue):
            made.epilogues[name] = elaborate(definition, file, states.find)
    return made


def _module(file: File, made: dict[File, _Made]) -> Module:
    """What a file imports, then what it defines.  Of two imported epilogues or programs of one name only one can be
    called."""
    own = made[file]
    origin: dict[str, syntax.Import] = {}
    epilogues: dict[str, Epilogue] = {}
    states: dict[str, StateDef] = {}
    programs: dict[str, Program] = {}
    for item, imported in file.imports:
        callables: dict[str, Epilogue | Program] = {**made[imported].epilogues, **made[imported].programs}
        for name, callable_ in callables.items():
            if name in own.epilogues or name in own.programs:
                continue
            if name in origin:
                what = "an epilogue" if isinstance(callable_, Epilogue) else "a program"
                raise CodaNameError(
                    f"two imported files define {what} `{shorten(name)}`",
                    file.locate(item.span),
                    notes=((file.locate(origin[name].span), "it is imported here, too"),),
                    hint="import one of them",
                )
            origin[name] = item
            if isinstance(callable_, Epilogue):
                epilogues[name] = callable_
            else:
                programs[name] = callable_
        states |= made[imported].states
    return Module(file.source, epilogues | own.epilogues, states | own.states, programs=programs | own.programs)
