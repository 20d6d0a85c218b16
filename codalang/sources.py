"""Where a program's text comes from: a path, the text itself, or a name of the standard library.

| given                                          | is                                       |
|------------------------------------------------|------------------------------------------|
| a `pathlib.Path` (any `os.PathLike`)           | a file                                   |
| a str with `{` or a line break                 | source text (every definition has a `{`) |
| a str that ends in `.coda`, or has a separator | a file                                   |
| a str that is an identifier                    | a file of the standard library           |

The cases exclude each other, and none looks at the disk to decide: `"swiglu"` is the standard library's whatever
lies in the working directory, and a file of an odd name is opened by giving a `Path`.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from codalang.errors import CodaCallError, Source
from codalang.parser import read_source
from codalang.parser.library import SUFFIX, library_names, library_path

__all__ = ["SUFFIX", "library_names", "resolve"]


def resolve(program: str | os.PathLike[str] | Source) -> Source:
    """The source that `program` means, by the table above.

    Raises CodaCallError where there is no such name, CodaError where a file cannot be read or is not UTF-8 text.
    """
    if isinstance(program, Source):
        return program
    if isinstance(program, os.PathLike):
        return read_source(Path(program))
    if not isinstance(program, str):
        raise CodaCallError(
            f"a program is a path, source text, or a name of the standard library, got {type(program).__name__}",
            argument="program",
        )
    if "{" in program or "\n" in program:
        return Source("<string>", program)
    if program.endswith(SUFFIX) or "/" in program or os.sep in program:
        return read_source(Path(program))
    if program.isidentifier():
        return _from_library(program)
    raise CodaCallError(
        f"`{program}` is neither a path that ends in {SUFFIX}, nor source text, nor a name of the standard library",
        argument="program",
        hint="give a file of another name as a pathlib.Path",
    )


def _from_library(name: str) -> Source:
    path = library_path(name)
    if path is not None:
        return read_source(path)
    names = library_names()
    near = difflib.get_close_matches(name, names, n=1)
    raise CodaCallError(
        f"the standard library has no `{name}`; it has {', '.join(names) or 'nothing'}",
        argument="program",
        hint=f"did you mean `{near[0]}`?" if near else f"to open a file, write its name with {SUFFIX}",
    )
