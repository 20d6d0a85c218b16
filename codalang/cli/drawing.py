"""A program as a picture: statements as boxes, the values between them as chips with their bytes.

| shape                     | is                                                                     |
|---------------------------|------------------------------------------------------------------------|
| box of two parts          | a matmul, and below the line the epilogue on it                        |
| box of one part           | an epilogue on plain tensors, or a matmul alone                        |
| rounded box               | a vector step                                                          |
| chip                      | a value: its name and bytes; its shape and dtype where the mouse rests |
| chip with a thick border  | a result                                                               |
| chip in orange            | a value that the forward keeps for the backward                        |

Scalars that have a default are in the texts of the steps that read them.

The SVG needs no other file, and no script.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

import attrs

from codalang.cli.layout import Layout, Point, arrange
from codalang.cli.traffic import Stored, Work, show_bytes, show_extents, show_operations
from codalang.ir.epilogue import Store
from codalang.ir.printer import print_epilogue
from codalang.ir.program import Apply, Program, Statement
from codalang.ir.types import Kind

_LETTER, _LINE, _PAD, _MARGIN = 7.25, 17.0, 9.0, 28.0  # of the 12 px monospaced font
_RULE = 5.0  # more room where a rule is drawn
_HEAD, _FOOT = 62.0, 40.0

_STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1c2733 }
.title { font-size: 17px; font-weight: 600 } .strong { font-weight: 600 } .quiet { fill: #5b6875 }
.matmul { fill: #dbe8fb; stroke: #3b6fb5 } .epilogue { fill: #eef4fd } .hosted { fill: #e4f3e8; stroke: #3d8b57 }
.vector { fill: #f3eefa; stroke: #8766ad } .chip { fill: #ffffff; stroke: #93a1b0 } .weight { fill: #f1f3f5 }
.kept { fill: #ffe3bf; stroke: #d07a12 } .result { stroke-width: 2.5 } .rule { stroke: #3b6fb5 }
.edge { fill: none; stroke: #93a1b0; stroke-width: 1.2 } .large { stroke: #4d5b69; stroke-width: 2 }
""".strip()

_LEGEND = (
    ("matmul", "matmul and its epilogue"),
    ("hosted", "epilogue on plain tensors"),
    ("vector", "vector step"),
    ("chip weight", "parameter"),
    ("chip", "value"),
    ("chip kept", "kept for the backward"),
    ("chip result", "result"),
)


@attrs.frozen
class Panel:
    """A program to draw.

    Attributes:
        title, summary: what stands above it.
        results: values that are drawn as results.
        values, works: of `traffic`.
        kept: values that the backward reads, in the forward and in the backward by its own names.
        sizes: numbers of dimension names, as far as they are known.
    """

    title: str
    summary: str
    program: Program
    results: Collection[str]
    values: Mapping[str, Stored]
    works: Sequence[Work]
    steps: Sequence[str]
    kept: Collection[str]
    sizes: Mapping[str, int]


class _Text(NamedTuple):
    words: str
    style: str = ""


class _Box(NamedTuple):
    """Lines of text in a rectangle; a rule is drawn before line `rule`."""

    style: str
    lines: tuple[_Text, ...]
    hover: str
    rule: int | None = None
    radius: float = 3

    @property
    def size(self) -> tuple[float, float]:
        letters = max(len(line.words) for line in self.lines)
        rule = _RULE if self.rule is not None else 0
        return letters * _LETTER + 2 * _PAD, len(self.lines) * _LINE + rule + 2 * _PAD - 5


def draw(panels: Sequence[Panel]) -> str:
    """The SVG of programs, one below the other."""
    parts, y, width = [], _MARGIN, 0.0
    for panel in panels:
        boxes, edges = _boxes(panel), _edges(panel)
        layout = arrange({name: box.size for name, box in boxes.items()}, edges)
        body = "\n".join(_picture(panel, boxes, layout))
        parts.append(
            f'<g transform="translate({_MARGIN:g} {y:g})">\n'
            f'<text class="title" y="14">{escape(panel.title)}</text>\n'
            f'<text class="quiet" y="34">{escape(panel.summary)}</text>\n'
            f'<g transform="translate(0 {_HEAD:g})">\n{body}\n</g>\n</g>'
        )
        width = max(width, layout.width, len(panel.summary) * _LETTER)
        y += _HEAD + layout.height + _MARGIN * 1.5
    legend, legend_width = _legend(y)
    width = max(width, legend_width) + 2 * _MARGIN
    height = y + _FOOT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">\n<style>\n{_STYLE}\n</style>\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + f"\n{legend}\n</svg>\n"
    )


# ---- what there is to draw -------------------------------------------------------------------------------------------


def _boxes(panel: Panel) -> dict[str, _Box]:
    """Values are named as they are, statements by their number; every box stands after what leads to it."""
    program = panel.program
    read = {name for work in panel.works for name in work.operands + work.loads} | set(program.results)
    params = [p.name for p in program.params if p.name in read and not _is_left_out(panel, p.name)]
    boxes = {name: _chip(panel, name, "chip weight") for name in params}
    for number, (statement, work) in enumerate(zip(program.statements, panel.works, strict=True)):
        boxes[f"#{number}"] = _statement(panel, statement, work, panel.steps[number])
        boxes |= {name: _chip(panel, name, "chip") for name in work.stores}
    return boxes


