"""compute-sanitizer on the standard library: `python benchmarks/sanitize.py [--tools memcheck ...] [--minutes 4]`.

Every epilogue of stdlib/, forward and derived backward, on a GEMM and hosted, runs once at ragged extents under each
tool.  The kernels are compiled first, without the sanitizer.  Then each tool runs in a few processes beside each other,
each with its share of the cases, until all are done or the minutes are over; only our kernels are instrumented, and
each tensor has an allocation of its own.  A planted fault, an output with too little memory, shows that memcheck sees
what our kernels do.

Prints a table: epilogue x tool -> errors, and how many of its cases were covered.  Exits with 1 where there are errors,
with 2 where no sanitizer is found, or none can work here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/gpu")]

import gpu_cases  # noqa: E402
import gpu_checks  # noqa: E402
import gpu_compile  # noqa: E402
import torch  # noqa: E402

from codalang.bench.report import aligned  # noqa: E402
from codalang.lower import call, run  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck")
PLANTED = "planted fault"
EXTENTS = (129, 136, 72)  # M, N, K; N is made a multiple of what the epilogue needs
OPTIONS = (
    "--kernel-name=kns=codalang",  # a substring of every name of ours
    "--destroy-on-device-error=kernel",
    "--report-api-errors=no",
    "--target-processes=application-only",
    "--show-backtrace=no",
    "--print-limit=1000",
)
# What a record of an error begins with; what belongs to it is indented.
RECORD = re.compile(r"^=+ (?! )(?!COMPUTE-SANITIZER|.*SUMMARY|Target application|Warning:)(.+)", re.MULTILINE)
SETTLE_SECONDS = 0.03  # from a kernel's end until the sanitizer has written what it found


@attrs.frozen
class Share:
    """A process's part of a tool's cases: every `count`-th, from `index`; where that is `count`, the planted fault,
    which has a process of its own since it may be the last that a process does."""

    tool: str
    index: int
    count: int

    def path(self, folder: Path, suffix: str) -> Path:
        """A file of its own."""
        return folder / f"{self.tool}-{self.index}{suffix}"


@attrs.frozen
class Outcome:
    """A case that ran under a tool, and the errors reported meanwhile."""

    tool: str
    name: str
    case: str
    errors: tuple[str, ...]


def cases() -> list[gpu_cases.Case]:
    """Each subject as the heuristic has it for so little work, and on a GEMM also with a tiling for much, in turn."""
    found = []
    for turn, subject in enumerate(gpu_cases.subjects(tuple(gpu_cases.LIBRARY))):
        m, n, k = EXTENTS
        n = gpu_cases.fitted(subject.name, n)
        dtype = gpu_cases.DTYPES[turn % 2]
        tilings = (None, turn % len(gpu_cases.TILINGS)) if subject.on_gemm else (None,)
        found += [gpu_cases.Case(subject, dtype, m, n, k, tiling=tiling) for tiling in tilings]
    return found


def records(log: str) -> tuple[str, ...]:
    """The errors of a log, each by its first line."""
    return tuple(RECORD.findall(log))


# ---- within a sanitizer ----------------------------------------------------------------------------------------------


def work(share: Share, folder: Path) -> None:
    """Run a share's cases; a line of JSON for each.  Where something is wrong with a case itself, it is not covered."""
    log, seen = share.path(folder, ".log"), 0
    with share.path(folder, ".jsonl").open("w") as lines:
        todo = [None] if share.index == share.count else cases()[share.index :: share.count]
        for case in todo:
            try:
                run_one(case)
            except Exception as error:
                print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                if case is not None:
                    continue
            time.sleep(SETTLE_SECONDS)
            text = log.read_text() if log.exists() else ""
            name, title = (PLANTED, PLANTED) if case is None else (case.subject.name, str(case))
            outcome = Outcome(share.tool, name, title, records(text[seen:]))
            seen = len(text)
            print(json.dumps(attrs.asdict(outcome)), file=lines, flush=True)


