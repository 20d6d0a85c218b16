"""Where the user's Python stands: the line and column of what is running, and the name it gives to a result.

CPython knows the columns of every instruction (`co_positions`); the syntax tree of the file says what stands there.
Frames of codalang itself are passed over, so that an error shows the user's line.  Where there is no source (a program
made by `exec`), places have a line and nothing to show.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import attrs

from codalang.errors import Loc, Source

# Line, end line, column, end column: columns count bytes of UTF-8 from 0, as Python's own positions do.
Span = tuple[int, int, int, int]

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# Deeper helpers than this are not told of in an error.
_NOTES = 4


@attrs.frozen
class Test:
    """Something that asks whether a value is true: where it is written, and what it is called."""

    span: Span
    shown: Span
    what: str


@attrs.frozen(eq=False)
class File:
    """What a Python file says, by the places of its expressions.

    Attributes:
        names: of an assigned expression, the names that it is given.
        returned: the expressions that a function returns.
        tests: what needs a truth value.
        functions: the definitions, by name and first line.
    """

    source: Source
    lines: list[str]
    names: dict[Span, tuple[str | None, ...]]
    returned: frozenset[Span]
    tests: tuple[Test, ...]
    functions: dict[tuple[str, int], ast.FunctionDef]

    def line(self, number: int) -> str:
        """The text of a line, counted from 1, or ''."""
        return self.lines[number - 1] if number <= len(self.lines) else ""

    def loc(self, span: Span) -> Loc:
        """The place of a span; of several lines, the part on the first."""
        line, end_line, column, end_column = span
        text = self.line(line)
        data = text.encode("utf-8", "surrogatepass")

        def characters(count: int) -> int:
            return len(data[:count].decode("utf-8", "replace"))

        start = characters(column) + 1
        end = characters(end_column) + 1 if end_line == line else len(text.rstrip()) + 1
        return Loc(self.source, line, start, max(end, start + 1))

    def whole_line(self, line: int) -> Loc:
        """The place of a line."""
        text = self.line(line)
        start = len(text) - len(text.lstrip()) + 1
        return Loc(self.source, line, start, max(len(text.rstrip()), start) + 1)

    def test(self, span: Span) -> Test | None:
        """The innermost thing around a span that needs a truth value."""
        around = [t for t in self.tests if _starts(t.span) <= _starts(span) and _ends(span) <= _ends(t.span)]
        # Of equal spans the last, which the syntax tree has further down.
        return max(reversed(around), key=lambda t: (_starts(t.span), tuple(-x for x in _ends(t.span))), default=None)


def _starts(span: Span) -> tuple[int, int]:
    return span[0], span[2]


def _ends(span: Span) -> tuple[int, int]:
    return span[1], span[3]


@attrs.frozen(eq=False)
class Here:
    """A frame of the user's, and the span of what it is at (None where Python does not know)."""

    frame: FrameType
    span: Span | None

    @property
    def file(self) -> File:
        """The file of its code."""
        return file_of(self.frame)

    @property
    def loc(self) -> Loc:
        """Its place."""
        return self.file.loc(self.span) if self.span else self.file.whole_line(self.frame.f_lineno)


def here() -> Loc:
    """The place in the innermost frame of the user's, for an error."""
    forget()
    return next(frames()).loc


def frames() -> Iterator[Here]:
    """The frames of the user's, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_own(frame.f_code):
            yield Here(frame, _span(frame.f_code, frame.f_lasti))
        frame = frame.f_back


def name_of(chain: list[Here], index: int) -> str | None:
    """The name that the innermost expression's result is given, by its frame or by that to which it is returned.

    `index` says which of several names it is, in `a, b = ...`.
    """
    for place in chain:
        if place.span is None:
            return None
        file = place.file
        if place.span in file.names:
            names = file.names[place.span]
            return names[index] if index < len(names) else None
        if place.span not in file.returned:
            return None
    return None


def notes(chain: list[Here]) -> tuple[tuple[Loc, str], ...]:
    """The way from the epilogue to the innermost of these frames, as an error's notes."""
    return tuple((place.loc, "called here") for place in chain[1 : 1 + _NOTES])


