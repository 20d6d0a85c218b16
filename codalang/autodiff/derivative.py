"""What a derivation gives: the forward as it must run, the backward, and how the two connect."""

from __future__ import annotations

from fractions import Fraction

import attrs

from codalang.ir.epilogue import Epilogue


@attrs.frozen
class Load:
    """What a parameter of a backward is loaded with.

    `source` is "cotangent" (that of the forward's output `name`), "param", "output" or "saved" (the forward's `name`).
    """

    source: str
    name: str


@attrs.frozen
class Surroundings:
    """What the program around an epilogue does with its values, for the choice of what to save.

    Attributes:
        dear: what would not be kept but for the backward of this epilogue.
        unstored: outputs that nobody reads, hence need not be stored.
        again: outputs that the backward is to store again: they are needed, and not kept.
        nonzero: parameters that are not zero.
        price: what keeping a byte that would not be kept otherwise costs, in bytes moved.
    """

    dear: frozenset[Load] = frozenset()
    unstored: frozenset[Load] = frozenset()
    again: tuple[str, ...] = ()
    nonzero: frozenset[str] = frozenset()
    price: int = 0


ALONE = Surroundings()


@attrs.frozen
class Decision:
    """One line of the plan: how the backward gets a forward value.

    `how` is "param", "output" or "saved" (it is loaded), "inverted" (computed from an output, which is loaded), or
    "recomputed".  `load` and `store` are the activation-sized traffic it costs, in units of two bytes per element of
    [M, N].
    """

    value: str
    how: str
    load: Fraction = Fraction(0)
    store: Fraction = Fraction(0)


@attrs.frozen
class Derivative:
    """A forward and its backward.

    Attributes:
        forward: the epilogue, with an extra store of each value that only the backward needs.
        backward: the derived epilogue.  Its first parameter is a tile cotangent where it uses one.
        saved: names of the extra stores of `forward`.
        gradients: parameter -> the backward's output that is its gradient, or None where that is zero; for the
            parameters asked for, in their order.  Equal gradients may share an output.
        cotangents: forward output -> the backward's parameter that takes its cotangent, where the backward uses it.
        loads: each parameter of the backward, in order -> what it is loaded with.
        plan: each activation-sized forward value that the backward needs, and how it gets it.
        again: forward output that is made again -> the backward's output that stores it.
    """

    forward: Epilogue
    backward: Epilogue
    saved: tuple[str, ...]
    gradients: dict[str, str | None]
    cotangents: dict[str, str]
    loads: dict[str, Load]
    plan: tuple[Decision, ...]
    again: dict[str, str] = attrs.field(factory=dict)
