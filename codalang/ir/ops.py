"""The one table of operations.

Every op is elementwise over the broadcast shape of its operands, except `even` and `odd`, which halve the width
(they are the two results of `split`), and `join`, which doubles it.  Later stages (reference interpreter,
derivative rules, CuTe DSL) each have a table of their own, keyed by these names; a test fails where one misses an
op.  Adding an op is one line here and one line in each.

`param` and `const` are the leaves of the graph; they are nodes, not ops of this table.
"""

from __future__ import annotations

import attrs

from codalang.ir.types import Dtype

F, B = Dtype.F32, Dtype.BOOL


@attrs.frozen
class OpInfo:
    """Signature and spelling of an op.

    Attributes:
        operands: the register dtype of each operand.
        result: the register dtype of the result.
        infix: the operator symbol, or None where the op is written as a call of its name.
        precedence: binding strength of the infix form, higher binds tighter.
        resize: "halve" or "double" where the result has another width than the operands; None keeps it.
    """

    operands: tuple[Dtype, ...]
    result: Dtype
    infix: str | None = None
    precedence: int = 100
    resize: str | None = None


# Precedence: or 10, and 20, not 30, comparison 40, sum 50, product 60, sign 70, call 100.
OPS: dict[str, OpInfo] = {
    "add": OpInfo((F, F), F, "+", 50),
    "sub": OpInfo((F, F), F, "-", 50),
    "mul": OpInfo((F, F), F, "*", 60),
    "div": OpInfo((F, F), F, "/", 60),
    "neg": OpInfo((F,), F, "-", 70),
    "lt": OpInfo((F, F), B, "<", 40),
    "le": OpInfo((F, F), B, "<=", 40),
    "gt": OpInfo((F, F), B, ">", 40),
    "ge": OpInfo((F, F), B, ">=", 40),
    "eq": OpInfo((F, F), B, "==", 40),
    "ne": OpInfo((F, F), B, "!=", 40),
    "and": OpInfo((B, B), B, "and", 20),
    "or": OpInfo((B, B), B, "or", 10),
    "not": OpInfo((B,), B, "not", 30),
    "where": OpInfo((B, F, F), F),
    "min": OpInfo((F, F), F),
    "max": OpInfo((F, F), F),
    "abs": OpInfo((F,), F),
    "exp": OpInfo((F,), F),
    "exp2": OpInfo((F,), F),
    "log": OpInfo((F,), F),
    "log2": OpInfo((F,), F),
    "sqrt": OpInfo((F,), F),
    "rsqrt": OpInfo((F,), F),
    "tanh": OpInfo((F,), F),
    "sigmoid": OpInfo((F,), F),
    "erf": OpInfo((F,), F),
    "stop_gradient": OpInfo((F,), F),
    "even": OpInfo((F,), F, resize="halve"),
    "odd": OpInfo((F,), F, resize="halve"),
    "join": OpInfo((F, F), F, resize="double"),
}

# What a reduction can compute.  Each is associative and has an identity, so that partials merge.
REDUCTIONS: dict[str, float] = {"sum": 0.0}
