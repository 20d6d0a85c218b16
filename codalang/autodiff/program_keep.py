"""What the backward reads of the forward, and the forward that keeps it.

A value of the forward that is no parameter and no result is kept where the backward reads it; what an epilogue must
store besides becomes a further result of its application.  An output that its author asks to `recompute`, and that the
backward only needs as an operand of a parameter's gradient, is not kept: the derived epilogue stores it again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs

from codalang.autodiff.derivative import Derivative, Load, Surroundings
from codalang.autodiff.save import RECOMPUTE
from codalang.ir.epilogue import Store
from codalang.ir.names import Namer
from codalang.ir.program import Apply, Program, Statement, TensorType, Vector
from codalang.ir.types import Dtype


class Kept:
    """The forward in the making.

    Attributes:
        statements: its statements, with what is saved as further results.
        again: value of the forward -> value of the backward that is made again.
        needed: the values of the forward that the backward reads.
        storage: value of the forward -> its annotated storage dtype.
    """

    def __init__(self, program: Program, types: Mapping[str, TensorType]) -> None:
        self.statements: list[Statement] = list(program.statements)
        self.again: dict[str, str] = {}
        self.needed: dict[str, None] = {}
        self.types = types
        self._free = {p.name for p in program.params} | set(program.results)
        self._namer = Namer({*types, *program.dims})
        self._late = {
            result
            for statement in program.statements
            if isinstance(statement, Apply)
            for result in _recomputed(statement)
            if result not in self._free
        }
        self._nonzero = {s.result for s in program.statements if isinstance(s, Vector) and _is_nonzero(s)}
        self.storage: dict[str, str | None] = {p.name: p.dtype for p in program.params}
        for statement in program.statements:
            self._note(statement)

    def _note(self, statement: Statement) -> None:
        if isinstance(statement, Apply):
            for name, output in zip(statement.results, statement.epilogue.outputs, strict=True):
                if name is not None:
                    self.storage[name] = output.dtype or ("i32" if output.type.dtype is Dtype.I32 else None)

    def read(self, name: str) -> str:
        """Have a value of the forward in the backward.  Returns its name there."""
        if name in self.again:
            return self.again[name]
        if name in self.types or name in self.storage:
            self.needed[name] = None
        return name

    def comes_again(self, name: str) -> bool:
        """Will the backward make it again?"""
        return name in self._late and name not in self.needed

    def settle(self, name: str) -> None:
        """The backward has passed the statement that makes it: what was not made again is to be kept."""
        self._late.discard(name)

    def surroundings(self, index: int, again: Collection[str]) -> Surroundings:
        """What the program does with the values of an application; `again` are those that the backward waits for."""
        statement = self.statements[index]
        assert isinstance(statement, Apply)
        inputs = list(statement.inputs)
        if isinstance(statement.host, str):
            inputs.append((statement.epilogue.params[0].name, statement.host))
        dear = [Load("param", p) for p, value in inputs if isinstance(value, str) and self._is_dear(value)]
        outputs = list(zip(statement.epilogue.outputs, statement.results, strict=True))
        dear += [Load("output", o.name) for o, result in outputs if result is not None and self._is_dear(result)]
        unstored = [Load("output", o.name) for o, result in outputs if result is None]
        wanted = [o.name for o, result in outputs if result in again and self.comes_again(str(result))]
        nonzero = [p for p, value in inputs if value in self._nonzero]
        return Surroundings(frozenset(dear), frozenset(unstored), tuple(wanted), frozenset(nonzero))

    def _is_dear(self, value: str) -> bool:
        return value not in self._free and value not in self.needed and value not in self.again

    def saving(self, index: int, derivative: Derivative) -> dict[str, str]:
        """Have an application store what its backward reads.  Returns the value that each output is."""
        statement = self.statements[index]
        assert isinstance(statement, Apply)
        epilogue = derivative.forward
        needed = {load.name for load in derivative.loads.values() if load.source in ("output", "saved")}
        results = list(statement.results) + [None] * (len(epilogue.outputs) - len(statement.results))
        first = next(r for r in results if r is not None)
        for position, output in enumerate(epilogue.outputs):
            if results[position] is None and output.name in needed:
                results[position] = self._namer.fresh(f"{output.name}_{first}")
        self.statements[index] = attrs.evolve(statement, epilogue=epilogue, results=tuple(results))
        self._note(self.statements[index])
        return {o.name: r for o, r in zip(epilogue.outputs, results, strict=True) if r is not None}


def _recomputed(statement: Apply) -> list[str]:
    """The tiles whose author asks to recompute them."""
    epilogue = statement.epilogue
    nodes = {keep.value for keep in epilogue.keeps if keep.how == RECOMPUTE}
    return [
        result
        for output, result in zip(epilogue.outputs, statement.results, strict=True)
        if isinstance(output, Store) and output.value in nodes and result is not None
    ]


def _is_nonzero(statement: Vector) -> bool:
    """Is a vector not zero, whatever it is computed from?  1/sqrt(x) is not, for a finite x."""
    expression = statement.expression
    (output,) = expression.outputs
    return isinstance(output, Store) and expression.nodes[output.value].op == "rsqrt"
