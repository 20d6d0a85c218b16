"""What lark makes of grammar.lark, kept beside it in grammar.json: to analyse a grammar takes a tenth of a second.

    python -c "from codalang.parser.table import write; write()"    after a change of the grammar or of lark

The table says of which grammar and of which lark it is.  Where either is another, or there is no table, the grammar is
analysed: the parser is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import lark

GRAMMAR = Path(__file__).with_name("grammar.lark")
TABLE = GRAMMAR.with_suffix(".json")

_OPTIONS = {"parser": "lalr", "lexer": "basic", "propagate_positions": False}


def parser(**hooks: Any) -> lark.Lark:
    """The parser; `hooks` are lark's `transformer` and `postlex`."""
    grammar = GRAMMAR.read_text(encoding="utf-8")
    with contextlib.suppress(OSError, ValueError):
        table = json.loads(TABLE.read_bytes(), object_hook=_numbered)
        if table["of"] == _identity(grammar):
            return lark.Lark._load_from_dict(table["data"], table["memo"], **hooks)
    return lark.Lark(grammar, **_OPTIONS, **hooks)


def write() -> None:
    """Make the table.  Its states are numbered anew in each process."""
    grammar = GRAMMAR.read_text(encoding="utf-8")
    data, memo = lark.Lark(grammar, **_OPTIONS).memo_serialize([lark.lexer.TerminalDef, lark.grammar.Rule])
    table = {"of": _identity(grammar), "data": data, "memo": memo}
    TABLE.write_text(json.dumps(table, separators=(",", ":")) + "\n", encoding="utf-8")


def _identity(grammar: str) -> list[str]:
    return [hashlib.sha256(grammar.encode()).hexdigest(), lark.__version__]


def _numbered(pairs: dict[str, Any]) -> dict[str | int, Any]:
    """The keys that are numbers again; JSON has texts only."""
    return {int(key) if key.isdecimal() else key: value for key, value in pairs.items()}
