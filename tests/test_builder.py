"""The language in Python: the same IR as from text, and messages that point at the user's line."""

from __future__ import annotations

import builtins
import linecache
import math
import re

import golden_cases
import pytest

import codalang
from codalang import builder as coda
from codalang.errors import CodaError

# What the programs of the tests may use: all of the builder but what hides a function of Python's.
SCOPE = {
    **{name: getattr(coda, name) for name in coda.__all__ if not hasattr(builtins, name)},
    "codalang": codalang,
    "coda": coda,
    "inf": math.inf,
}


def run(text: str, name: str = "program.py") -> dict[str, object]:
    """The names that a Python program defines; its text is known, as a file's is."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope = dict(SCOPE)
    exec(compile(text, name, "exec", dont_inherit=True), scope)
    return scope


def message(text: str) -> str:
    """The error of a wrong program, with its class."""
    with pytest.raises(CodaError) as caught:
        run(text)
    return re.sub(r"0x[0-9a-f]+", "0x...", f"{type(caught.value).__name__}: {caught.value}\n")


@pytest.mark.parametrize("name", golden_cases.load("builder.txt"))
def test_message(name: str) -> None:
    golden_cases.check("builder.txt", name, message)
