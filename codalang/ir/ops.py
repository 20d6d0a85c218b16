"""The one table of operations.

Every op is elementwise over the broadcast shape of its operands, except `even` and `odd`, which halve the width
(they are the two results of `split`), `join`, which doubles it, and the group ops, which combine adjacent columns.
Later stages (reference interpreter, derivative rules, CuTe DSL) each have a table of their own, keyed by these names; a
test fails where one misses an op.  Adding an op is one line here and one line in each.

Some ops carry a static attribute (`Node.attr`):

| op                   | written                  | attribute                                                         |
|----------------------|--------------------------|-------------------------------------------------------------------|
| pow                  | `pow(x, 1.5)`            | the exponent, a float                                             |
| cast                 | `cast(x, bf16)`          | a storage dtype: the value is rounded to it, and is f32 again      |
| group_sum, group_max | `group_sum(x, 128)`      | the group: so many adjacent columns.  Every column of a group gets |
|                      |                          | the group's sum or maximum: the result has x's type                |
| row_index, col_index | `row_index()`            | none; i32, counted in the whole output, at width 1                 |

`param` and `const` are the leaves of the graph; they are nodes, not ops of this table.
"""

from __future__ import annotations

import math

import attrs

from codalang.ir.types import Dtype, Kind

F, N, B = Dtype.F32, Dtype.I32, Dtype.BOOL

Signature = tuple[tuple[Dtype, ...], Dtype]


@attrs.frozen
class OpInfo:
    """Signature and spelling of an op.

    Attributes:
        operands: the register dtype of each operand, on floats.
        result: the register dtype of the result, on floats.
        infix: the operator symbol, or None where the op is written as a call of its name.
        precedence: binding strength of the infix form, higher binds tighter.
        resize: "halve" or "double" where the result has another width than the operands; None keeps it.
        also: further signatures, on integers or masks.
        attr: what the static attribute is: "exponent", "dtype" or "group"; None where there is none.
        kind: the kind of the result of an op without operands.
    """

    operands: tuple[Dtype, ...]
    result: Dtype
    infix: str | None = None
    precedence: int = 100
    resize: str | None = None
    also: tuple[Signature, ...] = ()
    attr: str | None = None
    kind: Kind | None = None

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """Every signature, that on floats first."""
        return ((self.operands, self.result), *self.also)


_COUNT: tuple[Signature, ...] = (((N, N), N),)
_COUNT_1: tuple[Signature, ...] = (((N,), N),)
_COMPARE: tuple[Signature, ...] = (((N, N), B),)

# Precedence: or 10, and 20, not 30, comparison 40, sum 50, product 60, sign 70, call 100.
OPS: dict[str, OpInfo] = {
    "add": OpInfo((F, F), F, "+", 50, also=_COUNT),
    "sub": OpInfo((F, F), F, "-", 50, also=_COUNT),
    "mul": OpInfo((F, F), F, "*", 60, also=_COUNT),
    "div": OpInfo((F, F), F, "/", 60),
    "neg": OpInfo((F,), F, "-", 70, also=_COUNT_1),
    "lt": OpInfo((F, F), B, "<", 40, also=_COMPARE),
    "le": OpInfo((F, F), B, "<=", 40, also=_COMPARE),
    "gt": OpInfo((F, F), B, ">", 40, also=_COMPARE),
    "ge": OpInfo((F, F), B, ">=", 40, also=_COMPARE),
    "eq": OpInfo((F, F), B, "==", 40, also=_COMPARE),
    "ne": OpInfo((F, F), B, "!=", 40, also=_COMPARE),
    "and": OpInfo((B, B), B, "and", 20),
    "or": OpInfo((B, B), B, "or", 10),
    "not": OpInfo((B,), B, "not", 30),
    "where": OpInfo((B, F, F), F, also=(((B, N, N), N),)),
    "min": OpInfo((F, F), F, also=_COUNT),
    "max": OpInfo((F, F), F, also=_COUNT),
    "abs": OpInfo((F,), F, also=_COUNT_1),
    "exp": OpInfo((F,), F),
    "exp2": OpInfo((F,), F),
    "log": OpInfo((F,), F),
    "log2": OpInfo((F,), F),
    "sqrt": OpInfo((F,), F),
    "rsqrt": OpInfo((F,), F),
    "tanh": OpInfo((F,), F),
    "sigmoid": OpInfo((F,), F),
    "erf": OpInfo((F,), F),
    "sin": OpInfo((F,), F),
    "cos": OpInfo((F,), F),
    "pow": OpInfo((F,), F, attr="exponent"),
    "cast": OpInfo((F,), F, attr="dtype"),
    "float": OpInfo((N,), F, also=(((B,), F),)),
    "row_index": OpInfo((), N, kind=Kind.COL),
    "col_index": OpInfo((), N, kind=Kind.ROW),
    "group_sum": OpInfo((F,), F, attr="group"),
    "group_max": OpInfo((F,), F, attr="group"),
    "stop_gradient": OpInfo((F,), F),
    "even": OpInfo((F,), F, resize="halve", also=(((N,), N), ((B,), B))),
    "odd": OpInfo((F,), F, resize="halve", also=(((N,), N), ((B,), B))),
    "join": OpInfo((F, F), F, resize="double", also=(((N, N), N), ((B, B), B))),
}

# What a reduction can compute.  Each is associative and has an identity, so that partials merge.
REDUCTIONS: dict[str, float] = {"sum": 0.0, "max": -math.inf, "min": math.inf}
