"""From the arguments PROGRAM and NAME to a source, a module, and its programs and epilogues."""

from __future__ import annotations

import difflib
import sys

from codalang.errors import CodaCallError, Source
from codalang.ir.epilogue import Epilogue
from codalang.ir.module import Module
from codalang.ir.program import Program
from codalang.ir.verify import verify
from codalang.ir.verify_program import check_determined, verify_program
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


def load_program(argument: str, precise: bool = False) -> Module:
    """The module, parsed and verified; with every epilogue a `precise` one, if asked for."""
    module = parse(read_program(argument))
    module = module.precise() if precise else module
    for epilogue in module.epilogues.values():
        verify(epilogue)
    for program in module.programs.values():
        verify_program(program)
        check_determined(program)
    return module


def selected(module: Module, name: str | None) -> list[Program] | list[Epilogue]:
    """What a command is about: the program or the epilogue of that name.  Without a name all programs, and of a file
    without programs all epilogues.

    Raises CodaCallError where there is none.
    """
    if name is None:
        return list(module.programs.values()) or chosen(module, None)
    return [module.programs[name]] if name in module.programs else chosen(module, name)


def chosen(module: Module, name: str | None) -> list[Epilogue]:
    """The epilogue of that name, or all.  Raises CodaCallError where there is none."""
    if not module.epilogues and not module.programs:
        raise CodaCallError(f"{module.source.name} defines no epilogues", argument="PROGRAM")
    if name is None:
        return list(module.epilogues.values())
    if name in module.epilogues:
        return [module.epilogues[name]]
    raise _unknown(module, name, "program or epilogue" if module.programs else "epilogue")


def only(module: Module, name: str | None) -> Program | Epilogue:
    """The one that `selected` gives.  Raises CodaCallError where a name is needed."""
    found = selected(module, name)
    if len(found) == 1:
        return found[0]
    what = "programs" if module.programs else "epilogues"
    raise CodaCallError(
        f"{module.source.name} defines {len(found)} {what}: {', '.join(e.name for e in found)}",
        argument="NAME",
        hint="say which: write its name after the file",
    )


def only_program(module: Module, name: str | None) -> Program:
    """The program of that name, or the only one.  Raises CodaCallError where there is none, or several."""
    if not module.programs:
        raise CodaCallError(
            f"{module.source.name} defines no programs",
            argument="PROGRAM",
            hint="only programs are drawn; `codalang explain` tells what an epilogue moves",
        )
    if name is not None and name not in module.programs:
        raise _unknown(module, name, "program")
    found = only(module, name)
    assert isinstance(found, Program)
    return found


def _unknown(module: Module, name: str, what: str) -> CodaCallError:
    have = [*module.programs, *(module.epilogues if "epilogue" in what else ())]
    near = difflib.get_close_matches(name, have, n=1)
    return CodaCallError(
        f"{module.source.name} defines no {what} `{name}`; it defines {', '.join(have)}",
        argument="NAME",
        hint=f"did you mean `{near[0]}`?" if near else None,
    )
