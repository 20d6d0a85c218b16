"""How accurate the transcendental functions of kernels are: fast, and in a `precise epilogue`.

A bound is for f32 arguments and results: the error is at most

    ulp * 2^-23 * |result|  +  absolute

where `ulp` may grow with the argument.  Results below the least normal number, 2^-126, may be flushed to zero.  The
tests hold kernels, and on the CPU an emulation of what they do, against these bounds.

| fast                                                        | precise                                                |
|-------------------------------------------------------------|--------------------------------------------------------|
| the hardware's approximations: ex2, lg2, rsqrt, rcp, sin    | the device library's functions, divisions rounded to   |
|                                                             | nearest; sin and cos by a reduction of fused steps     |
"""

from __future__ import annotations

import math

import attrs


@attrs.frozen
class Bound:
    """An error bound; see the module's docstring.

    Attributes:
        ulp: units in the last place of the result.
        absolute: beside them.
        growth: further ulp for each unit of `per`.
        per: "x", the magnitude of the argument, or "power", that of the result's logarithm to base 2; "" for none.
    """

    ulp: float
    absolute: float = 0.0
    growth: float = 0.0
    per: str = ""

    def __str__(self) -> str:
        names = {"x": "abs(x)", "power": "abs(log2(result))", "": ""}
        parts = [f"{self.ulp:g} ulp"] if self.ulp and not self.growth else []
        parts += [f"{self.ulp:g} + {self.growth:g} {names[self.per]} ulp"] if self.growth else []
        return " + ".join([*parts, *([f"2^{math.log2(self.absolute):g}"] if self.absolute else [])])


@attrs.frozen
class Accuracy:
    """The two bounds of an op, and the arguments that they are for."""

    fast: Bound
    precise: Bound
    arguments: tuple[float, float]


# Beyond 2^17 radians sin and cos lose a bit for each doubling.
TURNS = 2.0**17
LEAST, MOST = 2.0**-120, 2.0**120
SINE = 2.0**-20.5  # of the hardware's sine and cosine, absolute

ACCURACY: dict[str, Accuracy] = {
    "div": Accuracy(Bound(2), Bound(0.5), (LEAST, 2.0**60)),
    "exp": Accuracy(Bound(2, growth=1.4, per="x"), Bound(2), (-87.0, 88.0)),
    "exp2": Accuracy(Bound(2), Bound(2), (-126.0, 127.0)),
    "log": Accuracy(Bound(3, 2.0**-22), Bound(2), (LEAST, MOST)),
    "log2": Accuracy(Bound(2, 2.0**-22), Bound(2), (LEAST, MOST)),
    "sqrt": Accuracy(Bound(2), Bound(0.5), (LEAST, MOST)),
    "rsqrt": Accuracy(Bound(2), Bound(1.5), (LEAST, MOST)),
    "tanh": Accuracy(Bound(12), Bound(2), (-20.0, 20.0)),
    "sigmoid": Accuracy(Bound(4, growth=1.4, per="x"), Bound(4), (-87.0, 87.0)),
    "erf": Accuracy(Bound(2), Bound(2), (-6.0, 6.0)),
    "sin": Accuracy(Bound(0, SINE), Bound(2, 2.0**-40), (-TURNS, TURNS)),
    "cos": Accuracy(Bound(0, SINE), Bound(2, 2.0**-40), (-TURNS, TURNS)),
    "pow": Accuracy(Bound(16, growth=2, per="power"), Bound(4, growth=0.4, per="power"), (2.0**-30, 2.0**30)),
}