def is_own(code: CodeType) -> bool:
    """Is this codalang's own code, and not the user's?"""
    return code.co_filename.startswith(_PACKAGE)


def at(frame: FrameType, instruction: int, line: int) -> Loc:
    """The place of an instruction of a frame that has been left."""
    span = _span(frame.f_code, instruction)
    return file_of(frame).loc(span) if span else file_of(frame).whole_line(line)


def _span(code: CodeType, instruction: int) -> Span | None:
    line, end_line, column, end_column = _positions(code)[instruction // 2]
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return line, end_line, column, end_column


_Positions = list[tuple[int | None, int | None, int | None, int | None]]
# By identity, because equal code may stand at two places.  The code is kept, so that its identity is not reused.
_known_positions: dict[int, tuple[CodeType, _Positions]] = {}
_known_files: dict[str, File] = {}


def forget() -> None:
    """Look at the files again: they may have changed since the last recording."""
    for name in list(_known_files):  # other threads record, too
        linecache.checkcache(name)
    _known_files.clear()
    _known_positions.clear()


def _positions(code: CodeType) -> _Positions:
    known = _known_positions.get(id(code))
    if known is None:
        known = _known_positions[id(code)] = (code, list(code.co_positions()))
    return known[1]


def file_of(frame: FrameType) -> File:
    """The file of a frame's code."""
    return read(frame.f_code.co_filename, frame.f_globals)


def read(name: str, scope: dict[str, object]) -> File:
    """The file of that name.  `scope` are its globals, whose loader may know the text."""
    if name not in _known_files:
        _known_files[name] = _parse(name, "".join(linecache.getlines(name, scope)))
    return _known_files[name]


@functools.lru_cache(maxsize=64)
def _parse(name: str, text: str) -> File:
    names: dict[Span, tuple[str | None, ...]] = {}
    returned: set[Span] = set()
    tests: list[Test] = []
    functions: dict[tuple[str, int], ast.FunctionDef] = {}
    try:
        tree: ast.AST = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not what is running
        tree = ast.Module([], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            names[span_of(node.value)] = _targets(node.targets[0])
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            names[span_of(node.value)] = _targets(node.target)
        elif isinstance(node, ast.AugAssign):
            names[span_of(node)] = _targets(node.target)
        elif isinstance(node, ast.Return) and node.value is not None:
            returned |= {span_of(node.value), span_of(node)}
        elif isinstance(node, ast.Lambda):
            returned.add(span_of(node.body))
        elif isinstance(node, ast.FunctionDef):
            functions[node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)])] = node
        tests += _tests(node)
    return File(Source(name, text), text.split("\n"), names, frozenset(returned), tuple(tests), functions)


def _targets(target: ast.expr) -> tuple[str | None, ...]:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return tuple(part.id if isinstance(part, ast.Name) else None for part in parts)


def _tests(node: ast.AST) -> list[Test]:
    """What of a node needs a truth value, under the name that users know it by."""
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        what = {ast.While: "while", ast.Assert: "assert"}.get(type(node), "if")
        own = [node.test] if isinstance(node, ast.IfExp) else [node.test, node]
        return [Test(span_of(part), span_of(node.test), what) for part in own]
    if isinstance(node, ast.comprehension):
        return [Test(span_of(test), span_of(test), "if") for test in node.ifs]
    if isinstance(node, ast.BoolOp):
        return [Test(span_of(node), span_of(node), "and" if isinstance(node.op, ast.And) else "or")]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [Test(span_of(node), span_of(node), "not")]
    if isinstance(node, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
        return [Test(span_of(node), span_of(node), "in")]
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        return [Test(span_of(node), span_of(node), "chain")]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min", "sum"):
        return [Test(span_of(node), span_of(node), node.func.id)]
    return []


def span_of(node: ast.expr | ast.stmt | ast.arg) -> Span:
    """The span of a node of the syntax tree."""
    end_line, end_column = node.end_lineno, node.end_col_offset
    assert end_line is not None and end_column is not None
    return node.lineno, end_line, node.col_offset, end_column
