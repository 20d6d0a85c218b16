"""Commands on text alone: check, fmt, grad.  None of them imports torch."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from codalang.cli import OK, WRONG, add_json, add_program, describe, print_json, report_errors
from codalang.cli.programs import load_program, read_file, selected
from codalang.cli.streams import write_program
from codalang.errors import CodaError, Source
from codalang.ir.builtin_states import BUILTIN_STATES
from codalang.ir.epilogue import Epilogue, State
from codalang.ir.module import Module
from codalang.ir.printer import print_epilogue, print_module
from codalang.ir.program import Apply, Program
from codalang.ir.simplify import simplify
from codalang.ir.types import Dtype
from codalang.parser.format import format_source

if TYPE_CHECKING:
    from codalang.autodiff import Derivative
    from codalang.autodiff.program_derivative import ProgramDerivative


def add_commands(commands: Any) -> None:
    """Declare the commands."""
    check = commands.add_parser("check", help="read, type-check and verify programs")
    check.add_argument("programs", metavar="PROGRAM", nargs="+", help="a .coda file, -, or a standard name")
    add_json(check)
    check.set_defaults(command=run_check)

    fmt = commands.add_parser("fmt", help="rewrite files in the canonical format; - formats stdin to stdout")
    fmt.add_argument("programs", metavar="FILE", nargs="+", help="a .coda file, or - for standard input")
    mode = fmt.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file would change")
    mode.add_argument("--diff", action="store_true", help="write nothing; print what would change, exit 1 if anything")
    add_json(fmt)
    fmt.set_defaults(command=run_fmt)

    grad = commands.add_parser("grad", help="print the derived backward as .coda")
    add_program(grad)
    grad.add_argument(
        "--wrt", type=names, help="parameters whose gradients are wanted, a,b (default: all that have no default)"
    )
    grad.add_argument("--cotangents", type=names, help="outputs whose cotangents are present, x,y (default: all)")
    grad.add_argument(
        "--forward", action="store_true", help="print the forward that saves what the backward needs, too"
    )
    grad.set_defaults(command=run_grad)


def names(text: str) -> list[str]:
    """A comma-separated list of names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def run_check(options: argparse.Namespace) -> int:
    """`codalang check`: every file is checked, whatever is wrong with the others."""
    errors: list[CodaError] = []
    checked = []
    for program in options.programs:
        try:
            module = load_program(program)
        except CodaError as error:
            errors.append(error)
            checked.append({"program": program, "ok": False, "epilogues": [], "programs": []})
            continue
        found = {"epilogues": list(module.epilogues), "programs": list(module.programs)}
        checked.append({"program": program, "ok": True, **found})
        if not options.json:
            counted = [_counted(kind[:-1], names) for kind, names in found.items() if names]
            print(f"{program}: ok, {', '.join(counted) or 'no epilogues or programs'}")
    report_errors(errors, as_json=False)
    if options.json:
        print_json(not errors, programs=checked, errors=[describe(e) for e in errors])
    return WRONG if errors else OK


def _counted(what: str, names: list[str]) -> str:
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'}"


def run_fmt(options: argparse.Namespace) -> int:
    """`codalang fmt`: in place, as formatters do; a file that is wrong is left alone."""
    errors: list[CodaError] = []
    changed: list[str] = []
    shown: list[dict[str, str]] = []
    for program in options.programs:
        try:
            source = read_file(program)
            text = _ended_as(source.text, format_source(source))
        except CodaError as error:
            errors.append(error)
            continue
        if text != source.text:
            changed.append(program)
        if options.diff:
            shown.append({"program": program, "text": _difference(source.text, text, program)})
        elif program == "-" and not options.check:
            shown.append({"program": program, "text": text})
        elif text != source.text and not options.check:
            _replace(Path(program), text)
        if not options.json and not options.diff and program != "-" and text != source.text:
            print(f"{'would reformat' if options.check else 'reformatted'} {program}", file=sys.stderr)
        if shown and not options.json:
            write_program(shown.pop()["text"])
    report_errors(errors, as_json=False)
    ok = not errors and not (changed and (options.check or options.diff))
    if options.json:
        print_json(ok, changed=changed, shown=shown, errors=[describe(e) for e in errors])
    return OK if ok else WRONG


def _ended_as(before: str, after: str) -> str:
    """A text with its lines ended as the first line of another one is: by \\n, \\r\\n or \\r."""
    end = re.search(r"\r\n|\n|\r", before)
    return after if end is None else after.replace("\n", end[0])


