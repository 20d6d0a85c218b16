"""A report as SVG, written as text: bars of time over the bare GEMM's, and a roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from codalang.bench.report import Report, Result, ways_of

COLOURS = {
    "codalang": "#1b6ac9",
    "eager": "#9aa3ad",
    "compile": "#e08a1e",
    "max-autotune": "#b5540f",
    "liger": "#3a9d5d",
    "quack": "#8c5bc0",
    "coda": "#c23b57",
}
INK, FAINT = "#2b2f36", "#d5d9de"
FONT = 'font-family="system-ui, sans-serif"'

BAR, GAP, LABEL, PLOT = 12, 14, 500, 520
LONGEST = 2.5  # times the point of reference; longer bars are cut, and say their length


def bars(report: Report) -> str:
    """Per workload on a GEMM, a bar for each way: its time over the bare GEMM's.  Shorter is better."""
    results = [r for r in report.results if r.group != "hosted" and r.baseline in r.times]
    ways = ways_of(results)
    shapes: list[str] = [_legend(ways, LABEL, 20)]
    top = y = 44
    scale = PLOT / LONGEST
    for result in results:
        present = [way for way in ways if way in result.times]
        height = BAR * len(present)
        name = f"{result.title}, {result.width}, {result.tokens}"
        shapes.append(_text(LABEL - 8, y + height / 2 + 4, name, anchor="end"))
        for way in present:
            ratio = result.times[way].median / result.times[result.baseline].median
            length = min(ratio, LONGEST) * scale
            shapes.append(_rectangle(LABEL, y, length, BAR - 2, _colour(way), f"{name}: {way} {ratio:.3f}"))
            shapes.append(_text(LABEL + length + 4, y + BAR - 3, f"{ratio:.3f}", size=9))
            y += BAR
        y += GAP
    for mark in (0.5, 1.0, 1.5, 2.0):
        x = LABEL + mark * scale
        shapes.insert(0, _line(x, top - 6, x, y - GAP, INK if mark == 1 else FAINT))
        shapes.append(_text(x, y + 4, f"{mark:g}", anchor="middle", size=10))
    shapes.append(_text(LABEL, y + 20, "time over that of the bare cuBLAS GEMM; shorter is better", size=11))
    return _document(LABEL + PLOT + 60, y + 32, shapes)


WIDE, HIGH, MARGIN = 760, 460, 64


def roofline(report: Report) -> str:
    """What each workload reaches, against operations per byte that it must move at least.

    The roofs are measured in the same run: the fastest cuBLAS GEMM, and the fastest copy.
    """
    gemms = [r for r in report.results if r.flops and "codalang" in r.times]
    peak = max((r.flops / r.times[r.baseline].median / 1e9 for r in gemms if r.baseline in r.times), default=None)
    copies = [r for r in report.results if not r.flops and r.baseline in r.times]
    bandwidth = max((r.bytes / r.times[r.baseline].median / 1e9 for r in copies), default=None)
    points = [(r.flops / r.bytes, r.flops / r.times["codalang"].median / 1e9, r) for r in gemms]
    if not points or peak is None:
        return _document(WIDE, 60, [_text(20, 34, "no GEMM was measured")])
    ridge = peak / bandwidth if bandwidth else None
    xs = [x for x, _, _ in points] + ([ridge] if ridge else [])
    low_x, high_x = min(xs) / 2, max(xs) * 2
    low_y, high_y = min(y for _, y, _ in points) / 2, peak * 1.5

    def at(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / low_x) / math.log(high_x / low_x)
        up = math.log(y / low_y) / math.log(high_y / low_y)
        return MARGIN + across * (WIDE - 2 * MARGIN), HIGH - MARGIN - up * (HIGH - 2 * MARGIN)

    shapes = [_line(*at(low_x, low_y), *at(high_x, low_y), INK), _line(*at(low_x, low_y), *at(low_x, high_y), INK)]
    start = max(ridge, low_x) if ridge else low_x
    left, top = at(start, peak)
    shapes.append(_line(left, top, at(high_x, peak)[0], top, INK))
    shapes.append(_text(left + 6, top - 8, f"{peak:.0f} TFLOP/s, cuBLAS"))
    if bandwidth and ridge and ridge > low_x:
        from_x = max(low_x, low_y / bandwidth)
        shapes.append(_line(*at(from_x, from_x * bandwidth), left, top, INK))
        shapes.append(_text(left + 6, top + 30, f"{bandwidth:.2f} TB/s, a copy"))
    for x, y, result in points:
        title = f"{result.title}, {result.width}, {result.tokens}: {y:.0f}"
        shapes.append(_dot(*at(x, y), _group_colour(result), title))
    for mark in _decades(low_x, high_x):
        shapes.append(_text(at(mark, low_y)[0], HIGH - MARGIN + 16, f"{mark:g}", anchor="middle", size=10))
    for mark in _decades(low_y, high_y):
        shapes.append(_text(MARGIN - 6, at(low_x, mark)[1] + 4, f"{mark:g}", anchor="end", size=10))
    shapes.append(_text(WIDE / 2, HIGH - 20, "operations per byte that must move at least", anchor="middle"))
    shapes.append(_text(MARGIN, MARGIN - 26, "TFLOP/s of codalang: GEMM + epilogue blue, plain GEMM grey"))
    return _document(WIDE, HIGH, shapes)


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between the two."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    marks = [step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)]
    return [mark for mark in marks if low <= mark <= high]


def _group_colour(result: Result) -> str:
    return COLOURS["codalang"] if result.group == "epilogue" else COLOURS["eager"]


def _colour(way: str) -> str:
    return COLOURS.get(way, INK)


def _legend(ways: Sequence[str], x: float, y: float) -> str:
    parts = []
    for way in ways:
        parts += [_rectangle(x, y - 9, 10, 10, _colour(way), way), _text(x + 14, y, way, size=11)]
        x += 30 + 7 * len(way)
    return "\n".join(parts)


def _document(width: float, height: float, shapes: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    background = f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT}>', background, *shapes, "</svg>", ""])


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{INK}"'
    return f"<text {place}>{escape(text)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _rectangle(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{colour}"><title>{escape(title)}</title></rect>'


def _dot(x: float, y: float, colour: str, title: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(title)}</title></circle>'
