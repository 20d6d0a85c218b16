"""Which words can be names.

Only the words of the grammar are reserved.  Functions (`exp`, `max`) and shape kinds (`row`) are known by where they
stand, so a parameter may be called `max`, and a new function does not break a program that has a value of its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from codalang.ir.types import Dims

KEYWORDS = frozenset(
    "fn precise epilogue program import let store reduce state save recompute return".split()
    + "and or not true false inf nan".split()
)

# What only the language's own functions are called, beside the ops: no `fn` and no program.
FUNCTIONS = frozenset("neg i32 split rotate sum".split())

# `let (even, _) = split(x)` names no second half.
DISCARD = "_"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_name(text: object) -> bool:
    """True where `text` can name a parameter, a value, an output, a dimension or a definition."""
    return isinstance(text, str) and bool(_NAME.fullmatch(text)) and text not in KEYWORDS and text != DISCARD


# What an epilogue has symbols for, in the order of its `dims`; the last only where there is one row per sample.
AXES = ("rows", "columns", "samples")


def default_dims(rows: str | None, columns: str | None, samples: str | None = None) -> Dims:
    """The symbols of an epilogue that writes out only some of them, or none: M and N, where they are free."""
    if columns is None:
        columns = "N" if rows != "N" else "N_columns"
    if rows is None:
        rows = "M" if "M" not in (columns, samples) else "M_rows" if "M_rows" not in (columns, samples) else "M_rows_"
    return (rows, columns) if samples is None else (rows, columns, samples)


class Namer:
    """Hands out names that differ from each other and from those already `taken`."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._numbers: dict[str, int] = {}

    def fresh(self, wanted: str) -> str:
        """`wanted`, or `wanted_2`, `wanted_3`, ... where it is taken or no name."""
        if is_name(wanted) and wanted not in self._taken:
            self._taken.add(wanted)
            return wanted
        return self._count(f"{wanted}_" if _NAME.fullmatch(wanted) else "t", 2)

    def numbered(self, stem: str) -> str:
        """The first free name of `stem1`, `stem2`, ..."""
        return self._count(stem, 1)

    def _count(self, stem: str, start: int) -> str:
        number = self._numbers.get(stem, start)
        while f"{stem}{number}" in self._taken:
            number += 1
        self._numbers[stem] = number + 1
        self._taken.add(f"{stem}{number}")
        return f"{stem}{number}"
