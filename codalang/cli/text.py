"""Commands on text alone: check, fmt, grad.  None of them imports torch."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from codalang.autodiff import Derivative, derive
from codalang.cli import OK, WRONG, add_json, add_program, describe, print_json, report_errors
from codalang.cli.programs import chosen, load_program, read_file
from codalang.cli.streams import write_program
from codalang.errors import CodaError
from codalang.ir.epilogue import Epilogue
from codalang.ir.printer import print_epilogue
from codalang.ir.simplify import simplify
from codalang.parser.format import format_source


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
    grad.add_argument("--wrt", type=names, help="parameters whose gradients are wanted, a,b (default: all)")
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
            checked.append({"program": program, "ok": False, "epilogues": []})
            continue
        checked.append({"program": program, "ok": True, "epilogues": list(module.epilogues)})
        if not options.json:
            count = len(module.epilogues)
            print(f"{program}: ok, {count} epilogue{'' if count == 1 else 's'}")
    report_errors(errors, as_json=False)
    if options.json:
        print_json(not errors, programs=checked, errors=[describe(e) for e in errors])
    return WRONG if errors else OK


def run_fmt(options: argparse.Namespace) -> int:
    """`codalang fmt`: in place, as formatters do; a file that is wrong is left alone."""
    errors: list[CodaError] = []
    changed: list[str] = []
    shown: list[dict[str, str]] = []
    for program in options.programs:
        try:
            source = read_file(program)
            text = format_source(source)
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


def _difference(before: str, after: str, name: str) -> str:
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), name, f"{name} (formatted)")
    return "".join(lines)


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
    module = load_program(options.program)
    results = []
    texts = []
    for epilogue in chosen(module, options.name):
        derivative = derived(epilogue, options.wrt, options.cotangents)
        results.append(_describe_derivative(epilogue, derivative))
        if options.forward:
            texts.append(print_epilogue(derivative.forward))
        texts.append(print_epilogue(derivative.backward))
    if options.json:
        print_json(True, derivatives=results)
    else:
        sys.stdout.write("\n".join(texts))
    return OK


def derived(epilogue: Epilogue, wrt: list[str] | None = None, cotangents: list[str] | None = None) -> Derivative:
    """The derivative of the simplified epilogue."""
    return derive(simplify(epilogue), wrt=wrt, cotangents=cotangents)


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
