"""Results as data, as JSON that reads back equal, and as tables.

A ratio is the time of the point of reference (the GEMM alone by cuBLAS, or a copy of as many bytes) over the time of
what is measured: higher is better, and 1.00 means that the epilogue costs nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from codalang.bench.timing import Timing

VERSION = 1
ALLOWED_ERROR = 2.0**-6  # relative, in norm: several times what rounding to bf16 gives
SHOWN_FIRST = ("codalang", "eager", "compile", "max-autotune", "liger", "quack", "coda")
TITLES = {"epilogue": "GEMM + epilogue", "gemm": "Plain GEMM", "hosted": "Epilogue on plain tensors"}


@attrs.frozen
class Result:
    """What was measured of one workload.

    Attributes:
        baseline: the name, among `times`, of what ratios are to.
        bytes: that must move at least; of a hosted one, the tiles.
        times: way -> device milliseconds.
        skipped: way -> why it was not measured.
        notes: way -> what it does less, or otherwise.
        errors: way -> result -> relative error in norm, against float64.
    """

    pattern: str
    title: str
    group: str
    width: str
    tokens: int
    extents: tuple[int, int, int]
    flops: int
    bytes: int
    baseline: str
    times: dict[str, Timing]
    skipped: dict[str, str] = attrs.field(factory=dict)
    notes: dict[str, str] = attrs.field(factory=dict)
    errors: dict[str, dict[str, float]] = attrs.field(factory=dict)

    @property
    def name(self) -> str:
        """Of the workload."""
        return f"{self.pattern} {self.width} {self.tokens}"

    def ratio(self, way: str) -> float | None:
        """The point of reference's time over the way's; None where either was not measured."""
        if way not in self.times or self.baseline not in self.times:
            return None
        return self.times[self.baseline].median / self.times[way].median

    @property
    def wrong(self) -> list[str]:
        """The ways whose results are not the reference's."""
        return [way for way, errors in self.errors.items() if any(not e <= ALLOWED_ERROR for e in errors.values())]


@attrs.frozen
class Report:
    """A run.

    Attributes:
        command: what made it.
        machine: device, versions.
        results: in the order in which they were measured.
        host: call -> microseconds of the host.
        first_calls: epilogue, cache (cold or warm), seconds of each step.
        unreached: workloads for which no time was left.
        seconds: that the run took.
    """

    command: str
    machine: dict[str, str]
    results: tuple[Result, ...] = ()
    host: dict[str, float] = attrs.field(factory=dict)
    first_calls: tuple[dict[str, Any], ...] = ()
    unreached: tuple[str, ...] = ()
    seconds: float = 0.0


def as_data(report: Report) -> dict[str, Any]:
    """As JSON has it."""
    return {"version": VERSION, **attrs.asdict(report)}


def to_json(report: Report) -> str:
    """As text."""
    return json.dumps(as_data(report), indent=1) + "\n"


def from_json(text: str) -> Report:
    """The report again.  Raises ValueError where the text is of another version."""
    data = json.loads(text)
    if not isinstance(data, dict) or data.pop("version", None) != VERSION:
        raise ValueError(f"not a report of `codalang bench`, version {VERSION}")
    results = []
    for entry in data.pop("results"):
        times = {way: Timing(**timing) for way, timing in entry.pop("times").items()}
        results.append(Result(**{**entry, "extents": tuple(entry["extents"]), "times": times}))
    data["first_calls"], data["unreached"] = tuple(data["first_calls"]), tuple(data["unreached"])
    return Report(**data, results=tuple(results))


def write(report: Report, path: Path) -> None:
    """As a file that is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(to_json(report))
    temporary.replace(path)


def merged(reports: Sequence[Report]) -> Report:
    """Several runs as one: of a workload, the call, the first call that several have, the last one's."""
    results = {r.name: r for report in reports for r in report.results}
    host = {name: us for report in reports for name, us in report.host.items()}
    first = [report.first_calls for report in reports if report.first_calls]
    machines: dict[str, None] = {}
    for report in reports:
        machines.setdefault(json.dumps(report.machine))
    if len(machines) != 1:
        raise ValueError("runs on different machines or versions do not go together")
    return Report(
        "\n".join(dict.fromkeys(report.command for report in reports)),
        reports[0].machine,
        tuple(results.values()),
        host,
        first[-1] if first else (),
        tuple(name for name in reports[-1].unreached if name not in results),
        sum(report.seconds for report in reports),
    )


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


@attrs.frozen
class Table:
    """A title and cells; the first row is the heading."""

    title: str
    cells: list[list[str]]

    def text(self) -> str:
        """Aligned columns: names to the left, figures to the right."""
        widths = [max(map(len, column)) for column in zip(*self.cells, strict=True)]
        lines = []
        for first, *rest in self.cells:
            figures = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
            lines.append("  ".join([first.ljust(widths[0]), *figures]).rstrip())
        return "\n".join([self.title, *lines])

    def markdown(self) -> str:
        """As Markdown, the title in a line of its own."""
        lines = ["| " + " | ".join(row) + " |" for row in self.cells]
        return "\n".join([self.title, "", lines[0], "|" + "---|" * len(self.cells[0]), *lines[1:]])


