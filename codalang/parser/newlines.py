"""Which line breaks end a statement.

The grammar sees a `_NEWLINE` only where something ends.  A line break is dropped

    inside ( ) and [ ]
    after an operator, `=`, a comma, a colon or an opening bracket, where more must come
    before an operator, `=`, a comma, a colon, an opening brace or a closing bracket, which nothing begins with
    after another line break

and one is added where a line may omit it: before the `}` of a block and at the end of the file.
"""

from __future__ import annotations

from collections.abc import Iterator

from lark import Token

NEWLINE = "_NEWLINE"
OPERATORS = frozenset("OR AND COMPARISON PLUS MINUS STAR SLASH AT".split())
_GLUE = OPERATORS | {"EQUAL", "_COMMA", "_COLON", "DOT"}
_KEYWORDS = frozenset("FN EPILOGUE PROGRAM IMPORT STATE LET STORE REDUCE SAVE RECOMPUTE RETURN".split())
_MORE_FOLLOWS = _GLUE | _KEYWORDS | {"NOT", "LPAR", "LSQB", "LBRACE"}
_CONTINUES = _GLUE | {"LBRACE", "RPAR", "RSQB"}
_OPENING = frozenset({"LPAR", "LSQB"})
_CLOSING = frozenset({"RPAR", "RSQB"})


class NewlineFilter:
    """Lark's hook between lexer and parser; holds no state of its own, so parsers in several threads may share it."""

    always_accept = ()

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        """The tokens with only those newlines that mean something."""
        depth = 0
        pending: Token | None = None
        last: Token | None = None
        for token in stream:
            if token.type == NEWLINE:
                if depth == 0 and last is not None and last.type not in _MORE_FOLLOWS:
                    pending = pending or token
                continue
            if token.type == "RBRACE" and last is not None and last.type != "LBRACE":
                pending = pending or Token.new_borrow_pos(NEWLINE, "", token)
            if pending is not None and token.type not in _CONTINUES:
                yield pending
            pending = None
            depth = max(0, depth + (token.type in _OPENING) - (token.type in _CLOSING))
            yield token
            last = token
        if last is not None:
            yield pending or Token.new_borrow_pos(NEWLINE, "", last)
