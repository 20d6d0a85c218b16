"""The derivative of every op, a line each: the cotangents of its operands.

`g` is the cotangent of the result `y`; `a`, `b`, `x` are the operands.  None is a cotangent that is zero everywhere.
A cotangent is a function on the result's whole domain: operands that broadcast get it unreduced, and the sum over the
broadcast axes is taken once, at the parameter (see `epilogue`).  Where a derivative is cheaper from the result, it
is written so.

The other half of the duality is in `epilogue`:

| forward                            | backward                               |
|------------------------------------|----------------------------------------|
| tile load                          | tile store of its cotangent            |
| tile store                         | tile load of its cotangent             |
| row, col, scalar load (broadcast)  | sum over the broadcast axes            |
| row, col, scalar store, sum, max,  | `seeds`: row, col, scalar loads, which |
| min over axes, stateful transform  | are broadcast to where they belong     |
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs

from codalang.autodiff.graph import Expr, Operand, apply, even, odd


@attrs.frozen
class Halves:
    """The cotangent of a value whose even or odd columns were taken: those of `split` meet and are joined again."""

    even: Expr | None
    odd: Expr | None

    @property
    def is_zero(self) -> bool:
        """True where both halves are zero."""
        return all(half is None or half.is_zero for half in (self.even, self.odd))


Cotangents = tuple[Expr | Halves | None, ...]


def where(mask: Expr, a: Operand, b: Operand) -> Expr:
    """a where the mask holds, b elsewhere."""
    return apply("where", mask, a, b)


def lt(a: Operand, b: Operand) -> Expr:
    """a < b, as a mask."""
    return apply("lt", a, b)


def eq(a: Operand, b: Operand) -> Expr:
    """a == b, as a mask."""
    return apply("eq", a, b)


def sign(x: Expr) -> Expr:
    """1, -1, or 0 where x is neither positive nor negative (torch has it so for NaN too)."""
    return where(lt(0.0, x), 1.0, where(lt(x, 0.0), -1.0, 0.0))


def lesser(g: Expr, a: Expr, b: Expr) -> Expr:
    """What of g goes to a in min(a, b): all, half where a ties with b, or none.  NaN compares false: both get all."""
    return where(lt(b, a), 0.0, where(eq(a, b), 0.5 * g, g))


def greater(g: Expr, a: Expr, b: Expr) -> Expr:
    """What of g goes to a in max(a, b)."""
    return where(lt(a, b), 0.0, where(eq(a, b), 0.5 * g, g))


def exp(x: Expr) -> Expr:
    """e to the x."""
    return apply("exp", x)


def power(x: Expr, exponent: float) -> Operand:
    """x to a constant, where that is no simpler expression."""
    if exponent == 0.0:
        return 1.0
    return x if exponent == 1.0 else apply("pow", x, attr=exponent)


def slope(g: Expr, x: Expr, exponent: float) -> Expr | None:
    """The cotangent of the base of a power."""
    return None if exponent == 0.0 else exponent * (g * power(x, exponent - 1.0))


def group_sum(g: Expr, group: int) -> Expr:
    """The sum of every group of adjacent columns, in each of its columns; a constant factor is taken out."""
    coefficient, rest = g.graph.factor(g.node)
    if not g.has_columns or rest is None:
        return float(group) * g
    return coefficient * apply("group_sum", attrs.evolve(g, node=rest), attr=group)


def shared(g: Expr, y: Expr, x: Expr, group: int) -> Expr:
    """What of a group's maximum y goes to x: its share among the places that are at the maximum."""
    at_most = eq(x, y)
    return where(at_most, group_sum(g, group), 0.0) / group_sum(where(at_most, 1.0, 0.0), group)


RULES: dict[str, Callable[..., Cotangents]] = {
    "add": lambda g, y, a, b: (g, g),
    "sub": lambda g, y, a, b: (g, -g),
    "mul": lambda g, y, a, b: (g * b, g * a),
    "div": lambda g, y, a, b: (g / b, -(g / b * y)),
    "neg": lambda g, y, x: (-g,),
    "lt": lambda g, y, a, b: (None, None),
    "le": lambda g, y, a, b: (None, None),
    "gt": lambda g, y, a, b: (None, None),
    "ge": lambda g, y, a, b: (None, None),
    "eq": lambda g, y, a, b: (None, None),
    "ne": lambda g, y, a, b: (None, None),
    "and": lambda g, y, a, b: (None, None),
    "or": lambda g, y, a, b: (None, None),
    "not": lambda g, y, x: (None,),
    "where": lambda g, y, mask, a, b: (None, where(mask, g, 0.0), where(mask, 0.0, g)),
    "min": lambda g, y, a, b: (lesser(g, a, b), lesser(g, b, a)),
    "max": lambda g, y, a, b: (greater(g, a, b), greater(g, b, a)),
    "abs": lambda g, y, x: (g * sign(x),),
    "exp": lambda g, y, x: (g * y,),
    "exp2": lambda g, y, x: (math.log(2.0) * (g * y),),
    "log": lambda g, y, x: (g / x,),
    "log2": lambda g, y, x: (1.0 / math.log(2.0) * (g / x),),
    "sqrt": lambda g, y, x: (0.5 * (g / y),),
    "rsqrt": lambda g, y, x: (-0.5 * (g * y * y * y),),
    "tanh": lambda g, y, x: (g * (1.0 - y * y),),
    "sigmoid": lambda g, y, x: (g * y * (1.0 - y),),
    "erf": lambda g, y, x: (2.0 / math.sqrt(math.pi) * (g * exp(-(x * x))),),
    "sin": lambda g, y, x: (g * apply("cos", x),),
    "cos": lambda g, y, x: (-(g * apply("sin", x)),),
    "pow": lambda g, y, x: (slope(g, x, y.attr),),
    "cast": lambda g, y, x: (g,),
    "float": lambda g, y, i: (None,),
    "row_index": lambda g, y: (),
    "col_index": lambda g, y: (),
    "group_sum": lambda g, y, x: (group_sum(g, y.attr),),
    "group_max": lambda g, y, x: (shared(g, y, x, y.attr),),
    "stop_gradient": lambda g, y, x: (None,),
    "even": lambda g, y, x: (Halves(g, None),),
    "odd": lambda g, y, x: (Halves(None, g),),
    "join": lambda g, y, a, b: (even(g), odd(g)),
}
