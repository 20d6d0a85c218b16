"""Every error a user can cause, with the place it happened.

A `CodaError` knows a message, optionally the source location (which carries the file's text, so that the line
can be shown with a caret), notes that point at other places, and a hint that says what to do.  Nothing else is
raised to users on purpose; a traceback from inside a library is a bug.

| class                 | raised when                                                                     |
|-----------------------|---------------------------------------------------------------------------------|
| CodaSyntaxError       | the text does not match the grammar                                             |
| CodaNameError         | a name is unknown, or defined twice                                             |
| CodaTypeError         | a kind, width, dimension or dtype does not fit                                  |
| CodaLocalityError     | a reduction is read by the epilogue that makes it                               |
| CodaCallError         | a call's arguments do not fit the definition (names the argument)               |
| CodaUnsupportedError  | a legal program that this backend or rule does not cover                        |
| CodaCompileError      | the device compiler failed, or its report shows a kernel that must not ship     |
"""

from __future__ import annotations

import unicodedata

import attrs


@attrs.frozen
class Source:
    """A named piece of source text.  `name` is a path, or `<string>` for text that came from no file."""

    name: str
    text: str = attrs.field(repr=False)

    def line(self, number: int) -> str:
        """The text of a 1-based line, or '' where there is none."""
        lines = self.text.split("\n")  # not splitlines, which also breaks at form feeds and the like
        return lines[number - 1].rstrip("\r") if 0 < number <= len(lines) else ""


@attrs.frozen
class Loc:
    """A stretch of one source line: 1-based line and columns, `end_column` exclusive."""

    source: Source = attrs.field(eq=False, repr=False)
    line: int
    column: int
    end_column: int

    def __str__(self) -> str:
        return f"{self.source.name}:{self.line}:{self.column}"


# An excerpt shows at most this much of a line, and this much of it before the fault.
_EXCERPT_WIDTH = 160
_EXCERPT_LEAD = 60


def _excerpt(loc: Loc) -> list[str]:
    """The source line, or the part around the location of a long one, and carets under the stretch that is meant.

    Nothing of a source whose text is not known (Python that came from no file).
    """
    if not loc.source.text:
        return []
    text = loc.source.line(loc.line)
    start = max(0, loc.column - 1 - _EXCERPT_LEAD) if len(text) > _EXCERPT_WIDTH else 0
    before, after = "..." * (start > 0), "..." * (len(text) > start + _EXCERPT_WIDTH)
    shown = text[start : start + _EXCERPT_WIDTH]
    gutter = f"{loc.line:>5} | "
    pad = "".join(_blank(c) for c in before + shown[: loc.column - 1 - start])
    meant = shown[loc.column - 1 - start : loc.end_column - 1 - start]
    carets = "^" * max(1, sum(len(_blank(c)) for c in meant))
    line = before + "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in shown) + after
    return [gutter + line, " " * (len(gutter) - 2) + "| " + pad + carets]


def _blank(character: str) -> str:
    """White space as wide as a character.  A tab stays a tab, so that the caret stands under what it means."""
    if character == "\t":
        return "\t"
    return " " * (0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "WF"))


class CodaError(Exception):
    """Base of all codalang errors.

    Attributes:
        message: what is wrong, with what was expected and what came.
        loc: where, or None for an error in a call.
        notes: further places, each `(Loc, text)`.
        hint: what to do about it, or None.
        argument: the name of the offending argument, for errors in a call.
    """

    def __init__(
        self,
        message: str,
        loc: Loc | None = None,
        *,
        notes: tuple[tuple[Loc, str], ...] = (),
        hint: str | None = None,
        argument: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.loc = loc
        self.notes = notes
        self.hint = hint
        self.argument = argument

    def __str__(self) -> str:
        where = f"{self.loc}: " if self.loc else ""
        lines = [f"{where}{self.message}"]
        if self.loc:
            lines += _excerpt(self.loc)
        for loc, text in self.notes:
            lines += [f"{loc}: note: {text}", *_excerpt(loc)]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class CodaSyntaxError(CodaError):
    """The text does not match the grammar."""


class CodaNameError(CodaError):
    """A name is unknown, reserved, or defined twice."""


class CodaTypeError(CodaError):
    """A kind, width, dimension or dtype does not fit."""


class CodaLocalityError(CodaTypeError):
    """A reduction's result is read by the epilogue that produces it."""


class CodaCallError(CodaError, TypeError):
    """A call's arguments do not fit the definition."""


class CodaUnsupportedError(CodaError):
    """A legal program that a backend or a rule does not cover."""


class CodaCompileError(CodaError):
    """The device compiler failed or its report is unacceptable."""
