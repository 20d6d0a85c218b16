"""Lark's errors -> messages for people.

The parser knows which token it met and which it could have taken; its stack still holds the brackets and keywords
that are open.  `_RULES` turns the common mistakes into messages of their own, first match wins; every other error says
what was expected and what came.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable

import attrs
from lark import Token, UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from codalang.errors import CodaError, CodaSyntaxError, Loc, Source
from codalang.ir.names import KEYWORDS
from codalang.ir.ops import OPS, REDUCTIONS
from codalang.parser.library import library_names
from codalang.parser.newlines import NEWLINE, OPERATORS

END = "$END"
_DEFINITION = {"FN", "STATE", "EPILOGUE", "PROGRAM", "IMPORT"}
_STATEMENT = {"LET", "STORE", "REDUCE", "STATE", "SAVE", "RECOMPUTE", "RETURN"}
_PROGRAM_STATEMENT = {"NAME", "LPAR", "RETURN"}
_PARTNER = {"LPAR": "RPAR", "LSQB": "RSQB", "LBRACE": "RBRACE"}
_OPERAND = {"NAME", "NUMBER", "LPAR", "MINUS", "NOT", "TRUE", "FALSE", "INF", "NAN"}

_FOREIGN_WORDS = {
    "if": "`where(condition, a, b)` chooses between two values",
    "else": "`where(condition, a, b)` chooses between two values",
    "for": "there are no loops: an expression means every element at once",
    "while": "there are no loops: an expression means every element at once",
    "def": "write `fn name(x) = expression`",
    "from": 'write `import name` or `import "file.coda"`',
    "var": "write `let name = expression`",
    "const": "write `let name = expression`",
}

# What another language's word would do -> how a program says it; elsewhere it is `_FOREIGN_WORDS`.
_FOREIGN_IN_PROGRAM = {
    "if": "a program has no branches: `where(condition, a, b)` chooses between numbers, here and in epilogues",
    "for": "a program has no loops: write each statement; what repeats is a program of its own, which others call",
    "while": "a program has no loops: it runs from top to bottom, once",
    "def": "write `program name(x: [T, D]) { ... }`",
    "var": "write `name = expression`",
}

_TRANSPOSE = frozenset({"t", "mt", "h", "mh", "transpose"})
_CALLED = frozenset({*OPS, *REDUCTIONS})
_MATMULS = frozenset({"matmul", "mm", "bmm", "dot", "linear"})

_FOREIGN_CHARACTERS = {
    ";": "a statement ends with its line",
    "%": "there is no remainder operator",
    "^": "there is no power operator: write `pow(x, 2)`",
    "!": "write `not`",
    "&": "write `and`",
    "|": "write `or`",
    "?": "`where(condition, a, b)` chooses between two values",
    "'": "a path is written in double quotes; there are no other strings",
    '"': "the quote is not closed; only `import` takes a string",
    "\u2212": "write `-`",
    "\u2013": "write `-`",
    "\u00d7": "write `*`",
    "\u00b7": "write `*`",
    "\u00f7": "write `/`",
    "\u2264": "write `<=`",
    "\u2265": "write `>=`",
    "\u2260": "write `!=`",
    "\u00a0": "this is a no-break space: write a plain one",
}

_SPELLED = {
    "NAME": "a name",
    "NUMBER": "a number",
    "STRING": 'a path in quotes, `"other.coda"`',
    NEWLINE: "the end of the line",
    END: "the end of the file",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "LBRACE": "`{`",
    "RBRACE": "`}`",
    "EQUAL": "`=`",
    "_COMMA": "`,`",
    "_COLON": "`:`",
    "MINUS": "`-`",
    "STAR": "`*`",
    "SLASH": "`/`",
    "DOT": "`.`",
}


def complaint(error: UnexpectedInput, source: Source) -> CodaError:
    """The error to raise for one of lark's."""
    if isinstance(error, UnexpectedCharacters):
        return _bad_character(error, source)
    assert isinstance(error, UnexpectedToken)
    situation = _situation(error, source)
    for applies, build in _RULES:
        if applies(situation):
            return build(situation)
    return _expected(situation)


