"""Text -> canonical text: the author's lines, comments and names, with one spacing and indentation.

The text is formatted line by line as tokens; nothing is rewrapped.  What changes:

    spaces         one around operators and after commas and colons, none inside brackets, none in `2*N`, `N/2`, `w.T`
    indentation    four for each open bracket or brace, and four for a statement that goes on without one
    braces         `{` ends its line and `}` has its own
    blank lines    at most one, none inside the ends of a block, one around each block
    comments       two spaces before a comment that follows code

Formatting formatted text changes nothing, and no format changes what the text means.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from lark import Token

from codalang.errors import Source
from codalang.parser.newlines import NEWLINE
from codalang.parser.reader import parser, read
from codalang.parser.source import normalize

_INDENT = 4
_OPEN = frozenset({"LPAR", "LSQB"})
_CLOSE = frozenset({"RPAR", "RSQB"})
_ENDS_OPERAND = frozenset({"NAME", "NUMBER", "RPAR", "RSQB", "TRUE", "FALSE", "INF", "NAN"})
_TIGHT_BEFORE = _CLOSE | {"_COMMA", "_COLON", "DOT"}


def format_source(source: Source | str) -> str:
    """The formatted text of a .coda file.  Raises CodaSyntaxError &c. where the text does not match the grammar."""
    source = normalize(source)
    read(source)
    lines = list(_lines(source.text))
    _separate_blocks(lines)
    text = "\n".join(_render(line, previous) for previous, line in zip([None, *lines], lines, strict=False))
    return text + "\n" if text else ""


@attrs.define
class _Line:
    """One line of the result."""

    tokens: list[str]  # with the spaces that go before them
    comment: str
    indent: int
    blank_before: bool
    opens_block: bool = False  # the first line of a definition with braces
    ends_block: bool = False  # the last line of one


@attrs.define
class _State:
    """What surrounds the next token."""

    braces: int = 0
    brackets: list[str] = attrs.Factory(list)
    last: str = ""  # the type of the token before
    unary: bool = False  # that token is a sign
    fresh: bool = True  # that token ended a statement
    first: bool = False  # that token began one
    continued: bool = False  # the statement has gone on to a further line outside brackets


def _lines(text: str) -> Iterator[_Line]:
    """The lines of the result, in order."""
    tokens = list(parser().lex(text))
    blocks, ends = set(_block_starts(tokens)), set(_statement_ends(tokens))
    by_line: dict[int, list[Token]] = {}
    for token in tokens:
        if token.type != NEWLINE:
            by_line.setdefault(token.line or 1, []).append(token)
    state = _State()
    blank = False
    for number, content in enumerate(text.split("\n"), start=1):
        comment = _comment(content, by_line.get(number, []))
        if number not in by_line and not comment:
            blank = True
            continue
        for piece in _split_at_braces(by_line.get(number, [])):
            yield (line := _line(piece, state, ends))
            line.blank_before = blank
            line.opens_block = bool(piece) and _place(piece[0]) in blocks
            blank = False
        line.comment = comment


def _comment(content: str, tokens: list[Token]) -> str:
    """The comment of a line: from the first # behind its tokens, one of which may be a path with a #."""
    behind = content[(tokens[-1].end_column or 1) - 1 :] if tokens else content
    return behind[behind.index("#") :].rstrip() if "#" in behind else ""


def _place(token: Token) -> tuple[int, int]:
    return token.line or 1, token.column or 1


def _block_starts(tokens: list[Token]) -> Iterator[tuple[int, int]]:
    """Where definitions with braces begin."""
    start: Token | None = None
    for token in tokens:
        if token.type in ("FN", "EPILOGUE", "STATE", "PROGRAM"):
            start = token
        elif token.type == "LBRACE" and start is not None:
            yield _place(start)


def _statement_ends(tokens: list[Token]) -> Iterator[tuple[int, int]]:
    """The places of the tokens that a statement ends with."""
    for last, token in zip(tokens, tokens[1:], strict=False):
        if token.type == NEWLINE:
            yield _place(last)


def _split_at_braces(tokens: list[Token]) -> Iterator[list[Token]]:
    """The parts of a line that get lines of their own; one empty part for a line without tokens."""
    piece: list[Token] = []
    for token in tokens:
        if token.type == "RBRACE" and piece:
            yield piece
            piece = []
        piece.append(token)
        if token.type == "LBRACE":
            yield piece
            piece = []
    if piece or not tokens:
        yield piece


def _line(tokens: list[Token], state: _State, ends: set[tuple[int, int]]) -> _Line:
    """A line with its spacing and indentation; moves the state behind it."""
    closing = 0
    for token in tokens:
        if token.type not in _CLOSE:
            break
        closing += 1
    depth = max(0, len(state.brackets) - closing)
    if tokens and not state.fresh and not state.brackets and tokens[0].type != "LBRACE":
        state.continued = True
    braces = state.braces - (bool(tokens) and tokens[0].type == "RBRACE")
    line = _Line([], "", _INDENT * (braces + depth + state.continued), False)
    for position, token in enumerate(tokens):
        space = " " if position and _spaced(token, state) else ""
        line.tokens.append(space + str(token))
        _advance(token, state, ends)
    line.ends_block = bool(tokens) and tokens[0].type == "RBRACE" and not state.braces
    return line


def _spaced(token: Token, state: _State) -> bool:
    """Whether a space goes between the token before and this one."""
    if token.type in _TIGHT_BEFORE or state.last in _OPEN or state.last == "DOT" or state.unary:
        return False
    if token.type in _OPEN and state.last == "NAME":
        return state.first  # finalize (lse) = ...
    if token.type == "LPAR" and state.last == "RSQB":  # epilogue f[M, N](
        return False
    in_shape = "LSQB" in state.brackets
    return not (in_shape and ({token.type, state.last} & {"STAR", "SLASH"}))


def _advance(token: Token, state: _State, ends: set[tuple[int, int]]) -> None:
    if token.type in _OPEN:
        state.brackets.append(token.type)
    elif token.type in _CLOSE:
        state.brackets.pop()
    state.braces += (token.type == "LBRACE") - (token.type == "RBRACE")
    state.unary = token.type == "MINUS" and state.last not in _ENDS_OPERAND
    state.last = token.type
    state.first = state.fresh and not state.brackets
    state.fresh = token.type == "LBRACE" or _place(token) in ends
    state.continued = state.continued and not state.fresh


def _separate_blocks(lines: list[_Line]) -> None:
    """Mark the blank lines that must be, and unmark those that must not."""
    for index, line in enumerate(lines):
        if line.opens_block:
            first = index
            # A comment right above belongs to the block.
            while first > 0 and not lines[first].blank_before and not lines[first - 1].tokens:
                first -= 1
            lines[first].blank_before = True
        if line.ends_block and index + 1 < len(lines):
            lines[index + 1].blank_before = True
        if line.tokens and line.tokens[0] == "}":
            line.blank_before = False
    for previous, line in zip(lines, lines[1:], strict=False):
        if previous.tokens and previous.tokens[-1].strip() == "{":
            line.blank_before = False
    if lines:
        lines[0].blank_before = False


def _render(line: _Line, previous: _Line | None) -> str:
    code = "".join(line.tokens)
    comment = f"{'  ' if code else ''}{line.comment}" if line.comment else ""
    blank = "\n" if line.blank_before and previous is not None else ""
    return blank + " " * line.indent + code + comment
