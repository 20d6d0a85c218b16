"""Files and bytes -> `Source`, with every failure a `CodaError`."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from codalang.errors import CodaError, CodaSyntaxError, Loc, Source


def read_source(path: str | os.PathLike[str]) -> Source:
    """The text of a .coda file.  Raises CodaError where it cannot be read, CodaSyntaxError where it is not UTF-8."""
    name = os.fspath(path)
    try:
        data = Path(name).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CodaError(f"cannot read {name!r}: {reason}") from None
    return decode(data, name)


def decode(data: bytes, name: str = "<bytes>") -> Source:
    """The source that some bytes hold.  Raises CodaSyntaxError, at the line and column, where they are not UTF-8."""
    try:
        return Source(name, data.decode("utf-8"))
    except UnicodeDecodeError as error:
        before = normalize_text(data[: error.start].decode("utf-8"))
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        shown = Source(name, normalize_text(data.decode("utf-8", errors="replace")))
        raise CodaSyntaxError(
            f"byte 0x{data[error.start]:02x} is not UTF-8",
            Loc(shown, line, column, column + 1),
            hint="save the file as UTF-8",
        ) from None


def normalize(source: Source | str) -> Source:
    """The source without a byte order mark and with its lines ended by \\n, whatever they were ended by."""
    if isinstance(source, str):
        source = Source("<string>", source)
    text = normalize_text(source.text)
    return source if text == source.text else attrs.evolve(source, text=text)


def normalize_text(text: str) -> str:
    """See `normalize`."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