def shorten(text: str, limit: int = 40) -> str:
    """`text`, its middle left out where it is too long for a message."""
    return text if len(text) <= limit else f"{text[: limit - 10]}...{text[-7:]}"


def suggestion(name: str, known: Iterable[str]) -> str | None:
    """`did you mean ...` for a name that nearly is one of the known ones."""
    if len(name) > 60:
        return None
    close = difflib.get_close_matches(name, [k for k in known if len(k) <= 60], n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else None


@attrs.frozen
class _Situation:
    """A token where the grammar has no place for it."""

    token: Token
    accepts: frozenset[str]  # what could have stood here
    open: tuple[Token, ...]  # tokens of the rules that are not complete, outermost first
    loc: Loc
    first_on_line: bool

    @property
    def text(self) -> str:
        return shorten(str(self.token))

    @property
    def in_program(self) -> bool:
        return any(token.type == "PROGRAM" for token in self.open)

    @property
    def line(self) -> str:
        """The line of the text that it stands in."""
        return self.loc.source.line(self.loc.line)

    @property
    def brackets(self) -> list[Token]:
        """The brackets that are open, outermost first."""
        found: list[Token] = []
        for token in self.open:
            if token.type in _PARTNER:
                found.append(token)
            elif found and token.type == _PARTNER[found[-1].type]:
                found.pop()
        return found

    @property
    def after(self) -> str:
        """The type of the token before, where no rule is complete in between; else ''."""
        return self.open[-1].type if self.open else ""


def _situation(error: UnexpectedToken, source: Source) -> _Situation:
    stack = error.interactive_parser.parser_state.value_stack
    token = _met(error.token, source)
    line, column = token.line or 1, token.column or 1
    return _Situation(
        token=token,
        accepts=frozenset(error.accepts or error.expected),
        open=tuple(part for part in stack if isinstance(part, Token)),
        loc=Loc(source, line, column, column + max(1, len(token.rstrip("\n")))),
        first_on_line=not source.line(line)[: column - 1].strip(),
    )


def _met(token: Token, source: Source) -> Token:
    """The token that the text has where the parser failed: not a newline that newlines.py put in."""
    if token.type == NEWLINE and not token and source.line(token.line or 1)[(token.column or 1) - 1 :].startswith("}"):
        return Token.new_borrow_pos("RBRACE", "}", token)
    if token.type == END or not token:
        line, column = _end(source)
        return Token(END, "", line=line, column=column)
    return token


def _end(source: Source) -> tuple[int, int]:
    """Behind the last character that is not blank."""
    text = source.text.rstrip()
    return text.count("\n") + 1, len(text) - (text.rfind("\n") + 1) + 1


def _bad_character(error: UnexpectedCharacters, source: Source) -> CodaError:
    character = source.text[error.pos_in_stream or 0]
    shown = f"`{character}`" if character.isprintable() and not character.isspace() else f"U+{ord(character):04X}"
    return CodaSyntaxError(
        f"unexpected character {shown}",
        Loc(source, error.line, error.column, error.column + 1),
        hint=_FOREIGN_CHARACTERS.get(character),
    )


def _syntax_error(message: str, hint: str | None = None) -> Callable[[_Situation], CodaError]:
    """A rule's error with a message in which {token} stands for what came."""
    return lambda s: CodaSyntaxError(message.replace("{token}", s.text), s.loc, hint=hint)


def _expected(s: _Situation) -> CodaError:
    wanted = _describe(s.accepts)
    if s.token.type == END:
        message = f"the file ends where {wanted} is expected"
    elif s.token.type == NEWLINE:
        message = f"the line ends where {wanted} is expected"
    else:
        message = f"expected {wanted}, got `{s.text}`"
    return CodaSyntaxError(message, s.loc, notes=_unclosed(s))


def _unclosed(s: _Situation) -> tuple[tuple[Loc, str], ...]:
    """A note for the innermost open bracket, where its not being closed can be the reason."""
    if not s.brackets or s.token.type == _PARTNER[s.brackets[-1].type]:
        return ()
    last = s.brackets[-1]
    if s.token.type != END and (last.type == "LBRACE" or not (s.first_on_line or s.token.type in _PARTNER.values())):
        return ()
    line, column = last.line or 1, last.column or 1
    return ((Loc(s.loc.source, line, column, column + 1), f"this `{last}` is not closed"),)


def _describe(accepts: Collection[str]) -> str:
    """What could have stood here, in words: `an operator or `)``."""
    rest = set(accepts)
    parts: list[str] = []
    for group, spelled, also in (
        ({"NAME", "NUMBER", "LPAR"}, "an expression", _OPERAND),
        (_DEFINITION, "`import`, `fn`, `state`, `epilogue` or `program`", {END, NEWLINE, "PRECISE"}),
        (_STATEMENT, "a statement", set()),
        (_PROGRAM_STATEMENT, "a statement", set()),
        ({"PLUS", "MINUS"}, "an operator", OPERATORS | {"LPAR", "LSQB", "DOT"}),
    ):
        if group <= rest:
            parts.append(spelled)
            rest -= group | also
    parts += [_SPELLED.get(name, f"`{name.lower()}`") for name in sorted(rest)]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def _at_statement(s: _Situation) -> bool:
    return "LET" in s.accepts


def _at_definition(s: _Situation) -> bool:
    return "FN" in s.accepts


def _closes_nothing(s: _Situation) -> bool:
    return s.token.type in _PARTNER.values() and not any(_PARTNER[b.type] == s.token.type for b in s.brackets)


def _in_parameters(s: _Situation) -> bool:
    types = [t.type for t in s.open]
    return "EPILOGUE" in types and "LPAR" in types and "LBRACE" not in types


def _follows(s: _Situation, *types: str) -> bool:
    """Are these the last tokens of the rules that are not complete?"""
    return tuple(t.type for t in s.open[-len(types) :]) == types


def _wants_operand(s: _Situation) -> bool:
    return {"NAME", "NUMBER", "LPAR"} <= s.accepts


def _wants_operator(s: _Situation) -> bool:
    return {"PLUS", "MINUS"} <= s.accepts


def _in_program_parameters(s: _Situation) -> bool:
    types = [t.type for t in s.open]
    return "PROGRAM" in types and "LPAR" in types and "LBRACE" not in types


# What begins a statement elsewhere -> what to say where it does in a program.
_IN_PROGRAM = {
    "LET": ("a program has no `let`", "write `name = expression`"),
    "STORE": ("a program has no `store`", "what an epilogue stores is its result: `y = my_epilogue(x @ w.T)`"),
    "REDUCE": ("a program has no `reduce`", "an epilogue reduces a matrix; `s = sum(v)` is the sum of a vector"),
    "STATE": ("a program has no `state`", "an epilogue folds a matrix with one"),
    "SAVE": ("a program has no `save`", "it stands in the epilogue whose value is saved"),
    "RECOMPUTE": ("a program has no `recompute`", "it stands in the epilogue whose value is recomputed"),
    "LSQB": ("results do not stand in brackets", "several stand in parentheses: `(x, y) = my_epilogue(...)`"),
    **{
        word: (f"`{word.lower()}` stands outside of {{ }}", "a program contains statements only")
        for word in ("FN", "EPILOGUE", "PROGRAM", "IMPORT")
    },
}


def _at_program_statement(s: _Situation) -> bool:
    at = s.accepts >= _PROGRAM_STATEMENT and not _at_statement(s) and "NUMBER" not in s.accepts
    return at and s.token.type in _IN_PROGRAM


def _in_program(s: _Situation) -> CodaError:
    message, hint = _IN_PROGRAM[s.token.type]
    return CodaSyntaxError(message, s.loc, hint=hint)


def _foreign_word(word: str, loc: Loc, in_program: bool) -> CodaError:
    hint = (_FOREIGN_IN_PROGRAM if in_program else {}).get(word, _FOREIGN_WORDS[word])
    return CodaSyntaxError(f"there is no `{word}`", loc, hint=hint)


_METHOD = re.compile(r"(\w+)[ \t]*\.[ \t]*([A-Za-z_]\w*)[ \t]*$")


def _method(s: _Situation) -> bool:
    """`w.t()`, or `torch.relu(x)`."""
    return s.token.type == "LPAR" and _METHOD.search(s.line[: s.loc.column - 1]) is not None


def _called_method(s: _Situation) -> CodaError:
    found = _METHOD.search(s.line[: s.loc.column - 1])
    assert found is not None
    name = found[2]
    if name.lower() in _TRANSPOSE:
        hint = "a transposed operand of a matmul is `w.T`"
    elif name in _MATMULS:
        hint = "a matmul is `x @ w.T`, in a program"
    elif s.in_program and name in library_names():
        hint = f"`import {name}` imports an epilogue: `y = {name}(x @ w.T)`, or `{name}(x)` of a matrix"
    else:
        hint = f"a function is called by its name alone: `{name if name in _CALLED else 'sigmoid'}(x)`"
    loc = Loc(s.loc.source, s.loc.line, found.start(2) + 1, found.end(2) + 1)
    return CodaSyntaxError(f"nothing is called by a `.`: there is no `.{shorten(name)}(...)`", loc, hint=hint)


def _unnamed_results(s: _Situation) -> bool:
    """A statement of a program that goes on as none does."""
    is_program = any(t.type == "PROGRAM" for t in s.open)
    return is_program and s.accepts == {"EQUAL"} and _follows(s, "LBRACE", "NAME")


def _results(s: _Situation) -> CodaError:
    name = shorten(str(s.open[-1]))
    if name in _FOREIGN_WORDS and s.token.type in ("NAME", "LPAR", "NOT", "TRUE", "FALSE"):
        line, column = s.open[-1].line or 1, s.open[-1].column or 1
        return _foreign_word(name, Loc(s.loc.source, line, column, column + len(name)), in_program=True)
    if s.token.type == "_COMMA":
        hint = f"several results stand in parentheses: `({name}, ...) = my_epilogue(...)`"
    elif s.token.type == "LPAR":
        hint = f"name the results: `y = {name}(...)`, or `(y, z) = {name}(...)` for several"
    else:
        hint = "a statement is `name = ...` or `(name, name) = ...`; a value is made once, and does not change"
    return CodaSyntaxError(f"expected `=`, got `{s.text}`", s.loc, hint=hint)


def _indexed(s: _Situation) -> bool:
    """`x[0]` or `x[:, 0]`, where only `f[M, N](...)` is."""
    types = [t.type for t in s.open]
    inside = "EPILOGUE" not in types or "LBRACE" in types
    sliced = s.token.type == "_COLON" and [b.type for b in s.brackets][-1:] == ["LSQB"]
    sliced = sliced and (_wants_operand(s) or "COMPARISON" in s.accepts)
    return inside and (sliced or (s.accepts == {"LPAR"} and s.after == "RSQB"))


def _index(s: _Situation) -> CodaError:
    bracket = next(t for t in reversed(s.open) if t.type == "LSQB")
    line, column = bracket.line or 1, bracket.column or 1
    return CodaSyntaxError(
        "values are not indexed",
        Loc(s.loc.source, line, column, column + 1),
        hint="`let (even, odd) = split(x)` gives the even and the odd columns",
    )


def _foreign_comment(s: _Situation) -> bool:
    """`// text` or `/* text */`, whose first slash may have been taken for a division."""
    if s.token.type not in ("SLASH", "STAR"):
        return False
    before, behind = s.line[: s.loc.column - 1], s.line[s.loc.column - 1 :]
    return behind.startswith(("//", "/*")) or (s.after == "SLASH" and before.endswith("/"))


def _misspelled(s: _Situation, words: Collection[str]) -> str | None:
    """`did you mean ...` for what is nearly a word that could have stood here; but `y = ...` is an assignment."""
    if s.line[s.loc.end_column - 1 :].lstrip().startswith("="):
        return None
    return suggestion(str(s.token), sorted(word.lower() for word in words))


_RULES: tuple[tuple[Callable[[_Situation], bool], Callable[[_Situation], CodaError]], ...] = (
    (
        lambda s: str(s.token) in KEYWORDS and "NAME" in s.accepts and not s.first_on_line,
        _syntax_error("`{token}` is a reserved word, and cannot be a name"),
    ),
    (
        lambda s: s.token.type == "NAME" and str(s.token) in _FOREIGN_WORDS,
        lambda s: _foreign_word(str(s.token), s.loc, in_program=s.in_program),
    ),
    (
        lambda s: s.token.type == "_COLON" and s.accepts == {"LBRACE"},
        _syntax_error("expected `{`, got `:`", "a body stands in { }"),
    ),
    (_method, _called_method),
    (_foreign_comment, _syntax_error("a comment begins with `#`")),
    (
        lambda s: _at_statement(s) and s.token.type == "NAME",
        lambda s: CodaSyntaxError(
            f"a statement cannot begin with `{s.text}`",
            s.loc,
            hint=_misspelled(s, _STATEMENT)
            or f"write `let {s.text} = ...` for a value, `store {s.text}: ...` for an output",
        ),
    ),
    (
        lambda s: _at_definition(s) and s.token.type == "NAME" and _misspelled(s, _DEFINITION) is not None,
        lambda s: CodaSyntaxError(
            f"a definition cannot begin with `{s.text}`", s.loc, hint=_misspelled(s, _DEFINITION)
        ),
    ),
    (_at_program_statement, _in_program),
    (_unnamed_results, _results),
    (
        lambda s: s.accepts == {"_COLON"} and _in_program_parameters(s),
        _syntax_error("expected `:` and a shape, got `{token}`", "each parameter has a shape: `x: [T, D]`"),
    ),
    (
        lambda s: s.token.type == "LSQB" and _in_program_parameters(s) and s.after == "NAME",
        _syntax_error(
            "a program's parameter has no kind",
            "write its shape alone: a matrix is `x: [T, D]`, a vector `v: [D]`, a number `eps: scalar`",
        ),
    ),
    (_closes_nothing, _syntax_error("`{token}` closes nothing")),
    (
        lambda s: s.accepts == {"_COLON"} and _in_parameters(s),
        _syntax_error("expected `:` and a shape, got `{token}`", "each parameter has a shape: `acc: tile[M, N]`"),
    ),
    (
        lambda s: _at_statement(s) and s.token.type == "IMPORT",
        _syntax_error("`import` stands outside of { }", "imports come first, on lines of their own"),
    ),
    *(
        (
            lambda s, types=types, token=token: s.token.type == token and _follows(s, *types),
            _syntax_error(message, hint),
        )
        for token, types, message, hint in (
            ("_COMMA", ("LET", "NAME"), "a `let` names one value", "`let (a, b) = ...` names several results"),
            ("_COMMA", ("STATE", "NAME"), "this names one result", "`state (a, b): col[M] = ...` names several"),
            ("LPAR", ("REDUCE",), "a reduction has one result", "`state (value, index): ...` names several"),
            ("LPAR", ("SAVE",), "expected a name, got `(`", "write `save x` or `save x, y`"),
            ("LPAR", ("RECOMPUTE",), "expected a name, got `(`", "write `recompute x` or `recompute x, y`"),
            ("_COMMA", ("RETURN",), "one value is returned here", "several stand in parentheses: `return (a, b)`"),
            (
                "_COMMA",
                ("NAME", "NAME", "EQUAL", "LPAR"),
                "expected `)`, got `,`",
                "a clause names its results in parentheses: `finalize (y, z) = (..., ...)`",
            ),
            (
                "_COMMA",
                ("EQUAL", "LPAR"),
                "several values in parentheses are no value",
                "name each by a `let` of its own; a function may return several",
            ),
            ("_COMMA", ("IMPORT", "NAME"), "one file is imported here", "each import has a line of its own"),
            ("_COMMA", ("IMPORT", "STRING"), "one file is imported here", "each import has a line of its own"),
        )
    ),
    (
        lambda s: s.token.type in OPERATORS and (_follows(s, "SAVE", "NAME") or _follows(s, "RECOMPUTE", "NAME")),
        _syntax_error("only a value with a name is saved or recomputed", "name it by a `let`"),
    ),
    (
        lambda s: s.token.type == "EQUAL" and s.accepts == {"LBRACE", "LPAR", "NAME"},
        _syntax_error("this clause has another form", "write `update { ... return (m, s) }`, and `merge` like it"),
    ),
    (
        lambda s: s.token.type == "LBRACE" and s.accepts == {"EQUAL", "_COLON"},
        _syntax_error("what is carried ends before this line", "it ends without a comma: `carry m = -inf, s = 0`"),
    ),
    (
        lambda s: s.token.type == "LSQB" and any(t.type == "STATE" for t in s.open) and not _at_statement(s),
        _syntax_error("the inputs of a state have no shape", "one element at a time is folded: leave it out"),
    ),
    (
        lambda s: s.token.type == "LPAR" and s.accepts == {"EQUAL", "_COLON"} and _follows(s, "STATE", "NAME"),
        _syntax_error(
            "a state is defined outside of epilogues",
            "inside, `state s: col[M] = online_logsumexp(x)` folds values with one",
        ),
    ),
    (
        lambda s: _at_definition(s) and s.token.type in _STATEMENT - _DEFINITION,
        _syntax_error("`{token}` stands inside an epilogue's { }"),
    ),
    (
        lambda s: _wants_operator(s) and s.token.type == "COMPARISON",
        _syntax_error("comparisons do not chain", "write `a < b and b < c`"),
    ),
    (
        lambda s: _wants_operator(s) and s.token.type == "EQUAL",
        _syntax_error("`=` is no operator", "`==` compares; arguments are given by position"),
    ),
    (
        lambda s: _wants_operator(s) and s.token.type == "LSQB",
        _syntax_error("values are not indexed", "`let (even, odd) = split(x)` gives the even and the odd columns"),
    ),
    (_indexed, _index),
    (
        lambda s: _wants_operator(s) and s.token.type == "NAME" and not s.first_on_line,
        lambda s: CodaSyntaxError(
            f"expected {_describe(s.accepts)}, got `{s.text}`",
            s.loc,
            hint="a product is written with `*`; each statement has a line of its own",
        ),
    ),
    (lambda s: _wants_operand(s) and s.token.type == "PLUS", _syntax_error("there is no sign `+`", "leave it out")),
    (
        lambda s: _wants_operand(s) and s.token.type == "STAR" and s.after == "STAR",
        _syntax_error("there is no power operator", "write `pow(x, 2)`"),
    ),
    (
        lambda s: s.token.type == "_COLON" and s.accepts == {"EQUAL"},
        _syntax_error("a `let` declares no type", "it is that of the value: leave it out"),
    ),
    (
        lambda s: s.token.type == "_COLON" and any(t.type == "FN" for t in s.open),
        _syntax_error("a parameter of an `fn` declares no type", "an `fn` takes values of any type: leave it out"),
    ),
)
