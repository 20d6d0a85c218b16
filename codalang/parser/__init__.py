"""Text -> IR.

    source     files and bytes to text
    reader     text to syntax tree: grammar.lark, newlines (which line breaks count), complaints (errors for people)
    syntax     the syntax tree
    names      what names mean
    elaborate  syntax tree to IR: shapes, types, inlining
    format     text to canonical text, comments kept

Whatever the text is, the only exceptions are those of `codalang.errors`.
"""

from __future__ import annotations

from codalang.errors import Source
from codalang.ir.module import Module
from codalang.parser import syntax
from codalang.parser.elaborate import elaborate
from codalang.parser.format import format_source
from codalang.parser.names import check_names
from codalang.parser.reader import read
from codalang.parser.source import decode, normalize, read_source

__all__ = ["decode", "format_source", "parse", "read_source"]


def parse(source: Source | str) -> Module:
    """The epilogues of a source file, or of text, which is then named `<string>`.

    The module's source has its line ends normalized to \\n.  Raises CodaError: CodaSyntaxError, CodaNameError,
    CodaTypeError, CodaLocalityError or CodaUnsupportedError, at the first fault.
    """
    source = normalize(source)
    definitions = read(source)
    check_names(definitions, source)
    lines = source.text.split("\n")
    functions = {d.name.text: d for d in definitions if isinstance(d, syntax.Function)}
    epilogues = [elaborate(d, functions, source, lines) for d in definitions if isinstance(d, syntax.Epilogue)]
    return Module(source, {e.name: e for e in epilogues})
