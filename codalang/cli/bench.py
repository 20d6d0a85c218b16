"""The command bench: kernels beside cuBLAS, torch, torch.compile and other libraries.  What is measured, and how:
`codalang.bench`."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codalang.cli import OK, WRONG, add_json, print_json
from codalang.errors import CodaCallError

if TYPE_CHECKING:
    from codalang.bench.report import Report

_GROUPS = ("epilogue", "gemm", "hosted")
_OTHERS = ("host", "first-call")
_WIDTHS = ("8B", "1B", "70B")
_TOKENS = (8192, 4096, 16384)
_WAYS = ("eager", "compile", "max-autotune", "liger", "quack", "coda")


def add_commands(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "bench",
        help="time kernels beside cuBLAS, torch.compile and other libraries",
        description="Patterns of Llama-3 layers: kernels beside the bare cuBLAS GEMM, torch, torch.compile and other "
        "libraries, in turn, with a cold L2 and the host's cost kept out.",
    )
    parser.add_argument("--only", metavar="REGEX", type=_pattern, default="", help="workloads whose name matches")
    parser.add_argument(
        "--section", nargs="+", choices=(*_GROUPS, *_OTHERS), default=[*_GROUPS, *_OTHERS], help="default: all"
    )
    parser.add_argument("--widths", nargs="+", choices=_WIDTHS, default=list(_WIDTHS), help="models (default: all)")
    parser.add_argument("--tokens", nargs="+", type=_positive, default=list(_TOKENS), metavar="N", help="default: all")
    parser.add_argument(
        "--ways",
        nargs="*",
        choices=_WAYS,
        default=[way for way in _WAYS if way != "max-autotune"],
        help="to measure beside ours and cuBLAS (default: all but max-autotune, which tunes for minutes)",
    )
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, whose compiling takes long")
    parser.add_argument("--rounds", type=_rounds, default=15, help="how often each is timed (default: 15)")
    parser.add_argument("--minutes", type=_minutes, default=float("inf"), help="start nothing that would end later")
    parser.add_argument("--no-check", dest="check", action="store_false", help="do not compare results with float64")
    parser.add_argument("--tuned", action="store_true", help="let ours take what `codalang tune` found")
    parser.add_argument("--compile-only", action="store_true", help="compile the kernels, and time nothing; no GPU")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where bench.json, bars.svg and roofline.svg go")
    add_json(parser)
    parser.set_defaults(command=run_bench)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"not a regular expression: {error}") from error
    return text


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _rounds(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError("must be at least 2")
    return number


def _minutes(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def run_bench(options: argparse.Namespace) -> int:
    """`codalang bench`: what is done is told on standard error as it goes, the tables are printed at the end."""
    from codalang.bench import measure, report
    from codalang.bench.workloads import PATTERNS
    from codalang.lower import tuned

    ways = [w for w in options.ways if not (options.no_compile and w in ("compile", "max-autotune"))]
    choice = measure.Choice(
        options.only,
        tuple(g for g in _GROUPS if g in options.section),
        tuple(options.widths),
        tuple(options.tokens),
        tuple(ways),
    )
    if choice.groups and not measure.workloads(choice):
        raise CodaCallError(
            f"no workload matches `{options.only}`",
            argument="--only",
            hint="names are a pattern, a width and a number of tokens, such as `swiglu_backward 8B 8192`; the patterns "
            f"are {', '.join(PATTERNS)}",
        )
    if options.compile_only:
        return _compile(choice, options)
    needs_hopper("bench", "bench --compile-only")
    how = measure.Run(options.rounds, options.minutes, options.check)
    found: Report | None = None
    with contextlib.nullcontext() if options.tuned else tuned.ignored():
        for found in measure.reports(choice, how, command=command_line(), say=say, progress=progress_bar("compiling")):
            if options.out:
                report.write(found, options.out / "bench.json")
        found = found or report.Report(command_line(), measure.machine())
        found = _with_others(found, options, 60 * options.minutes)
    if options.out:
        _write(found, options.out)
    if options.json:
        print_json(True, report=report.as_data(found))
    else:
        sys.stdout.write(report.text(found))
    return WRONG if any("codalang" in r.wrong for r in found.results) else OK


def _compile(choice: Any, options: argparse.Namespace) -> int:
    from codalang.bench import measure
    from codalang.lower.ahead import compile_each

    outcome = compile_each(measure.kernels(measure.workloads(choice)), None, progress_bar("compiling"))
    failed = [f"{spec.epilogue.name}: {c.error}" for spec, c in outcome.items() if c.error]
    slow = [f"{spec.epilogue.name}: {remark}" for spec, c in outcome.items() for remark in c.remarks]
    if options.json:
        print_json(not failed, kernels=len(outcome), failed=failed, slow=slow)
    else:
        print("\n".join([f"{len(outcome)} kernels, {len(failed)} failed", *failed, *slow]))
    return WRONG if failed else OK


def _with_others(found: Report, options: argparse.Namespace, most_seconds: float) -> Report:
    """With the sections that are no workloads, as far as time is left."""
    import attrs

    from codalang.bench import first_call, host

    for section in [s for s in _OTHERS if s in options.section]:
        if found.seconds > most_seconds:
            found = attrs.evolve(found, unreached=(*found.unreached, section))
            continue
        say(section)
        begin = time.perf_counter()
        if section == "host":
            found = attrs.evolve(found, host=host.microseconds())
        else:
            found = attrs.evolve(found, first_calls=tuple(first_call.measured()))
        found = attrs.evolve(found, seconds=found.seconds + time.perf_counter() - begin)
    return found


def _write(found: Report, folder: Path) -> None:
    from codalang.bench import plot, report

    report.write(found, folder / "bench.json")
    (folder / "bars.svg").write_text(plot.bars(found))
    (folder / "roofline.svg").write_text(plot.roofline(found))


# ---- what tune has, too ----------------------------------------------------------------------------------------------


def needs_hopper(command: str, instead: str) -> None:
    """Raise CodaCallError where there is no GPU to time on; `instead` needs none."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise CodaCallError(
            f"`codalang {command}` times kernels on a Hopper GPU (compute capability 9.0), and there is none",
            hint=f"`codalang {instead}` compiles them without one",
        )


def command_line(arguments: Sequence[str] | None = None) -> str:
    """The command as one would type it; where its files go is nobody else's business."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--out" in given[:-1]:
        given[given.index("--out") + 1] = "DIR"
    return shlex.join(["codalang", *given])


def say(text: str) -> None:
    """What is done, on standard error."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def progress_bar(what: str) -> Callable[[int, int], None]:
    """A bar on standard error; where that is no terminal, its end alone."""

    def show(done: int, total: int) -> None:
        if sys.stderr is None or not total:
            return
        if sys.stderr.isatty():
            bar = "#" * (30 * done // total)
            end = "\n" if done == total else ""
            print(f"\r{what} [{bar:.<30}] {done}/{total}", end=end, file=sys.stderr, flush=True)
        elif done == total:
            print(f"{what}: {total} done", file=sys.stderr, flush=True)

    return show
