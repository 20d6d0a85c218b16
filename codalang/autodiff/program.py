"""The derivative of a program, which is again a program: reverse mode over the statements, with reverse fusion.

Statements are walked backwards; at each, everything that will ever arrive at the cotangents of its results has arrived.
What it gives back:

| statement                  | its operands get                                                       |
|----------------------------|------------------------------------------------------------------------|
| y = epilogue(A @ B.T, ...) | the results of the derived epilogue (`program_apply`); then, of d_acc, |
|                            | pending matmuls: dA = d_acc @ B, dB = d_acc.T @ A                      |
| y = epilogue(x, ...)       | the results of the derived epilogue                                    |
| c = A @ B.T                | pending matmuls                                                        |
| v = expression             | auxiliary steps (`program_vectors`)                                    |

A pending matmul is emitted when its sum is needed, as the host of the derived epilogue that needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from codalang.autodiff.derivative import Decision, Derivative, Surroundings
from codalang.autodiff.epilogue import derive
from codalang.autodiff.names import chosen
from codalang.autodiff.program_activity import active_values, given
from codalang.autodiff.program_apply import Application
from codalang.autodiff.program_assemble import assemble
from codalang.autodiff.program_derivative import ProgramDerivative
from codalang.autodiff.program_emit import Cotangent
from codalang.autodiff.program_flow import Flow
from codalang.autodiff.program_fuse import passed_through, renamed
from codalang.autodiff.program_vectors import gradient_expressions, with_extremes_applied
from codalang.autodiff.save import RECOMPUTE
from codalang.errors import CodaUnsupportedError
from codalang.ir.dims import ONE
from codalang.ir.epilogue import Epilogue
from codalang.ir.program import Apply, Matmul, Product, Program, Vector
from codalang.ir.types import SCALAR, Dtype, Kind, row


def derive_program(
    program: Program,
    *,
    wrt: Collection[str] | None = None,
    cotangents: Collection[str] | None = None,
    delay_scales: bool = False,
) -> ProgramDerivative:
    """Derive a program's backward.

    Args:
        program: the forward.
        wrt: parameters whose gradient is wanted (default: all); nothing else is computed.
        cotangents: results whose cotangent is present (default: all); others are zero.
        delay_scales: scale the rows of a cotangent behind the matmuls that read it, not before they do: for f16, whose
            range it would leave.  See `program_delay`.

    Raises:
        CodaCallError: `wrt` or `cotangents` has a name that the program has not.
        CodaUnsupportedError: something has no derivative, or the derivative is no program.
    """
    wanted = chosen(program.name, "wrt", wrt, [p.name for p in program.params])
    present = chosen(program.name, "cotangents", cotangents, list(program.results))
    walk = _Walk(program, wanted, present)
    gradients = walk.run()
    flow = walk.flow
    return assemble(
        program, walk.program, flow.kept, flow.emission, flow.cotangent_of, gradients, walk.plan, delay_scales
    )


class _Walk:
    """The walk over the statements, from the last to the first."""

    def __init__(self, program: Program, wanted: Sequence[str], present: Sequence[str]) -> None:
        floats = [p.name for p in program.params if p.name in wanted and p.type.dtype is Dtype.F32]
        active = active_values(program, floats)
        self.program = with_extremes_applied(program, active)
        self.wanted = list(wanted)
        self.flow = Flow(self.program, active, present)
        self.plan: dict[str, tuple[Decision, ...]] = {}
        self._derivatives: dict[object, Derivative] = {}

    def run(self) -> dict[str, str | None]:
        """Walk all statements.  Returns the gradient of each wanted parameter."""
        for index in reversed(range(len(self.program.statements))):
            statement = self.program.statements[index]
            if isinstance(statement, Vector):
                self._vector(statement)
            elif isinstance(statement, Product):
                self._product(statement)
            else:
                self._apply(index, statement)
            self.flow.done(statement)
        self.flow.finish()
        return {name: self.flow.gradient(name) for name in self.wanted}

    def _product(self, statement: Product) -> None:
        arrived = self.flow.cotangents.get(statement.result)
        if arrived is None:
            return
        shape = self.flow.types[statement.result].matrix
        assert shape is not None
        self.flow.resolve(arrived)
        self.flow.refuse_vectors(statement.result, arrived, statement.loc)
        self.flow.through_matmul(statement.matmul, self.flow.emission.matrix(arrived, shape, f"d_{statement.result}"))

    def _vector(self, statement: Vector) -> None:
        arrived = self.flow.cotangents.get(statement.result)
        wanted = [p.name for p in statement.expression.params if p.name in self.flow.active]
        if arrived is None or not wanted:
            return
        (output,) = statement.expression.outputs
        derivative = self._derive(statement.expression, tuple(wanted), (output.name,), False, Surroundings())
        if len(arrived.loaded) > 1 and len(derivative.backward.outputs) > 1:
            total = self.flow.emission.vector_sum(arrived, statement.length, f"d_{statement.result}")
            arrived = Cotangent({total: 1})
        like = row() if output.type.kind is Kind.ROW else SCALAR
        terms, _ = self.flow.emission.terms(arrived, list(arrived.loaded), like)
        cotangents = {p: terms for p, load in derivative.loads.items() if load.source == "cotangent"}
        names = {
            p: self.flow.kept.read(statement.result if load.source == "output" else load.name)
            for p, load in derivative.loads.items()
            if load.source != "cotangent" and (load.source == "output" or load.name in self.flow.types)
        }
        made: dict[str, str] = {}
        for name, expression in gradient_expressions(derivative, cotangents, statement.length).items():
            through = passed_through(expression)
            if name in through and through[name] in arrived.loaded:
                made[name] = through[name]
                continue
            target = next(p for p in wanted if derivative.gradients[p] == name)
            # Only a parameter that holds numbers everywhere has a length.
            length = statement.length if any(p.type.kind is Kind.ROW for p in expression.params) else ONE
            made[name] = self.flow.emission.vector(renamed(expression, names), length, f"d_{target}")
        for param in wanted:
            if (gradient := derivative.gradients[param]) is not None:
                self.flow.arrive(param, made[gradient])

    def _apply(self, index: int, statement: Apply) -> None:
        epilogue, host = statement.epilogue, statement.host
        present = tuple(
            o.name
            for o, result in zip(epilogue.outputs, statement.results, strict=True)
            if result is not None and result in self.flow.cotangents
        )
        values = given(statement)
        wanted = tuple(
            p.name
            for p in epilogue.params
            if p.type.dtype is Dtype.F32 and not self.flow.active.isdisjoint(values[p.name])
        )
        if not present or not wanted:
            return
        is_matmul = isinstance(host, Matmul)
        around = self.flow.kept.surroundings(index, set(self.flow.waiting))
        derivative, rerun = self._derived(epilogue, wanted, present, is_matmul, around)
        Application(self.flow, index, statement, derivative, wanted, rerun).run()
        if derivative.plan:
            self.plan[next(r for r in statement.results if r is not None)] = derivative.plan

    def _derived(
        self,
        epilogue: Epilogue,
        wanted: tuple[str, ...],
        present: tuple[str, ...],
        is_matmul: bool,
        around: Surroundings,
    ) -> tuple[Derivative, bool]:
        """The derivative, and whether it is hosted on the forward's matmul, run again: where the accumulator is not to
        be kept, and something had to be saved in its place."""
        if not is_matmul:
            return self._derive(epilogue, wanted, present, True, around), False
        if not any(keep.how == RECOMPUTE for keep in epilogue.keeps):
            return self._derive(epilogue, wanted, present, False, around), False
        try:
            kept = self._derive(epilogue, wanted, present, False, around)
        except CodaUnsupportedError:
            return self._derive(epilogue, wanted, present, True, around), True
        if not _recomputes_accumulator(epilogue) or not _saves(kept):
            return kept, False
        again = self._derive(epilogue, wanted, present, True, around)
        return (kept, False) if _saves(again) else (again, True)

    def _derive(
        self, epilogue: Epilogue, wanted: tuple[str, ...], present: tuple[str, ...], hosted: bool, around: Surroundings
    ) -> Derivative:
        key = (epilogue, epilogue.keeps, wanted, present, hosted, around)
        if key not in self._derivatives:
            self._derivatives[key] = derive(epilogue, wrt=wanted, cotangents=present, hosted=hosted, around=around)
        return self._derivatives[key]


def _recomputes_accumulator(epilogue: Epilogue) -> bool:
    """Did the author ask that the accumulator is not kept?"""
    accumulator = epilogue.accumulator
    kept = [epilogue.nodes[keep.value] for keep in epilogue.keeps if keep.how == RECOMPUTE]
    return accumulator is not None and any(n.op == "param" and n.attr == accumulator.name for n in kept)


def _saves(derivative: Derivative) -> bool:
    """Does the forward store a tile for the backward only?"""
    return any(decision.store for decision in derivative.plan)
