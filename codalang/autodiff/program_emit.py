"""The backward in the making: statements, and what has arrived at each cotangent so far.

    Cotangent    what arrived at a value: values of the backward, and *pending* matmuls, not yet emitted
    Emission     the statements, in order; emits pending matmuls and sums

A pending matmul waits for the derived epilogue that it will host.  Where it cannot wait it is emitted as it is, or,
where something else arrived at the same cotangent, with an epilogue that adds that: a gradient accumulates.

Values of the backward have provisional names (`%3`), which no value of the forward has, until `program_assemble` gives
them theirs.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import reduce

import attrs

from codalang.autodiff.program_fuse import Term, is_float_tile
from codalang.ir.build import EpilogueBuilder
from codalang.ir.build_program import ExpressionBuilder
from codalang.ir.dims import ONE, Dim
from codalang.ir.epilogue import Epilogue
from codalang.ir.program import Apply, Matmul, Product, Statement, TensorType, Value, Vector
from codalang.ir.types import SCALAR, Kind, ValueType, row, tile


class Form(enum.Enum):
    """What a value of the backward is: a number stands for a vector or a matrix that has it everywhere."""

    MATRIX = "matrix"
    VECTOR = "vector"
    NUMBER = "number"

    @staticmethod
    def of(type_: TensorType) -> Form:
        """The form of a value of the forward."""
        if not type_.shape:
            return Form.NUMBER
        return Form.VECTOR if type_.matrix is None else Form.MATRIX


FORM_OF_KIND = {
    Kind.TILE: Form.MATRIX,
    Kind.ROWS: Form.MATRIX,
    Kind.ROW: Form.VECTOR,
    Kind.COL: Form.VECTOR,
    Kind.SCALAR: Form.NUMBER,
}


@attrs.define
class Cotangent:
    """What arrived at a value: names of values, with how often they are to be added, and pending matmuls."""

    loaded: dict[str, int] = attrs.field(factory=dict)
    pending: list[Matmul] = attrs.field(factory=list)

    def add(self, name: str, times: int = 1) -> None:
        """A value arrives."""
        self.loaded[name] = self.loaded.get(name, 0) + times

    @property
    def single(self) -> str | None:
        """The value that it is, where it needs no sum."""
        if len(self.loaded) == 1 and not self.pending:
            ((name, times),) = self.loaded.items()
            return name if times == 1 else None
        return None


class Emission:
    """Emits statements.  `wanted` is what each value is to be called, `forms` what it is."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self.wanted: dict[str, str] = {}
        self.forms: dict[str, Form] = {}

    def value(self, wanted: str, form: Form) -> str:
        """The provisional name of a new value."""
        name = f"%{len(self.wanted)}"
        self.wanted[name], self.forms[name] = wanted, form
        return name

    def product(self, matmul: Matmul, wanted: str) -> str:
        """Emit a matmul alone."""
        name = self.value(wanted, Form.MATRIX)
        self.statements.append(Product(name, matmul))
        return name

    def apply(
        self,
        epilogue: Epilogue,
        host: Matmul | str | None,
        inputs: dict[str, Value],
        extents: Sequence[Dim],
        wanted: Sequence[str],
    ) -> list[str]:
        """Emit an epilogue on a host.  `inputs` may have more than it takes."""
        names = [self.value(name, FORM_OF_KIND[o.type.kind]) for name, o in zip(wanted, epilogue.outputs, strict=True)]
        params = epilogue.params[host is not None :]
        given = tuple((p.name, inputs[p.name]) for p in params)
        known = tuple(extents[: 3 if epilogue.has_samples else 2])
        self.statements.append(Apply(tuple(names), epilogue, host, given, known))
        return names

    def vector(self, expression: Epilogue, length: Dim, wanted: str) -> str:
        """Emit an auxiliary step."""
        name = self.value(wanted, FORM_OF_KIND[expression.outputs[0].type.kind])
        self.statements.append(Vector(name, expression, length))
        return name

    # ---- sums -------------------------------------------------------------------------------------------------------

    def accumulated(self, arrived: Cotangent, count: int, shape: tuple[Dim, Dim], wanted: str) -> None:
        """Emit the first `count` pending matmuls: each adds what arrived before it."""
        for matmul in arrived.pending[:count]:
            if arrived.loaded:
                epilogue, inputs = self._sum("accumulate", "acc", arrived.loaded)
                (name,) = self.apply(epilogue, matmul, inputs, shape, [wanted])
            else:
                name = self.product(matmul, wanted)
            arrived.loaded = {name: 1}
        del arrived.pending[:count]

    def matrix(self, arrived: Cotangent, shape: tuple[Dim, Dim], wanted: str) -> str:
        """The sum of what arrived at a matrix, as one value."""
        self.accumulated(arrived, len(arrived.pending), shape, wanted)
        if (single := arrived.single) is not None and self.forms[single] is Form.MATRIX:
            return single
        epilogue, inputs = self._sum("add_tiles", None, arrived.loaded)
        host = None
        if epilogue.accumulator is not None:
            value = inputs.pop(epilogue.params[0].name)
            assert isinstance(value, str)
            host = value
        (name,) = self.apply(epilogue, host, inputs, shape, [wanted])
        return name

    def vector_sum(self, arrived: Cotangent, length: Dim, wanted: str) -> str:
        """The sum of what arrived at a vector or scalar, as one value; a number where it is that everywhere."""
        if (single := arrived.single) is not None and self.forms[single] is not Form.MATRIX:
            return single
        if any(self.forms[name] is Form.MATRIX for name in arrived.loaded):
            epilogue, inputs = self._rows(arrived.loaded)
            (name,) = self.apply(epilogue, None, inputs, (ONE, length), [wanted])
            return name
        builder = ExpressionBuilder()
        terms = []
        for name, times in arrived.loaded.items():
            value = builder.value(name, TensorType(() if self.forms[name] is Form.NUMBER else (length,)))
            terms.append(value if times == 1 else builder.op("mul", builder.const(float(times)), value))
        total = reduce(lambda a, b: builder.op("add", a, b), terms)
        return self.vector(builder.result("sum", total), length, wanted)

    def spread(self, number: str, length: Dim, wanted: str) -> str:
        """The vector that is this number everywhere."""
        builder = EpilogueBuilder("spread", ("M", "N"))
        builder.store("d", builder.param("number", SCALAR), row())
        (name,) = self.apply(builder.finish(), None, {"number": number}, (ONE, length), [wanted])
        return name

    def terms(self, arrived: Cotangent, names: Sequence[str], like: ValueType) -> tuple[list[Term], dict[str, Value]]:
        """What was loaded as terms of a sum with these names of parameters, and what those are given."""
        terms: list[Term] = []
        inputs: dict[str, Value] = {}
        for name, (value, times) in zip(names, arrived.loaded.items(), strict=True):
            terms.append(Term(name, SCALAR if self.forms[value] is Form.NUMBER else like, times))
            inputs[name] = value
        return terms, inputs

    def _sum(self, name: str, acc: str | None, loaded: dict[str, int]) -> tuple[Epilogue, dict[str, Value]]:
        """An epilogue that adds tiles and numbers, to an accumulator where it has one."""
        builder = EpilogueBuilder(name, ("M", "N"))
        terms = [] if acc is None else [builder.param(acc, tile())]
        inputs: dict[str, Value] = {}
        for index, (value, times) in enumerate(loaded.items()):
            param = "c" if index == 0 else f"c_{index + 1}"
            number = self.forms[value] is Form.NUMBER
            node = builder.param(param, SCALAR if number else tile())
            terms.append(node if times == 1 else builder.op("mul", builder.const(float(times)), node))
            inputs[param] = value
        builder.store("d", reduce(lambda a, b: builder.op("add", a, b), terms), tile())
        epilogue = builder.finish()
        first = next((p for p in epilogue.params if is_float_tile(p)), None)
        return attrs.evolve(epilogue, params=tuple(sorted(epilogue.params, key=lambda p: p is not first))), inputs

    def _rows(self, loaded: dict[str, int]) -> tuple[Epilogue, dict[str, Value]]:
        """An epilogue that adds rows and numbers: a matrix stands for the row of its elements."""
        builder = EpilogueBuilder("add_rows", ("M", "N"))
        terms: list[int] = []
        inputs: dict[str, Value] = {}
        for index, (value, times) in enumerate(loaded.items()):
            param = "c" if index == 0 else f"c_{index + 1}"
            node = builder.param(param, SCALAR if self.forms[value] is Form.NUMBER else row())
            terms.append(node if times == 1 else builder.op("mul", builder.const(float(times)), node))
            inputs[param] = value
        builder.store("d", reduce(lambda a, b: builder.op("add", a, b), terms), row())
        return builder.finish(), inputs