def run_one(case: gpu_cases.Case | None) -> None:
    """A case once, on inputs like any; None is the planted fault."""
    if case is not None:
        gpu_checks.run_case(case, gpu_checks.make_inputs(case, "cuda"), run)
        torch.cuda.synchronize()
        return
    case, original = planted(), call.empty

    def short(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = original(*args, **kwargs)
        tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() // 2)
        return tensor

    inputs = gpu_checks.make_inputs(case, "cuda")
    call.empty = short
    try:
        gpu_checks.run_case(case, inputs, run)
        torch.cuda.synchronize()
    finally:
        call.empty = original


def planted() -> gpu_cases.Case:
    """The case whose outputs get too little memory."""
    return next(c for c in cases() if c.subject.name == "relu" and not c.subject.backward and not c.subject.on_gemm)


# ---- around it -------------------------------------------------------------------------------------------------------


def sanitizers(given: Sequence[str]) -> list[str]:
    """Executables to try, in order: what is installed, then those given."""
    usual = (shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer")
    return [path for path in dict.fromkeys((*usual, *given)) if path and os.access(path, os.X_OK)]


def run_tools(sanitizer: str, shares: Sequence[Share], folder: Path, seconds: float) -> None:
    """All shares beside each other; those that are not done in time are ended."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    running = []
    for share in shares:
        own = [str(share.path(folder, ".log")), *map(str, (share.tool, share.index, share.count)), str(folder)]
        command = [sanitizer, "--tool", share.tool, "--log-file", own[0], *OPTIONS, sys.executable, __file__, "--work"]
        with share.path(folder, ".err").open("w") as output:
            process = subprocess.Popen(
                [*command, *own[1:]], env=environment, stdout=output, stderr=output, start_new_session=True
            )
        running.append(process)
    end = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def outcomes(shares: Sequence[Share], folder: Path) -> Iterator[Outcome]:
    """What the shares found; errors that were reported after the last case are of no case."""
    for share in shares:
        path, log = share.path(folder, ".jsonl"), share.path(folder, ".log")
        told = 0
        for line in path.read_text().splitlines() if path.exists() else []:
            data = json.loads(line)
            outcome = Outcome(**{**data, "errors": tuple(data["errors"])})
            told += len(outcome.errors)
            yield outcome
        every = records(log.read_text()) if log.exists() else ()
        if every[told:]:
            name = PLANTED if share.index == share.count else "(of no case)"
            yield Outcome(share.tool, name, "", every[told:])


def table(
    found: Sequence[Outcome], expected: Sequence[gpu_cases.Case], tools: Sequence[str]
) -> list[dict[str, object]]:
    """A row per epilogue, and one for all: under each tool, its errors, and how many of its cases were covered."""
    found = [o for o in found if o.name != PLANTED]
    names = dict.fromkeys([c.subject.name for c in expected] + [o.name for o in found])
    rows = []
    for title, those in [*((name, {name}) for name in names), ("all", set(names))]:
        row: dict[str, object] = {"epilogue": title}
        count = sum(c.subject.name in those for c in expected)
        for tool in tools:
            mine = [o for o in found if o.tool == tool and o.name in those]
            covered = f" ({sum(bool(o.case) for o in mine)} of {count})" if count else ""
            row[tool] = f"{sum(len(o.errors) for o in mine)}{covered}"
        rows.append(row)
    return rows


def complaint(shares: Sequence[Share], folder: Path) -> str:
    """The first line of what the first process said, where no case was covered."""
    for suffix in (".log", ".err"):
        path = shares[0].path(folder, suffix)
        said = [line.strip("= ") for line in path.read_text().splitlines()] if path.exists() else []
        if said := [line for line in said if line and line != "COMPUTE-SANITIZER"]:
            return said[0]
    return "it said nothing"


def main() -> None:
    """Parse the command line, compile, run the tools, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--processes", type=int, default=4, help="of each tool (default: 4)")
    parser.add_argument("--minutes", type=float, default=4.0, help="that the tools may run, beside each other")
    parser.add_argument("--sanitizer", nargs="+", default=[], help="executables to try after those that are installed")
    parser.add_argument("--out", type=Path, default=Path("sanitize"), help="folder for logs and sanitize.json")
    parser.add_argument("--compile-only", action="store_true", help="compile the kernels, and run nothing; no GPU")
    parser.add_argument("--work", nargs=4, metavar="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        tool, index, count, folder = options.work
        work(Share(tool, int(index), int(count)), Path(folder))
        return
    expected = cases()
    if options.compile_only:
        compile_kernels(expected)
        return
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        sys.exit("sanitize.py needs a Hopper GPU (compute capability 9.0)")
    candidates = sanitizers(options.sanitizer)
    if not candidates:
        print("compute-sanitizer is not here")
        sys.exit(2)
    compile_kernels(expected)
    count = options.processes
    shares = [Share(tool, i, count) for tool in options.tools for i in range(count + (tool == "memcheck"))]
    for number, sanitizer in enumerate(candidates):
        folder = options.out / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        run_tools(sanitizer, shares, folder, 60 * options.minutes)
        found = list(outcomes(shares, folder))
        if any(o.case for o in found):
            break
        print(f"{sanitizer} cannot work here: {complaint(shares, folder)}", flush=True)
    else:
        sys.exit(2)
    print(aligned(table(found, expected, options.tools)))
    print(f"{time.monotonic() - begin:.0f} s")
    sys.exit(judged(found, options.tools, options.out))


def compile_kernels(expected: Sequence[gpu_cases.Case]) -> None:
    """Bring the cases' kernels into the disk cache, and say how long it took."""
    begin = time.monotonic()
    specs = gpu_compile.kernels(expected, "meta")
    for spec, compiled in gpu_compile.compile_each(specs).items():
        if compiled.error:
            print(f"{spec.epilogue.name} with {spec.config}: {compiled.error}")
    print(f"{len(expected)} cases, {len(specs)} kernels compiled in {time.monotonic() - begin:.0f} s", flush=True)


def judged(found: Sequence[Outcome], tools: Sequence[str], out: Path) -> int:
    """Print the errors and write all; the exit status."""
    (out / "sanitize.json").write_text(json.dumps([attrs.asdict(o) for o in found], indent=1))
    seen = any(o.errors for o in found if o.name == PLANTED)
    wrong = [o for o in found if o.errors and o.name != PLANTED]
    for outcome in wrong:
        print(f"{outcome.tool}: {outcome.case or outcome.name}: {len(outcome.errors)} errors: {outcome.errors[0]}")
    if "memcheck" in tools:
        print(f"memcheck {'saw' if seen else 'DID NOT SEE'} the planted fault")
    return int(bool(wrong) or ("memcheck" in tools and not seen))


if __name__ == "__main__":
    main()
