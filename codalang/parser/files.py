"""Files and their imports: which definitions a file sees.

    import "other.coda"    a file, relative to the folder of the importing file
    import swiglu          a file of the standard library

A file sees its own definitions, those of the files that it imports, but not what these import, and the built-in
states.  Its own win over imported ones, those over built-in ones, so neither a library nor the language breaks a file
by growing.  A name that two imported files define is ambiguous where it is used.

Every file is read once however often it is imported.  Imports that lead back to their file are an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import NamedTuple

import attrs

from codalang.errors import CodaError, CodaNameError, CodaSyntaxError, Loc, Source
from codalang.parser import syntax
from codalang.parser.complaints import shorten, suggestion
from codalang.parser.library import SUFFIX, library_names, library_path
from codalang.parser.reader import read
from codalang.parser.source import normalize, read_source
from codalang.parser.syntax import Span, Word


class Found(NamedTuple):
    """A definition and the file that it stands in."""

    file: File
    definition: syntax.Definition


@attrs.define(eq=False)
class File:
    """A file with its definitions, and the files that it imports."""

    source: Source
    imports: list[tuple[syntax.Import, File]] = attrs.Factory(list)
    definitions: tuple[syntax.Definition, ...] = ()
    lines: list[str] = attrs.field(init=False)
    visible: dict[str, list[Found]] = attrs.Factory(dict)

    def __attrs_post_init__(self) -> None:
        self.lines = self.source.text.split("\n")

    def locate(self, span: Span) -> Loc:
        """The location of a span; of several lines, the part on the first."""
        same_line = span.end_line == span.line
        end = span.end_column if same_line else len(self.lines[span.line - 1]) + 1
        return Loc(self.source, span.line, span.column, end)

    def find(self, name: Word, kind: type[syntax.Definition] | UnionType) -> Found | None:
        """The definition of that kind, or of one of those kinds, that a name means here, or None.

        Raises CodaNameError where it is ambiguous.
        """
        found = [f for f in self.visible.get(name.text, ()) if isinstance(f.definition, kind)]
        if len(found) < 2:
            return found[0] if found else None
        raise CodaNameError(
            f"`{shorten(name.text)}` is ambiguous: two imported files define it",
            self.locate(name.span),
            notes=tuple((f.file.locate(f.definition.name.span), "defined here") for f in found[:4]),
            hint="import one of them, or define the name in this file, which then wins",
        )

    def names(self, kind: type[syntax.Definition]) -> list[str]:
        """The names of the visible definitions of a kind."""
        return [n for n, found in self.visible.items() if any(isinstance(f.definition, kind) for f in found)]

    def resolve(self) -> None:
        """Fill `visible` when the definitions and imports are known."""
        own = {d.name.text for d in self.definitions}
        for _, file in self.imports:
            for definition in file.definitions:
                name = definition.name.text
                others = self.visible.setdefault(name, []) if name not in own else None
                if others is not None and all(f.definition is not definition for f in others):
                    others.append(Found(file, definition))
        for definition in self.definitions:
            self.visible.setdefault(definition.name.text, []).append(Found(self, definition))


def load(source: Source) -> list[File]:
    """The files that a source is made of: imported ones before those that import them, the source's own last.

    `source` must be normalized.  Raises CodaSyntaxError for what does not match the grammar, CodaNameError for an
    import of what there is not, or that leads back.  Iterative: chains of imports may be long.
    """
    done: dict[str, File] = {}
    path: dict[str, syntax.Import | None] = {}
    stack: list[tuple[str, File, Iterator[syntax.Import]]] = []

    def enter(key: str, source: Source, by: syntax.Import | None) -> None:
        items = read(source)
        file = File(source, definitions=tuple(i for i in items if not isinstance(i, syntax.Import)))
        path[key] = by
        stack.append((key, file, iter([i for i in items if isinstance(i, syntax.Import)])))

    enter(os.path.realpath(source.name), source, None)
    while stack:
        key, file, imports = stack[-1]
        item = next(imports, None)
        if item is None:
            file.resolve()
            done[key] = file
            stack.pop()
            if stack:
                by = path[key]
                assert by is not None
                stack[-1][1].imports.append((by, file))
            del path[key]
            continue
        target = _target(file, item)
        imported = os.path.realpath(target)
        if imported in path:
            raise _cycle(file, item, [f for k, f, _ in stack][list(path).index(imported) :], path)
        if imported in done:
            _no_second(file, item, done[imported])
            file.imports.append((item, done[imported]))
        else:
            enter(imported, _open(file, item, target), item)
    return list(done.values())


def _target(file: File, item: syntax.Import) -> str:
    """The path that an import means."""
    text = item.target.text
    if not item.quoted:
        path = library_path(text)
        if path is not None:
            return str(path)
        raise CodaNameError(
            f"the standard library has no `{shorten(text)}`",
            file.locate(item.target.span),
            hint=suggestion(text, library_names())
            or f'a file is imported by its path: `import "{shorten(text)}.coda"`',
        )
    if text.endswith(SUFFIX) and text.isprintable():
        return os.path.join(os.path.dirname(file.source.name), text)
    hint = f"`import {text}` imports it from the standard library" if text in library_names() else None
    raise CodaNameError(
        f"an import names a file that ends in {SUFFIX}",
        file.locate(item.target.span),
        hint=hint or 'write `import "other.coda"`, relative to this file',
    )


def _open(file: File, item: syntax.Import, target: str) -> Source:
    try:
        return normalize(read_source(Path(target)))
    except CodaSyntaxError:
        raise
    except CodaError as error:
        raise CodaNameError(error.message, file.locate(item.target.span)) from None


def _no_second(file: File, item: syntax.Import, imported: File) -> None:
    for other, known in file.imports:
        if known is imported:
            raise CodaNameError(
                f"`{shorten(item.target.text)}` is imported twice",
                file.locate(item.span),
                notes=((file.locate(other.span), "first imported here"),),
            )


def _cycle(
    file: File, item: syntax.Import, through: list[File], path: dict[str, syntax.Import | None]
) -> CodaNameError:
    imports = list(path.values())[len(path) - len(through) + 1 :]
    notes = [
        (f.locate(by.span), f"which is imported by {shorten(os.path.basename(f.source.name))}")
        for f, by in zip(through, imports, strict=False)
        if by is not None
    ]
    return CodaNameError(
        f"{shorten(os.path.basename(through[0].source.name))} imports itself"
        + (" through other files" if notes else ""),
        file.locate(item.span),
        notes=tuple(reversed(notes))[:4],
        hint="move what both need into a third file",
    )
