"""The command `codalang`: one subcommand for each stage that a program passes through.

    check    read, type-check and verify                                   text.py
    fmt      rewrite in the canonical format, comments kept                text.py
    grad     print the derived backward                                    text.py
    emit     print a stage: IR, backward, CuTe DSL, PTX                    kernels.py
    explain  what a program moves, keeps and computes                      explain.py
    graph    draw a program and its backward                               graph.py
    compile  to an object for sm_90a, with the device compiler's report    kernels.py
    run      on random inputs, against the reference in float64            trial.py
    bench    time kernels beside cuBLAS, torch.compile and other libraries bench.py
    tune     time configurations on this GPU, and remember the best        tune.py

PROGRAM is a file, `-` for standard input, or a name of the standard library.

| exit code | means                                                                                          |
|-----------|------------------------------------------------------------------------------------------------|
| 0         | done                                                                                           |
| 1         | the program or the call is wrong; or: `fmt --check` would change a file, `run` is inaccurate, |
|           | `compile` finds a kernel that spills registers, a serialized wgmma, or a part without a kernel |
| 2         | the command line is wrong                                                                      |
| 130       | interrupted                                                                                    |

Results go to standard output, errors (with the line and a caret) to standard error.  With `--json` standard output is
one JSON object: `{"ok": true, ...}`, or `{"ok": false, "errors": [...]}`, also where the
command line is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from codalang import __version__
from codalang.cli.order import positionals_first
from codalang.cli.streams import drop_output, ready_streams
from codalang.errors import CodaCallError, CodaError

OK, WRONG, USAGE, INTERRUPTED = 0, 1, 2, 130

# Which module has a command: one that is given is the only one that is imported.
_MODULES = {
    "check": "text",
    "fmt": "text",
    "grad": "text",
    "emit": "kernels",
    "compile": "kernels",
    "explain": "explain",
    "graph": "graph",
    "run": "trial",
    "bench": "bench",
    "tune": "tune",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's) and return its exit code."""
    ready_streams()
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output has gone, `head` for instance
        drop_output()
        return WRONG
    except OSError as error:  # a full disk; what cannot be read is a CodaError
        drop_output()
        what = error.filename or "standard output"
        report_errors([CodaError(f"cannot write to {what}: {error.strerror or error}")], as_json=False)
        return WRONG
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(arguments: Sequence[str]) -> int:
    """Parse and run a command line."""
    try:
        parser, commands = _parsers(arguments[0] if arguments else "")
        if arguments and arguments[0] in commands:
            arguments = [arguments[0], *positionals_first(commands[arguments[0]], arguments[1:])]
        options = parser.parse_args(arguments)
    except SystemExit as stop:  # argparse has printed the help
        return stop.code if isinstance(stop.code, int) else USAGE
    except UsageError as error:
        print(f"{error.usage}{error}", file=sys.stderr)
        if "--json" in arguments:
            print_json(False, errors=[describe(CodaCallError(error.message))])
        return USAGE
    try:
        return int(options.command(options))
    except CodaError as error:
        report_errors([error], options.json)
        return WRONG


class UsageError(Exception):
    """The command line is wrong.  As text it is what argparse prints under the usage."""

    def __init__(self, parser: argparse.ArgumentParser, message: str) -> None:
        super().__init__(f"{parser.prog}: error: {message}")
        self.message, self.usage = message, parser.format_usage()


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong, so that it can be told as JSON, too."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(self, message)


def report_errors(errors: Sequence[CodaError], as_json: bool) -> None:
    """Errors for people on standard error and, where asked for, for scripts on standard output."""
    for error in errors:
        print(f"{_red('error')}: {error}", file=sys.stderr)
    if as_json:
        print_json(False, errors=[describe(error) for error in errors])


def print_json(ok: bool, **fields: Any) -> None:
    """The one object that a command prints with --json."""
    print(json.dumps({"ok": ok, **fields}, indent=2))


def describe(error: CodaError) -> dict[str, Any]:
    """An error as data."""
    return {
        "type": type(error).__name__,
        "message": error.message,
        "argument": error.argument,
        "hint": error.hint,
        **_place(error.loc),
        "notes": [{"message": text, **_place(loc)} for loc, text in error.notes],
    }


def _place(loc: Any) -> dict[str, Any]:
    if loc is None:
        return {"file": None, "line": None, "column": None, "end_column": None}
    return {"file": loc.source.name, "line": loc.line, "column": loc.column, "end_column": loc.end_column}


def _red(text: str) -> str:
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    return f"\033[31;1m{text}\033[0m" if colour else text


def _parsers(command: str) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of a command line, and those of the commands in its module; of all, where it is none."""
    parser = _Parser(
        prog="codalang",
        description="GEMM epilogues as programs, with derived backward kernels.",
        epilog="Exit codes: 0 done; 1 the program or call is wrong; 2 the command line is wrong.",
    )
    parser.add_argument("--version", action="version", version=f"codalang {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in dict.fromkeys([_MODULES[command]] if command in _MODULES else _MODULES.values()):
        importlib.import_module(f"codalang.cli.{module}").add_commands(commands)
    return parser, commands.choices


_ANY_NAME = "a program or epilogue in it (default: all programs, or all epilogues)"


def add_program(parser: argparse.ArgumentParser, name: str = _ANY_NAME) -> None:
    """The arguments PROGRAM, NAME and --json that most commands take; `name` says what NAME is."""
    parser.add_argument("program", metavar="PROGRAM", help="a .coda file, - for standard input, or a standard name")
    parser.add_argument("name", metavar="NAME", nargs="?", help=name)
    add_json(parser)


def add_precise(parser: argparse.ArgumentParser) -> None:
    """Add the option --precise."""
    parser.add_argument("--precise", action="store_true", help="kernels compute exp, log &c. to the last digit or two")


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
