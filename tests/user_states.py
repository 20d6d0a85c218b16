"""Stateful transforms as a user would write them, for the tests of whatever folds or differentiates one."""

from __future__ import annotations

from codalang.ir.builtin_states import BUILTIN_STATES, Scalar, apply, define, where
from codalang.ir.states import StateDef
from codalang.ir.types import Dtype

F, N, B = Dtype.F32, Dtype.I32, Dtype.BOOL

# Inputs that stay away from zero: a norm has a kink there, and weights are positive.
POSITIVE_INPUTS = ("size", "weight")

# The 4-norm.  Its derivative is by the result.
NORM4 = define(
    "norm4",
    (("size", F),),
    (("s", F, 0.0),),
    (("norm", F),),
    update=lambda s, size: (s + size * size * size * size,),
    merge=lambda a_s, b_s: (a_s + b_s,),
    finalize=lambda s: (apply("sqrt", apply("sqrt", s)),),
    vjp=lambda size, norm, d_norm: (d_norm * (size * size * size) / (norm * norm * norm),),
)

# A mean with weights, both of which have a derivative.
WEIGHTED_MEAN = define(
    "weighted_mean",
    (("x", F), ("weight", F)),
    (("t", F, 0.0), ("n", F, 0.0)),
    (("mean", F), ("total", F)),
    update=lambda t, n, x, weight: (t + weight * x, n + weight),
    merge=lambda a_t, a_n, b_t, b_n: (a_t + b_t, a_n + b_n),
    finalize=lambda t, n: (t / n, n),
    vjp=lambda x, weight, mean, total, d_mean, d_total: (
        d_mean * weight / total,
        d_mean * (x - mean) / total + d_total,
    ),
)


def _count(keep: Scalar) -> Scalar:
    return where(keep, 1, 0)


# A sum of values times their indices where a mask holds, and how many those are.
SELECTED = define(
    "selected",
    (("x", F), ("i", N), ("keep", B)),
    (("s", F, 0.0), ("n", N, 0)),
    (("total", F), ("count", N)),
    update=lambda s, n, x, i, keep: (s + where(keep, x * apply("float", i), 0.0), n + _count(keep)),
    merge=lambda a_s, a_n, b_s, b_n: (a_s + b_s, a_n + b_n),
    finalize=lambda s, n: (s, n),
    vjp=lambda x, i, keep, total, count, d_total: (where(keep, d_total * apply("float", i), 0.0),),
)

USER_STATES: tuple[StateDef, ...] = (NORM4, WEIGHTED_MEAN, SELECTED)
ALL_STATES: dict[str, StateDef] = BUILTIN_STATES | {d.name: d for d in USER_STATES}
