"""What the derivation of a program gives: the forward as it must run, the backward, and how the two connect."""

from __future__ import annotations

import attrs

from codalang.autodiff.derivative import Decision, Load
from codalang.ir.program import Program


@attrs.frozen
class ProgramDerivative:
    """A program and its backward.

    Attributes:
        forward: the program; what is saved are further results of it.
        backward: the derived program.  Its parameters are the cotangents of results, what was kept of the forward by
            its name there, and parameters of the program by their names.
        saved: the further results of `forward`.
        gradients: parameter -> the result of `backward` that is its gradient, or None where that is zero; for the
            parameters asked for, in their order.  Several may share one.  A gradient made by a statement is the view of
            the parameter (see `TensorType`), which `program_reference.unview` undoes; one that is a parameter of the
            backward, the cotangent of some result, has the shape of that.
        cotangents: result of the program -> the backward's parameter that takes its cotangent, where the backward uses
            it.
        loads: each parameter of the backward, in order -> what it is given; `source` is "cotangent" (of a result),
            "output" (a result), "saved" or "param".
        plan: the name of an epilogue's result -> how the backward of that application gets the forward values it needs.
    """

    forward: Program
    backward: Program
    saved: tuple[str, ...]
    gradients: dict[str, str | None]
    cotangents: dict[str, str]
    loads: dict[str, Load]
    plan: dict[str, tuple[Decision, ...]]
