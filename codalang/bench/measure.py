"""A run: which workloads, their kernels compiled ahead, then one workload after the other within a budget of time.

Per workload all ways are made ready, called once and checked against the reference in float64 on a part of the rows and
columns, then timed in turn.  A way that fails is left out and the reason told; the others are measured.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

import codalang
from codalang.bench import implementations as ways
from codalang.bench.implementations import ALWAYS, Implementation, Skipped, Way
from codalang.bench.report import Report, Result
from codalang.bench.timing import Call, Timing, interleaved
from codalang.bench.workloads import PATTERNS, TOKENS, WIDTHS, Operands, Workload, make_operands
from codalang.ir import reference
from codalang.ir.types import Kind
from codalang.lower import ahead
from codalang.lower.spec import KernelSpec

CHECKED = 128  # rows, and columns, that are compared with float64
Timer = Callable[[Mapping[str, Call]], dict[str, Timing]]


@attrs.frozen
class Choice:
    """What is asked for.

    Attributes:
        only: a regular expression that names of workloads must match somewhere.
        ways: beside ours and the points of reference.
    """

    only: str = ""
    groups: tuple[str, ...] = ("epilogue", "gemm", "hosted")
    widths: tuple[str, ...] = tuple(WIDTHS)
    tokens: tuple[int, ...] = TOKENS
    ways: tuple[str, ...] = ("eager", "compile", "liger", "quack", "coda")


def workloads(choice: Choice) -> list[Workload]:
    """The workloads, those that matter most first."""
    matches = re.compile(choice.only).search
    found = [
        Workload(pattern, WIDTHS[width], tokens)
        for width in choice.widths
        for tokens in choice.tokens
        for pattern in PATTERNS.values()
        if pattern.group in choice.groups
    ]
    return [w for w in found if matches(w.name)]


def kernels(chosen: Iterable[Workload]) -> list[KernelSpec]:
    """The kernels that ours needs for them.  Needs no GPU."""
    with ahead.recorded() as specs:
        for workload in chosen:
            ways.codalang(workload, make_operands(workload, "meta")).call()
    return list(specs)


def measured(
    workload: Workload, names: Sequence[str], *, timer: Timer, device: str = "cuda", check: bool = True
) -> Result:
    """One workload.  `names`: beside ours and the points of reference."""
    torch.manual_seed(0)
    operands = make_operands(workload, device)
    every = ways.implementations()
    ready: dict[str, Way] = {}
    skipped: dict[str, str] = {}
    errors: dict[str, dict[str, float]] = {}
    exact = exact_results(workload, operands) if check else {}
    for name in (*ALWAYS, *names):
        outcome = _made_ready(every[name], workload, operands, exact)
        if isinstance(outcome, str):
            skipped[name] = outcome
        elif outcome is not None:
            ready[name], errors[name] = outcome
    with torch.no_grad():
        times = timer({name: way.call for name, way in ready.items()})
    return Result(
        workload.pattern.name,
        workload.pattern.title,
        workload.pattern.group,
        workload.width.name,
        workload.tokens,
        workload.extents,
        workload.flops,
        workload.bytes,
        ways.baseline(workload),
        times,
        skipped,
        {name: way.note for name, way in ready.items() if way.note},
        {name: found for name, found in errors.items() if found},
    )


def _made_ready(
    implementation: Implementation, workload: Workload, operands: Operands, exact: Mapping[str, Tensor]
) -> tuple[Way, dict[str, float]] | str | None:
    """A way and its errors; or why it cannot be measured; or None where the workload is not for it."""
    try:
        with torch.no_grad():
            way = implementation(workload, operands)
            results = way.restore(way.call())
            return way, {name: error(results[name], exact[name]) for name in exact if name in results}
    except Skipped as reason:
        # that there is no GEMM, or that a library has no such function, is no news
        return str(reason) if "import" in str(reason) or "differs" in str(reason) else None
    except Exception as failure:  # another library's, or no memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return f"{type(failure).__name__}: {failure}".splitlines()[0][:200]


def exact_results(workload: Workload, operands: Operands) -> dict[str, Tensor]:
    """What the epilogue gives in float64: tiles and cols of the first rows, rows of the first columns."""
    epilogue, (m, _, _) = workload.epilogue, workload.extents
    found: dict[str, Tensor] = {}
    for kinds, rows, units in (
        ((Kind.TILE, Kind.COL), min(CHECKED, m), workload.unit),
        ((Kind.ROW,), m, min(CHECKED, workload.unit)),
    ):
        names = [o.name for o in epilogue.outputs if o.type.kind in kinds]
        if names:
            given = _part(workload, operands, rows, units)
            results = reference.run(epilogue, given, dtype=torch.float64, extents=(rows, units))
            found |= {name: results[name] for name in names}
    if {"lse", "logit"} <= set(found):
        found["loss"] = found["lse"] - found["logit"]
    return found


def _part(workload: Workload, operands: Operands, rows: int, units: int) -> dict[str, Tensor]:
    """The inputs of the first rows and columns, the accumulator among them, in float64."""
    part = {}
    for param in workload.epilogue.params:
        width = param.type.width
        columns = int(units * width) if width is not None else None
        if param.name in operands.inputs:
            value = operands.inputs[param.name]
            value = value[:rows] if param.type.kind.has_rows else value
            part[param.name] = value if columns is None else value[..., :columns]
        elif operands.a is not None and operands.b is not None:
            part[param.name] = operands.a[:rows].double() @ operands.b[:columns].double().T
    return part


def error(result: Tensor, exact: Tensor) -> float:
    """||result - exact|| / ||exact|| on the part that is known."""
    part = result[tuple(slice(0, size) for size in exact.shape)].double()
    return ((part - exact).norm() / exact.norm()).item()


# ---- the run ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Run:
    """How a run goes.

    Attributes:
        rounds: that each way is timed.
        minutes: no workload is started that would likely end later.
        check: whether results are compared with float64.
    """

    rounds: int = 15
    minutes: float = float("inf")
    check: bool = True
    processes: int | None = None


def reports(
    choice: Choice,
    how: Run,
    *,
    command: str,
    say: Callable[[str], None],
    progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.perf_counter,
    timer: Timer | None = None,
    device: str = "cuda",
    compile_kernels: bool = True,
) -> Iterator[Report]:
    """The report as it grows, a workload at a time."""
    begin = clock()
    chosen = workloads(choice)
    if compile_kernels:
        say(_compiled(chosen, how.processes, progress))
    timer = timer or (lambda calls: interleaved(calls, rounds=how.rounds))
    report = Report(command, machine())
    results: list[Result] = []
    slowest = 0.0
    for index, workload in enumerate(chosen):
        started = clock()
        if started - begin + slowest > 60 * how.minutes:
            unreached = tuple(w.name for w in chosen[index:])
            yield attrs.evolve(report, unreached=unreached, seconds=started - begin, results=tuple(results))
            return
        results.append(measured(workload, choice.ways, timer=timer, device=device, check=how.check))
        slowest = max(slowest, clock() - started)
        say(line(results[-1]))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the next one's tensors have other sizes
        yield attrs.evolve(report, results=tuple(results), seconds=clock() - begin)


def _compiled(chosen: Sequence[Workload], processes: int | None, progress: Callable[[int, int], None]) -> str:
    """Compile what they need; what to say of it.  A kernel that fails is told when its workload is reached."""
    begin = time.perf_counter()
    outcome = ahead.compile_each(kernels(chosen), processes, progress)
    lines = [f"{len(outcome)} kernels in {time.perf_counter() - begin:.0f} s"]
    for spec, compiled in outcome.items():
        lines += [f"  {spec.epilogue.name}: {text}" for text in (*compiled.remarks, compiled.error) if text]
    return "\n".join(lines)


def machine() -> dict[str, str]:
    """What a run ran on."""
    facts = {"codalang": codalang.__version__, "torch": torch.__version__}
    return {"device": torch.cuda.get_device_name(), **facts} if torch.cuda.is_available() else facts


def line(result: Result) -> str:
    """A workload that is done, in a line."""
    shown = [f"{way} {timing.median:.3f}" for way, timing in result.times.items()]
    wrong = [f"{way} IS WRONG" for way in result.wrong]
    failed = [f"{way} FAILED: {reason}" for way, reason in result.skipped.items() if way in ALWAYS]
    return f"{result.name:32} ms: " + "  ".join([*shown, *wrong, *failed])