def _difference(before: str, after: str, name: str) -> str:
    end = "\r\n" if "\r\n" in after else "\r" if "\r" in after else "\n"
    texts = [text.replace(end, "\n") for text in (before, after)]
    old, new = (_LINE.findall(text.replace("\r", "\\r")) for text in texts)  # an end that changes is shown
    return "".join(difflib.unified_diff(old, new, name, f"{name} (formatted)"))


_LINE = re.compile(r"[^\n]*\n|[^\n]+")


def _replace(path: Path, text: str) -> None:
    """Write a whole file or nothing, keeping its mode, through links.  Raises CodaError where it cannot."""
    target = path.resolve()
    temporary: str | None = None
    try:
        mode = target.stat().st_mode
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
        os.chmod(temporary, mode & 0o7777)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise CodaError(f"cannot write {path}: {error.strerror or error}") from None


def run_grad(options: argparse.Namespace) -> int:
    """`codalang grad`: what is printed is a program again."""
    results: list[dict[str, Any]] = []
    epilogues: list[Epilogue] = []
    programs: list[Program] = []
    for item in selected(load_program(options.program), options.name):
        if isinstance(item, Program):
            made = derived_program(item, options.wrt, options.cotangents)
            results.append(_describe_program(item, made))
            programs += [made.forward, made.backward] if options.forward else [made.backward]
        else:
            derivative = derived(item, options.wrt, options.cotangents)
            results.append(_describe_derivative(item, derivative))
            epilogues += [derivative.forward, derivative.backward] if options.forward else [derivative.backward]
    if options.json:
        print_json(True, derivatives=results)
    elif programs:
        sys.stdout.write(print_programs(programs))
    else:
        sys.stdout.write("\n".join(print_epilogue(epilogue) for epilogue in epilogues))
    return OK


def derived_program(
    program: Program, wrt: list[str] | None = None, cotangents: list[str] | None = None
) -> ProgramDerivative:
    """The derivative of a program; without `wrt` for all but scalars that have a default, which callers leave out."""
    from codalang.autodiff import derive_program

    if wrt is None:
        wrt = [p.name for p in program.params if p.default is None and p.type.dtype is Dtype.F32]
    return derive_program(program, wrt=wrt, cotangents=cotangents)


def print_programs(programs: Sequence[Program]) -> str:
    """One text of programs and the epilogues that they apply.  Of different epilogues with one name, all but the first
    get the name of their program, too."""
    taken: dict[str, Epilogue] = {}
    renamed = []
    for program in programs:
        names: dict[Epilogue, Epilogue] = {}
        for epilogue in program.epilogues():
            name, number = epilogue.name, 1
            while taken.get(name, attrs.evolve(epilogue, name=name)) != attrs.evolve(epilogue, name=name):
                name, number = f"{program.name}_{epilogue.name}" + (f"_{number}" if number > 1 else ""), number + 1
            names[epilogue] = taken[name] = attrs.evolve(epilogue, name=name)
        statements = tuple(
            attrs.evolve(s, epilogue=names[s.epilogue]) if isinstance(s, Apply) else s for s in program.statements
        )
        renamed.append(attrs.evolve(program, statements=statements))
    states = {o.definition.name: o.definition for e in taken.values() for o in e.outputs if isinstance(o, State)}
    own = {name: state for name, state in states.items() if name not in BUILTIN_STATES}
    return print_module(Module(Source("<derived>", ""), taken, own, programs={p.name: p for p in renamed}))


def derived(
    epilogue: Epilogue,
    wrt: list[str] | None = None,
    cotangents: list[str] | None = None,
    budget: float | None = None,
) -> Derivative:
    """The derivative of the simplified epilogue."""
    from codalang.autodiff import derive

    return derive(simplify(epilogue), wrt=wrt, cotangents=cotangents, budget=budget)


def _describe_program(program: Program, derivative: ProgramDerivative) -> dict[str, Any]:
    return {
        "name": program.name,
        "forward": print_programs([derivative.forward]),
        "backward": print_programs([derivative.backward]),
        "saved": list(derivative.saved),
        "gradients": derivative.gradients,
        "cotangents": derivative.cotangents,
        "loads": {name: {"source": load.source, "name": load.name} for name, load in derivative.loads.items()},
    }


def _describe_derivative(epilogue: Epilogue, derivative: Derivative) -> dict[str, Any]:
    return {
        "name": epilogue.name,
        "forward": print_epilogue(derivative.forward),
        "backward": print_epilogue(derivative.backward),
        "saved": list(derivative.saved),
        "gradients": derivative.gradients,
        "cotangents": derivative.cotangents,
        "loads": {name: {"source": load.source, "name": load.name} for name, load in derivative.loads.items()},
        "plan": [
            {"value": d.value, "how": d.how, "load": float(d.load), "store": float(d.store)} for d in derivative.plan
        ],
    }