def _edges(panel: Panel) -> list[tuple[str, str]]:
    edges = []
    for number, work in enumerate(panel.works):
        read = [name for name in work.operands + work.loads if not _is_left_out(panel, name)]
        edges += [(name, f"#{number}") for name in dict.fromkeys(read)]
        edges += [(f"#{number}", name) for name in work.stores]
    return edges


def _is_left_out(panel: Panel, name: str) -> bool:
    """A scalar with a default, such as `eps`, is read in many places, and the steps' texts name it."""
    return any(p.name == name and p.default is not None for p in panel.program.params)


def _chip(panel: Panel, name: str, style: str) -> _Box:
    stored = panel.values[name]
    if name in panel.kept:
        style = "chip kept"
    if name in panel.results:
        style += " result"
    size = show_bytes(stored.bytes, panel.sizes)
    hover = f"{name}: {stored.type} {stored.dtype}, {size}"
    return _Box(style, (_Text(f"{name}  {size}"),), hover, radius=11)


def _statement(panel: Panel, statement: Statement, work: Work, step: str) -> _Box:
    extents = show_extents(work.extents, panel.sizes)
    if work.kind == "vector":
        return _Box("vector", (_Text(step),), f"{step}\n{extents} elements", radius=9)
    lines = []
    if work.kind == "matmul":
        lines.append(_Text(work.host or "", "strong"))
        lines.append(_Text(f"{extents}  {show_operations(work.operations, panel.sizes)}", "quiet"))
    if not isinstance(statement, Apply):
        return _Box("matmul", tuple(lines), step)
    rule = len(lines) if lines else None
    lines.append(_Text(statement.epilogue.name, "strong"))
    if work.kind == "hosted":
        lines.append(_Text(f"on {work.host}, {extents}" if work.host else f"on vectors, {extents}", "quiet"))
    lines += [_Text(line) for line in _epilogue_lines(statement)]
    return _Box(work.kind, tuple(lines), f"{step}\n\n{print_epilogue(statement.epilogue)}", rule)


def _epilogue_lines(statement: Apply) -> list[str]:
    """What an epilogue loads besides its host, and what becomes of its outputs."""
    kinds = {p.name: p.type.kind for p in statement.epilogue.params}
    loads = [(kinds[name] is not Kind.TILE, str(value)) for name, value in statement.inputs]
    outputs = [(o, r) for o, r in zip(statement.epilogue.outputs, statement.results, strict=True) if r is not None]
    groups = {
        "loads tiles": [name for small, name in loads if not small],
        "loads": [name for small, name in loads if small],
        "stores": [name for output, name in outputs if isinstance(output, Store)],
        "reduces": [name for output, name in outputs if not isinstance(output, Store)],
    }
    return [f"{verb:<12} {', '.join(dict.fromkeys(names))}" for verb, names in groups.items() if names]


# ---- SVG -------------------------------------------------------------------------------------------------------------


def _picture(panel: Panel, boxes: Mapping[str, _Box], layout: Layout) -> Iterable[str]:
    """Edges first: boxes lie on them."""
    for (tail, head), route in layout.routes.items():
        value = panel.values.get(tail) or panel.values[head]
        large = " large" if value.is_large else ""
        yield f'<path class="edge{large}" d="{_curve(route)}"/>'
    for name, box in boxes.items():
        yield from _rectangle(box, layout.centres[name])


def _curve(route: Sequence[Point]) -> str:
    """Through the points, each bend vertical at both ends."""
    path = f"M{route[0].x:.1f} {route[0].y:.1f}"
    for here, there in zip(route, route[1:], strict=False):
        middle = (here.y + there.y) / 2
        straight = abs(here.x - there.x) < 0.5
        bend = "" if straight else f"C{here.x:.1f} {middle:.1f} {there.x:.1f} {middle:.1f} "
        path += f"{bend or 'L'}{there.x:.1f} {there.y:.1f}"
    return path


def _rectangle(box: _Box, centre: Point) -> Iterable[str]:
    width, height = box.size
    x, y = centre.x - width / 2, centre.y - height / 2
    style = f'class="{box.style}" rx="{box.radius:g}"'
    yield f"<g><title>{escape(box.hover)}</title>"
    yield f'<rect {style} x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
    if box.rule is not None:
        line = y + _PAD + box.rule * _LINE
        yield f'<path class="rule" d="M{x:.1f} {line:.1f}h{width:.1f}"/>'
    for i, text in enumerate(box.lines):
        style = f' class="{text.style}"' if text.style else ""
        below = _RULE if box.rule is not None and i >= box.rule else 0
        top = y + _PAD + i * _LINE + below + 10
        yield f'<text{style} xml:space="preserve" x="{x + _PAD:.1f}" y="{top:.1f}">{escape(text.words)}</text>'
    yield "</g>"


def _legend(y: float) -> tuple[str, float]:
    parts, x = [], _MARGIN
    for style, words in _LEGEND:
        parts.append(f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="18" height="13" rx="3"/>')
        parts.append(f'<text class="quiet" x="{x + 25:.1f}" y="{y + 10.5:.1f}">{words}</text>')
        x += 25 + (len(words) + 3) * _LETTER
    return "\n".join(parts), x
