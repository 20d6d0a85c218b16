"""The stateful transforms that every program knows: the IR of stdlib/states.coda, which a test compares with it.

| name              | inputs     | results            |                                                              |
|-------------------|------------|--------------------|--------------------------------------------------------------|
| online_logsumexp  | x          | lse                | log(sum(exp(x))), with no intermediate larger than its inputs |
| online_max        | x          | value              | the maximum                                                  |
| online_min        | x          | value              | the minimum                                                  |
| argmax            | x, i       | value, index       | the maximum, and the least i that it is at                   |
| argmin            | x, i       | value, index       | the minimum, and the least i that it is at                   |
| argmax2           | x, i, j    | value, row, column | the same with two indices, the first of which counts first   |
| welford           | x          | mean, var, count   | mean and population variance without cancellation            |

A NaN is the maximum and the minimum of whatever it meets, as in torch.  The derivative of `reduce m: col[M] = max(e)`,
or of `online_max`, goes to an index that `argmax` finds; so `online_max` needs no `vjp`.  Welford's merge is that of
Chan, Golub and LeVeque (1979).

BLOCKWISE has the same states of many elements at once: a few plain reductions, each with the results of those before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs

from codalang.ir.build import EpilogueBuilder, function_of
from codalang.ir.states import Blockwise, Function, Named, Pass, StateDef
from codalang.ir.types import Dtype, Kind, ValueType

NO_INDEX = 2**31 - 1  # larger than every index: the identity of a least index


@attrs.frozen(eq=False)
class Scalar:
    """A node of a function in the making; operators are overloaded on it."""

    builder: EpilogueBuilder = attrs.field(repr=False)
    node: int

    def __add__(self, other: Operand) -> Scalar:
        return apply("add", self, other)

    def __sub__(self, other: Operand) -> Scalar:
        return apply("sub", self, other)

    def __mul__(self, other: Operand) -> Scalar:
        return apply("mul", self, other)

    def __truediv__(self, other: Operand) -> Scalar:
        return apply("div", self, other)

    def __gt__(self, other: Operand) -> Scalar:
        return apply("gt", self, other)

    def __lt__(self, other: Operand) -> Scalar:
        return apply("lt", self, other)

    def __and__(self, other: Scalar) -> Scalar:
        return apply("and", self, other)

    def __or__(self, other: Scalar) -> Scalar:
        return apply("or", self, other)


Operand = Scalar | float | int


def apply(op: str, *operands: Operand) -> Scalar:
    """An op on scalars and numbers, at least one of them a scalar."""
    builder = next(o.builder for o in operands if isinstance(o, Scalar))
    return Scalar(builder, builder.op(op, *(_node(builder, o) for o in operands)))


def _node(builder: EpilogueBuilder, operand: Operand) -> int:
    if isinstance(operand, Scalar):
        return operand.node
    return builder.const(operand) if isinstance(operand, float) else builder.integer(operand)


def eq(a: Operand, b: Operand) -> Scalar:
    """a == b, as a mask."""
    return apply("eq", a, b)


def ne(a: Operand, b: Operand) -> Scalar:
    """a != b, as a mask."""
    return apply("ne", a, b)


def where(mask: Scalar, a: Operand, b: Operand) -> Scalar:
    """a where the mask holds, b elsewhere."""
    return apply("where", mask, a, b)


def exp(x: Scalar) -> Scalar:
    """e to the x."""
    return apply("exp", x)


def function(params: Named, body: Callable[..., Sequence[Scalar]]) -> Function:
    """The function that a Python function of scalars computes."""
    builder = EpilogueBuilder("function", ("M", "N"))
    scalars = [Scalar(builder, builder.param(name, ValueType(Kind.SCALAR, None, dtype))) for name, dtype in params]
    return function_of(builder, params, [result.node for result in body(*scalars)])


def define(
    name: str,
    inputs: Named,
    carried: Sequence[tuple[str, Dtype, float | int]],
    results: Named,
    *,
    update: Callable[..., Sequence[Scalar]],
    merge: Callable[..., Sequence[Scalar]],
    finalize: Callable[..., Sequence[Scalar]],
    vjp: Callable[..., Sequence[Scalar]] | None = None,
) -> StateDef:
    """A state from Python functions of scalars.  `carried` is (name, dtype, initial value)."""
    carries = tuple((c, dtype) for c, dtype, _ in carried)
    parts = tuple((f"{side}_{c}", dtype) for side in "ab" for c, dtype in carries)
    cotangents = tuple((f"d_{r}", dtype) for r, dtype in results if dtype is Dtype.F32)
    return StateDef(
        name,
        inputs,
        carries,
        tuple(initial for _, _, initial in carried),
        function(carries + inputs, update),
        function(parts, merge),
        function(carries, finalize),
        results,
        None if vjp is None else function(inputs + results + cotangents, vjp),
    )


# ---- online_logsumexp ------------------------------------------------------------------------------------------------


def _lse_update(m: Scalar, s: Scalar, x: Scalar) -> tuple[Scalar, Scalar]:
    # Of the two exponentials that rescale and add, one is always exp(0).  An infinite maximum cannot be subtracted.
    # Only selections and one difference, no max and abs, whose derivatives at a tie would not be those of the sum.
    bigger = x > m
    top = where(bigger, x, m)
    shift = where(eq(apply("abs", top), math.inf), 0.0, top)
    ratio = exp(where(bigger, m, x) - shift)
    return top, where(bigger, s * ratio + 1.0, s + ratio)


def _lse_merge(a_m: Scalar, a_s: Scalar, b_m: Scalar, b_s: Scalar) -> tuple[Scalar, Scalar]:
    bigger = b_m > a_m
    top = where(bigger, b_m, a_m)
    shift = where(eq(apply("abs", top), math.inf), 0.0, top)
    ratio = exp(where(bigger, a_m, b_m) - shift)
    return top, where(bigger, a_s * ratio + b_s, a_s + b_s * ratio)


ONLINE_LOGSUMEXP = define(
    "online_logsumexp",
    (("x", Dtype.F32),),
    (("m", Dtype.F32, -math.inf), ("s", Dtype.F32, 0.0)),
    (("lse", Dtype.F32),),
    update=_lse_update,
    merge=_lse_merge,
    finalize=lambda m, s: (m + apply("log", s),),
    vjp=lambda x, lse, d_lse: (d_lse * exp(x - lse),),
)


# ---- extrema ---------------------------------------------------------------------------------------------------------


def _precedes(x: Scalar, top: Scalar, earlier: Scalar) -> Scalar:
    """Does x replace top?  It is larger, or it is NaN and top is not, or they tie and x stands earlier."""
    ties = eq(x, top) | (ne(x, x) & ne(top, top))
    return (x > top) | (ne(x, x) & eq(top, top)) | (ties & earlier)


def _argmax_step(top: Scalar, at: Scalar, x: Scalar, i: Scalar) -> tuple[Scalar, Scalar]:
    better = _precedes(x, top, i < at)
    return where(better, x, top), where(better, i, at)


def _argmin_step(low: Scalar, at: Scalar, x: Scalar, i: Scalar) -> tuple[Scalar, Scalar]:
    ties = eq(x, low) | (ne(x, x) & ne(low, low))
    better = (x < low) | (ne(x, x) & eq(low, low)) | (ties & (i < at))
    return where(better, x, low), where(better, i, at)


def _argmax2_step(
    top: Scalar, at: Scalar, beside: Scalar, x: Scalar, i: Scalar, j: Scalar
) -> tuple[Scalar, Scalar, Scalar]:
    better = _precedes(x, top, (i < at) | (eq(i, at) & (j < beside)))
    return where(better, x, top), where(better, i, at), where(better, j, beside)


ONLINE_MAX, ONLINE_MIN = (
    define(
        f"online_{optimum}",
        (("x", Dtype.F32),),
        ((carried, Dtype.F32, initial),),
        (("value", Dtype.F32),),
        update=lambda carried, x, optimum=optimum: (apply(optimum, carried, x),),
        merge=lambda a, b, optimum=optimum: (apply(optimum, a, b),),
        finalize=lambda carried: (carried,),
    )
    for optimum, carried, initial in (("max", "top", -math.inf), ("min", "low", math.inf))
)

ARGMAX = define(
    "argmax",
    (("x", Dtype.F32), ("i", Dtype.I32)),
    (("top", Dtype.F32, -math.inf), ("at", Dtype.I32, NO_INDEX)),
    (("value", Dtype.F32), ("index", Dtype.I32)),
    update=_argmax_step,
    merge=_argmax_step,
    finalize=lambda top, at: (top, at),
    vjp=lambda x, i, value, index, d_value: (where(eq(i, index), d_value, 0.0),),
)

ARGMIN = define(
    "argmin",
    (("x", Dtype.F32), ("i", Dtype.I32)),
    (("low", Dtype.F32, math.inf), ("at", Dtype.I32, NO_INDEX)),
    (("value", Dtype.F32), ("index", Dtype.I32)),
    update=_argmin_step,
    merge=_argmin_step,
    finalize=lambda low, at: (low, at),
    vjp=lambda x, i, value, index, d_value: (where(eq(i, index), d_value, 0.0),),
)

ARGMAX2 = define(
    "argmax2",
    (("x", Dtype.F32), ("i", Dtype.I32), ("j", Dtype.I32)),
    (("top", Dtype.F32, -math.inf), ("at", Dtype.I32, NO_INDEX), ("beside", Dtype.I32, NO_INDEX)),
    (("value", Dtype.F32), ("row", Dtype.I32), ("column", Dtype.I32)),
    update=_argmax2_step,
    merge=_argmax2_step,
    finalize=lambda top, at, beside: (top, at, beside),
    vjp=lambda x, i, j, value, row, column, d_value: (where(eq(i, row) & eq(j, column), d_value, 0.0),),
)


# ---- welford ---------------------------------------------------------------------------------------------------------


def _welford_update(n: Scalar, mean: Scalar, m2: Scalar, x: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    count = n + 1.0
    delta = x - mean
    moved = mean + delta / count
    return count, moved, m2 + delta * (x - moved)


def _welford_merge(
    a_n: Scalar, a_mean: Scalar, a_m2: Scalar, b_n: Scalar, b_mean: Scalar, b_m2: Scalar
) -> tuple[Scalar, Scalar, Scalar]:
    count = a_n + b_n
    share = b_n / apply("max", count, 1.0)  # of two empty parts: 0
    delta = b_mean - a_mean
    return count, a_mean + delta * share, a_m2 + b_m2 + delta * delta * a_n * share


WELFORD = define(
    "welford",
    (("x", Dtype.F32),),
    (("n", Dtype.F32, 0.0), ("mean", Dtype.F32, 0.0), ("m2", Dtype.F32, 0.0)),
    (("mean", Dtype.F32), ("var", Dtype.F32), ("count", Dtype.F32)),
    update=_welford_update,
    merge=_welford_merge,
    finalize=lambda n, mean, m2: (mean, m2 / n, n),
    vjp=lambda x, mean, var, count, d_mean, d_var, d_count: ((d_mean + d_var * ((x - mean) * 2.0)) / count,),
)

BUILTIN_STATES: dict[str, StateDef] = {
    d.name: d for d in (ONLINE_LOGSUMEXP, ONLINE_MAX, ONLINE_MIN, ARGMAX, ARGMIN, ARGMAX2, WELFORD)
}


# ---- of a block of elements at once ----------------------------------------------------------------------------------

_LOG2_E = math.log2(math.e)


def blockwise(
    definition: StateDef,
    *passes: tuple[str, Dtype, str, Callable[..., Scalar]],
    carried: Callable[..., Sequence[Scalar]],
) -> tuple[StateDef, Blockwise]:
    """A state and its passes from Python functions of scalars, each (name, dtype, how, value)."""
    made, results = [], Named(())
    for name, dtype, how, value in passes:
        of_element = function(definition.inputs + results, lambda *scalars, value=value: (value(*scalars),))
        made.append(Pass(name, dtype, how, of_element))
        results += ((name, dtype),)
    return definition, Blockwise(tuple(made), function(results, carried))


def _scaled(top: Scalar) -> Scalar:
    """What is subtracted of x * log2(e), once for the block: one fused step is left for each element."""
    return where(eq(apply("abs", top), math.inf), 0.0, top) * _LOG2_E


def _at(x: Scalar, top: Scalar) -> Scalar:
    """Is x the extremum?  Where that is NaN, every NaN is."""
    return eq(x, top) | ne(x, x)


def _squared(x: Scalar) -> Scalar:
    return x * x


def _mean(n: Scalar, total: Scalar) -> Scalar:
    return total / apply("max", n, 1.0)


BLOCKWISE: dict[StateDef, Blockwise] = dict(
    (
        blockwise(
            ONLINE_LOGSUMEXP,
            ("top", Dtype.F32, "max", lambda x: x),
            ("total", Dtype.F32, "sum", lambda x, top: apply("exp2", x * _LOG2_E - _scaled(top))),
            carried=lambda top, total: (top, total),
        ),
        blockwise(ONLINE_MAX, ("top", Dtype.F32, "max", lambda x: x), carried=lambda top: (top,)),
        blockwise(ONLINE_MIN, ("low", Dtype.F32, "min", lambda x: x), carried=lambda low: (low,)),
        *(
            blockwise(
                definition,
                ("top", Dtype.F32, how, lambda x, i: x),
                ("at", Dtype.I32, "min", lambda x, i, top: where(_at(x, top), i, NO_INDEX)),
                carried=lambda top, at: (top, at),
            )
            for definition, how in ((ARGMAX, "max"), (ARGMIN, "min"))
        ),
        blockwise(
            ARGMAX2,
            ("top", Dtype.F32, "max", lambda x, i, j: x),
            ("at", Dtype.I32, "min", lambda x, i, j, top: where(_at(x, top), i, NO_INDEX)),
            ("beside", Dtype.I32, "min", lambda x, i, j, top, at: where(_at(x, top) & eq(i, at), j, NO_INDEX)),
            carried=lambda top, at, beside: (top, at, beside),
        ),
        blockwise(
            WELFORD,
            ("n", Dtype.F32, "sum", lambda x: Scalar(x.builder, x.builder.const(1.0))),
            ("total", Dtype.F32, "sum", lambda x, n: x),
            ("m2", Dtype.F32, "sum", lambda x, n, total: _squared(x - _mean(n, total))),
            carried=lambda n, total, m2: (n, _mean(n, total), m2),
        ),
    )
)
