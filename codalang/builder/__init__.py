"""The language in Python: the same epilogues, with operators overloaded.

    import codalang
    from codalang.builder import M, N, col, sigmoid, split, store, tile

    def silu(x):
        return x * sigmoid(x)

    @codalang.epilogue
    def scaled_swiglu(acc: tile[M, N], r: col[M]):
        gate, up = split(acc * r)
        store("y", silu(gate) * up, tile[M, N / 2])

Shapes: `tile row col scalar`, `Dim`, `M`, `N`, `B`.  Statements: `store reduce state save recompute`, and `split
rotate`, which give two values.  Every other function of the language is here under its name (`exp`, `where`, `max`,
...), made from the table of operations, and every built-in state.  `build` gives the IR; `codalang.epilogue` the
function that is called with tensors.

shapes      dimensions and shapes
place       the user's line, column and names
recording   the epilogue in the making
value       values and their operators
refuse      what Python does with a value and the language cannot
functions   functions of values
statements  what comes out: store, reduce, state
states      stateful transforms as classes
definition  a Python function: its place, its annotations, how it is run
define      a Python function -> an Epilogue
"""

from __future__ import annotations

import difflib
from typing import Any

from codalang.builder.define import build
from codalang.builder.functions import FUNCTIONS, i32, rotate, split
from codalang.builder.shapes import B, Dim, M, N, Shape, col, row, scalar, tile
from codalang.builder.statements import recompute, reduce, save, state, store
from codalang.builder.states import BUILTINS
from codalang.builder.value import Value
from codalang.ir.types import STORAGE_DTYPES

__all__ = [
    "Dim",
    "B",
    "M",
    "N",
    "Shape",
    "Value",
    "build",
    "col",
    "i32",
    "recompute",
    "reduce",
    "rotate",
    "row",
    "save",
    "scalar",
    "split",
    "state",
    "store",
    "tile",
    *FUNCTIONS,
    *BUILTINS,
    *STORAGE_DTYPES,
]
_NAMES: dict[str, Any] = {**FUNCTIONS, **BUILTINS, **{dtype: dtype for dtype in STORAGE_DTYPES}}


def __getattr__(name: str) -> Any:
    """The functions of the table, the built-in states and the storage dtypes, by name."""
    if name in _NAMES:
        return _NAMES[name]
    near = difflib.get_close_matches(name, __all__, n=1)
    raise AttributeError(f"codalang.builder has no `{name}`" + (f"; did you mean `{near[0]}`?" if near else ""))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
