"""The state of a walk over a program: what has arrived at the cotangent of each value of the forward.

A value of the backward arrives at a cotangent (`arrive`), or a matmul that makes part of it and is pending (`await_`).

The gradient of a parameter accumulates: a matmul that adds to it is emitted at once, or memory would be held by what
it reads.  It waits where the parameter is yet to be met as a tile, whose cotangent the matmul can add, and where an
operand is to be made again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from codalang.autodiff.program_emit import Cotangent, Emission, Form
from codalang.autodiff.program_keep import Kept
from codalang.autodiff.program_replay import replayed
from codalang.errors import CodaUnsupportedError, Loc
from codalang.ir.dims import ONE
from codalang.ir.program import Matmul, Product, Program, Statement, Vector


class Flow:
    """What has arrived where, what is emitted, and what is kept.

    Attributes:
        types: of the values of the forward.
        active: the values whose cotangent is wanted.
        cotangents: what has arrived at each of them.
        cotangent_of: result of the program -> the value that is its cotangent.
        waiting: value that is to be made again -> the matmuls that wait for it, and whose gradient each is part of.
        uses: how often each parameter is yet to be met as something else than an operand of a matmul.
    """

    def __init__(self, program: Program, active: set[str], present: Sequence[str]) -> None:
        self.types = replayed(program).types
        self.emission = Emission()
        self.kept = Kept(program, self.types)
        self.active = active
        self.cotangents: dict[str, Cotangent] = {}
        self.cotangent_of: dict[str, str] = {}
        for name in present:
            if name in self.active:
                value = self.emission.value(f"d_{name}", Form.of(self.types[name]))
                self.cotangent_of[name] = value
                self.arrive(name, value)
        self.waiting: dict[str, list[tuple[str, Matmul]]] = {}
        self.params = {p.name for p in program.params}
        self.uses = Counter(name for s in program.statements for name in _loads(s) if name in self.params)

    def done(self, statement: Statement) -> None:
        """What waited for a statement waits no more."""
        for name in statement.makes:
            self.cotangents.pop(name, None)
            self.release(name)
        for name in _loads(statement):
            if name in self.params:
                self.uses[name] -= 1
                if not self.uses[name]:
                    self._accumulate(name)

    def finish(self) -> None:
        """All statements are done: nothing is made again any more."""
        for name in list(self.waiting):
            self.release(name)

    def through_matmul(self, matmul: Matmul, d: str) -> None:
        """The cotangent of a matmul's result goes to its operands."""
        a, b, a_t, b_t = matmul.a, matmul.b, matmul.a_transposed, matmul.b_transposed
        self.await_(b, Matmul(d, a, True, a_t) if b_t else Matmul(a, d, not a_t, False))
        self.await_(a, Matmul(b, d, b_t, True) if a_t else Matmul(d, b, False, not b_t))

    def arrive(self, value: str, name: str, times: int = 1) -> None:
        """A value of the backward arrives at the cotangent of a value of the forward."""
        if value in self.active:
            self.cotangents.setdefault(value, Cotangent()).add(name, times)

    def await_(self, value: str, matmul: Matmul) -> None:
        """A matmul that makes part of a cotangent arrives."""
        if value not in self.active:
            return
        late = [operand for operand in (matmul.a, matmul.b) if self.kept.comes_again(operand)]
        if value in self.params and late:
            self.waiting.setdefault(late[0], []).append((value, matmul))
            return
        self.cotangents.setdefault(value, Cotangent()).pending.append(matmul)
        if value in self.params and not self.uses[value]:
            self._accumulate(value)

    def release(self, name: str) -> None:
        """The matmuls that waited for a value: it was recomputed, or else it must be kept."""
        self.kept.settle(name)
        for value, matmul in self.waiting.pop(name, ()):
            self.await_(value, matmul)

    def resolve(self, arrived: Cotangent) -> None:
        """Have what pending matmuls read."""
        arrived.pending = [self.resolved(matmul) for matmul in arrived.pending]

    def resolved(self, matmul: Matmul) -> Matmul:
        return attrs.evolve(matmul, a=self.kept.read(matmul.a), b=self.kept.read(matmul.b))

    def _accumulate(self, value: str) -> None:
        """Emit what is pending for the gradient of a parameter."""
        arrived = self.cotangents.get(value)
        if arrived is None or not arrived.pending or self._has_vectors(arrived):
            return
        shape = self.types[value].matrix
        assert shape is not None  # it was an operand of a matmul
        self.resolve(arrived)
        self.emission.accumulated(arrived, len(arrived.pending), shape, f"d_{value}")

    def _has_vectors(self, arrived: Cotangent) -> bool:
        return any(self.emission.forms[name] is Form.VECTOR for name in arrived.loaded)

    def gradient(self, name: str) -> str | None:
        """What arrived at a parameter, as one value."""
        arrived, type_ = self.cotangents.get(name), self.types[name]
        if arrived is None or not (arrived.loaded or arrived.pending):
            return None
        emission, wanted, form = self.emission, f"d_{name}", Form.of(type_)
        self.resolve(arrived)
        shape = type_.matrix or (ONE, type_.vector)
        if form is Form.MATRIX and (arrived.pending or not self._has_vectors(arrived)):
            vectors = {n: t for n, t in arrived.loaded.items() if emission.forms[n] is Form.VECTOR}
            arrived.loaded = {n: t for n, t in arrived.loaded.items() if n not in vectors}
            total = emission.matrix(arrived, shape, wanted)
            if not vectors:
                return total
            arrived = Cotangent({total: 1} | vectors)
        if form is Form.MATRIX and arrived.single is not None:
            return arrived.single
        total = emission.vector_sum(arrived, type_.vector, wanted)
        if emission.forms[total] is Form.NUMBER and form is not Form.NUMBER:
            return emission.spread(total, type_.vector, wanted)
        return total

    def refuse_vectors(self, value: str, arrived: Cotangent, loc: Loc | None) -> None:
        if self._has_vectors(arrived):
            raise CodaUnsupportedError(
                f"`{value}` is used as a matrix and as a vector: its gradient is neither",
                loc,
                hint="use an epilogue for the work on its elements",
            )


def _loads(statement: Statement) -> list[str]:
    """The values that a statement reads otherwise than as operands of a matmul."""
    if isinstance(statement, Product):
        return []
    if isinstance(statement, Vector):
        return list(statement.reads)
    return list(statement.reads[2 if isinstance(statement.host, Matmul) else 0 :])
