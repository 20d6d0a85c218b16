"""Golden tests: a text and what must come of it, side by side in one file.

    ==== name of the case
    the text that goes in
    ----
    the text that must come out

`GOLDEN=write pytest ...` rewrites the second halves; read the difference before you commit it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def load(file: str) -> dict[str, tuple[str, str]]:
    """The cases of a golden file by name: what goes in, what comes out."""
    cases: dict[str, tuple[str, str]] = {}
    for part in (FOLDER / file).read_text(encoding="utf-8").split("==== ")[1:]:
        name, _, body = part.partition("\n")
        text, _, expected = body.partition("----\n")
        assert name not in cases, f"two cases are called {name!r}"
        cases[name] = (text, expected)
    return cases


def check(file: str, name: str, produce: Callable[[str], str]) -> None:
    """Assert that `produce` makes of the case's text what the file says."""
    text, expected = load(file)[name]
    got = produce(text)
    if os.environ.get("GOLDEN") == "write":
        cases = load(file) | {name: (text, got)}
        content = "".join(f"==== {n}\n{t}----\n{e}" for n, (t, e) in cases.items())
        (FOLDER / file).write_text(content, encoding="utf-8")
        return
    assert got == expected
