"""What people are told: every message, to the letter."""

from __future__ import annotations

import golden_cases
import pytest

from codalang.errors import CodaCallError, CodaError, CodaSyntaxError, Loc, Source
from codalang.parser import decode, parse, read_source


def message(text: str) -> str:
    """The error of a wrong program, with its class."""
    with pytest.raises(CodaError) as caught:
        parse(text)
    return f"{type(caught.value).__name__}: {caught.value}\n"


@pytest.mark.parametrize("name", golden_cases.load("errors.txt"))
def test_message(name: str) -> None:
    golden_cases.check("errors.txt", name, message)


def test_every_message_points_into_the_program() -> None:
    for name, (text, _) in golden_cases.load("errors.txt").items():
        with pytest.raises(CodaError) as caught:
            parse(Source("file.coda", text))
        for loc in (caught.value.loc, *(loc for loc, _ in caught.value.notes)):
            assert loc is not None, name
            line = text.split("\n")[loc.line - 1]
            assert 1 <= loc.column < loc.end_column <= len(line) + 2, name
        assert str(caught.value).startswith(f"file.coda:{caught.value.loc}".replace("<string>", "")[:10])


def test_line_ends_and_byte_order_mark_do_not_move_the_place() -> None:
    for text in ("fn f(x) = x\nfn g(x) = y\n", "fn f(x) = x\r\nfn g(x) = y\r\n", "\ufefffn f(x) = x\rfn g(x) = y\r"):
        with pytest.raises(CodaError) as caught:
            parse(text)
        assert (caught.value.loc.line, caught.value.loc.column) == (2, 11)
        assert str(caught.value).split("\n")[1:3] == ["    2 | fn g(x) = y", "      |           ^"]


def test_form_feed_is_no_line_break() -> None:
    with pytest.raises(CodaSyntaxError) as caught:
        parse("# a\x0cb\u2028c\nfn f(x) = $\n")
    assert str(caught.value) == ("<string>:2:11: unexpected character `$`\n    2 | fn f(x) = $\n      |           ^")


def test_long_line_shows_the_part_around_the_fault() -> None:
    text = "fn f(x) = " + "x + " * 1000 + "y" + " + x" * 1000
    with pytest.raises(CodaError) as caught:
        parse(text)
    shown, carets = str(caught.value).split("\n")[1:3]
    assert len(shown) < 200
    assert shown[carets.index("^")] == "y"
    assert caught.value.loc.column == text.index("y") + 1


def test_wide_and_combining_characters_keep_the_caret_in_place() -> None:
    loc = Loc(Source("s", "漢e\u0301x = 1"), 1, 4, 5)
    assert str(CodaError("here", loc)).split("\n")[2] == "      | " + "   " + "^"


def test_unprintable_characters_do_not_reach_the_terminal() -> None:
    for character in ("\x00", "\x1b", "\u202e", "\ud800"):
        with pytest.raises(CodaSyntaxError) as caught:
            parse(f"fn f(x) = {character}x\n")
        assert character not in str(caught.value)
        assert f"U+{ord(character):04X}" in str(caught.value)


def test_file_that_is_not_utf8(tmp_path) -> None:
    path = tmp_path / "bad.coda"
    path.write_bytes(b"fn f(x) = x\r\n# caf\xe9\n")
    with pytest.raises(CodaSyntaxError) as caught:
        read_source(path)
    assert str(caught.value) == (
        f"{path}:2:6: byte 0xe9 is not UTF-8\n    2 | # caf\N{REPLACEMENT CHARACTER}\n      |      ^\n"
        "hint: save the file as UTF-8"
    )
    with pytest.raises(CodaSyntaxError):
        decode(b"\xff\xfe\x00")


def test_file_that_cannot_be_read(tmp_path) -> None:
    for path in (tmp_path, tmp_path / "missing.coda", "nul\x00name.coda"):
        with pytest.raises(CodaError, match="cannot read"):
            read_source(path)


def test_call_errors_are_type_errors_for_python() -> None:
    assert issubclass(CodaCallError, TypeError)