def aligned(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows of equal keys as an aligned table, the keys its heading."""
    if not rows:
        return "(nothing)"
    return Table("", [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]).text().lstrip("\n")


def tables(report: Report) -> list[Table]:
    """All, in the order of the groups, then widths and tokens as they were measured."""
    found = []
    for group in TITLES:
        places = dict.fromkeys((r.width, r.tokens) for r in report.results if r.group == group)
        for width, tokens in places:
            rows = [r for r in report.results if (r.group, r.width, r.tokens) == (group, width, tokens)]
            found.append(_results_table(group, f"{width}, {tokens} tokens", rows))
    if means := _means(report.results):
        found.append(Table("Geometric means over what was measured", means))
    if report.host:
        cells = [[call, f"{us:.1f}"] for call, us in report.host.items()]
        found.append(Table("The host's time per call, tiny tensors", [["call", "us"], *cells]))
    if report.first_calls:
        names = list(dict.fromkeys(name for row in report.first_calls for name in row))
        rows_ = [[_cell(row.get(name)) for name in names] for row in report.first_calls]
        found.append(Table("First calls of a process, seconds", [names, *rows_]))
    return found


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "-" if value is None else str(value)


def _results_table(group: str, place: str, rows: Sequence[Result]) -> Table:
    ways = ways_of(rows)
    baseline = rows[0].baseline
    rate = "TB/s" if group == "hosted" else "TFLOP/s"
    cells = [["work", "M x N x K" if rows[0].flops else "M x N", f"{baseline} ms", *ways, rate]]
    for row in rows:
        extents = " x ".join(str(e) for e in row.extents if e)
        reference = row.times.get(baseline)
        cells.append(
            [
                row.title,
                extents,
                f"{reference.median:.3f}" if reference else "-",
                *(_ratio(row, way) for way in ways),
                _rate(row),
            ]
        )
    return Table(f"{TITLES[group]}, {place}: {baseline}'s time over each, higher is better", cells)


def ways_of(results: Iterable[Result]) -> list[str]:
    """What was measured beside the point of reference, ours first."""
    present = {way for r in results for way in r.times if way != r.baseline}
    return [way for way in SHOWN_FIRST if way in present] + sorted(present - set(SHOWN_FIRST))


def _ratio(row: Result, way: str) -> str:
    ratio = row.ratio(way)
    if ratio is None:
        return "-"
    return f"{ratio:.3f}" + ("!" if way in row.wrong else "") + ("*" if row.notes.get(way) else "")


def _rate(row: Result) -> str:
    """What ours reaches."""
    if "codalang" not in row.times:
        return "-"
    milliseconds = row.times["codalang"].median
    return f"{row.flops / milliseconds / 1e9:.0f}" if row.flops else f"{row.bytes / milliseconds / 1e9:.2f}"


def _means(results: Sequence[Result]) -> list[list[str]]:
    """Geometric means over the workloads of each group."""
    cells = []
    for group, title in TITLES.items():
        rows = [r for r in results if r.group == group]
        ratios = [ratio for ratio in (r.ratio("codalang") for r in rows) if ratio is not None]
        if ratios:
            what = "a copy's speed" if group == "hosted" else "bare cuBLAS's speed"
            cells.append([f"{title}: of {what}", f"{geometric_mean(ratios):.3f}", str(len(ratios))])
        for way in ways_of(rows):
            both = [
                (r.times[way].median, r.times["codalang"].median) for r in rows if {way, "codalang"} <= set(r.times)
            ]
            if way != "codalang" and both:
                mean = geometric_mean(other / ours for other, ours in both)
                cells.append([f"{title}: times as fast as {way}", f"{mean:.3f}", str(len(both))])
    return [["geometric mean", "codalang", "workloads"], *cells] if cells else []


def remarks(report: Report) -> list[str]:
    """What a reader of the tables must know: notes, skipped ways, wrong results, what was not reached."""
    lines = []
    notes: dict[tuple[str, str], None] = {}
    for result in report.results:
        for way, note in result.notes.items():
            notes.setdefault((f"{way}, {result.title}", note))
    lines += [f"* {place}: {note}" for place, note in notes]
    lines += [f"! {r.name}: the results of {way} are not the reference's" for r in report.results for way in r.wrong]
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in report.results:
        for way, reason in result.skipped.items():
            reasons.setdefault((way, reason), []).append(result.name)
    lines += [f"skipped: {way} ({_count(names)}): {reason}" for (way, reason), names in reasons.items()]
    if report.unreached:
        lines.append(f"no time was left for: {', '.join(report.unreached)}")
    return lines


def _count(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} workloads"


def text(report: Report) -> str:
    """The whole report for a terminal."""
    head = ", ".join(f"{key} {value}" for key, value in report.machine.items())
    parts = [head, *(table.text() for table in tables(report)), "\n".join(remarks(report))]
    return "\n\n".join(part for part in parts if part) + f"\n\n{report.seconds:.0f} s\n"
