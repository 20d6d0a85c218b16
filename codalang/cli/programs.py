"""From the arguments PROGRAM and NAME to a source, a module, and epilogues."""

from __future__ import annotations

import difflib
import sys

from codalang.errors import CodaCallError, Source
from codalang.ir.epilogue import Epilogue
from codalang.ir.module import Module
from codalang.ir.verify import verify
from codalang.parser import decode, parse, read_source
from codalang.sources import resolve


def read_file(argument: str) -> Source:
    """The source of a file, or of standard input.  Raises CodaError where it cannot be read."""
    if argument == "-":
        if sys.stdin is None:
            raise CodaCallError("cannot read from standard input: it is closed", argument="PROGRAM")
        return decode(sys.stdin.buffer.read(), "<stdin>")
    return read_source(argument)


def read_program(argument: str) -> Source:
    """The source that an argument means: `-` is standard input, an identifier a name of the standard library, anything
    else a file.  Raises CodaError where there is none."""
    if not argument:
        raise CodaCallError("the program is an empty text", argument="PROGRAM", hint="pass a file, - or a name")
    return resolve(argument) if argument.isidentifier() else read_file(argument)


def load_program(argument: str) -> Module:
    """The module, parsed and verified."""
    module = parse(read_program(argument))
    for epilogue in module.epilogues.values():
        verify(epilogue)
    return module


def chosen(module: Module, name: str | None) -> list[Epilogue]:
    """The epilogue of that name, or all.  Raises CodaCallError where there is none."""
    if not module.epilogues:
        raise CodaCallError(f"{module.source.name} defines no epilogues", argument="PROGRAM")
    if name is None:
        return list(module.epilogues.values())
    if name in module.epilogues:
        return [module.epilogues[name]]
    have = list(module.epilogues)
    near = difflib.get_close_matches(name, have, n=1)
    raise CodaCallError(
        f"{module.source.name} defines no epilogue `{name}`; it defines {', '.join(have)}",
        argument="NAME",
        hint=f"did you mean `{near[0]}`?" if near else None,
    )


def only(module: Module, name: str | None) -> Epilogue:
    """The epilogue of that name, or the only one.  Raises CodaCallError where a name is needed."""
    epilogues = chosen(module, name)
    if len(epilogues) == 1:
        return epilogues[0]
    raise CodaCallError(
        f"{module.source.name} defines {len(epilogues)} epilogues: {', '.join(e.name for e in epilogues)}",
        argument="NAME",
        hint="say which: write its name after the program",
    )
