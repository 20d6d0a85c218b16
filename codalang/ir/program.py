"""The IR of programs: a chain of matmuls with epilogues, and vector-sized work between them.

    Program   = name, params, statements, results
    Apply     = results = epilogue(host, inputs...)       host: a Matmul, the name of a plain tensor, or nothing
    Product   = result = op(a) @ op(b)                    a matmul without an epilogue
    Vector    = result = expression                       auxiliary: vectors of one length, scalars, extents
    Matmul    = op(a) @ op(b), op being `.T` or nothing

Values are tensors.  A value has one name and is made once (SSA): by a parameter or by one statement, and statements
stand after what they read.  An argument is the name of a value, a number, or an extent (`Dim`) used as a number.

A tensor has a declared `shape`; what a statement sees of it is a view (see `TensorType`):

    matrix   [rows, columns]: all axes but the last are flattened into rows
    vector   [length]: all axes are flattened

A literal axis of 2 before another axis is a *pair axis*: the two halves of a concatenation (gate and up, the halves
of a RoPE head).  In the view it stands behind the axis after it, so that pairs are adjacent: `[2, F, D]` is the
matrix [2*F, D] whose row 2*j + g is element [g, j], and `[2, F]` is the vector [2*F] of the same order.

Calls of other programs are inlined where they are written: the IR has none.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from codalang.errors import Loc
from codalang.ir.dims import ONE, TWO, Dim
from codalang.ir.epilogue import Epilogue
from codalang.ir.types import Dtype

Value = str | float | int | bool | Dim


@attrs.frozen
class TensorType:
    """The declared shape of a value, () for a scalar, and its register dtype."""

    shape: tuple[Dim, ...]
    dtype: Dtype = Dtype.F32

    @property
    def pair_axis(self) -> int | None:
        """The axis whose two halves are interleaved in the view, or None."""
        axes = [i for i, extent in enumerate(self.shape[:-1]) if extent == TWO]
        return axes[0] if axes else None

    @property
    def order(self) -> tuple[int, ...]:
        """The permutation of the axes that the view flattens: the pair axis stands behind the axis after it."""
        order, pair = list(range(len(self.shape))), self.pair_axis
        if pair is not None:
            order[pair], order[pair + 1] = order[pair + 1], order[pair]
        return tuple(order)

    @property
    def matrix(self) -> tuple[Dim, Dim] | None:
        """Rows and columns of the view as a matrix; None for what has fewer than two axes once pairs are joined."""
        extents = list(self.shape)
        if self.pair_axis is not None:
            extents[self.pair_axis : self.pair_axis + 2] = [TWO * self.shape[self.pair_axis + 1]]
        if len(extents) < 2:
            return None
        return _product(extents[:-1]), extents[-1]

    @property
    def vector(self) -> Dim:
        """The length of the view as a vector; 1 for a scalar."""
        return _product(list(self.shape))

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.shape))}]" if self.shape else "scalar"


def _product(extents: list[Dim]) -> Dim:
    product = ONE
    for extent in extents:
        product = product * extent
    return product


@attrs.frozen
class ProgramParam:
    """An input.  `dtype` is the annotated storage dtype, or None for that of the tensor passed at the call; a scalar
    may have a `default`."""

    name: str
    type: TensorType
    dtype: str | None = None
    default: float | None = attrs.field(default=None, eq=repr)  # compared as written: 0.0 is not -0.0
    loc: Loc | None = attrs.field(default=None, eq=False, repr=False)


@attrs.frozen
class Matmul:
    """op(a) @ op(b), of matrices: transposed where flagged."""

    a: str
    b: str
    a_transposed: bool = False
    b_transposed: bool = False

    def __str__(self) -> str:
        return f"{self.a}{'.T' * self.a_transposed} @ {self.b}{'.T' * self.b_transposed}"


@attrs.frozen
class Apply:
    """An epilogue on a host.

    Attributes:
        results: the name of each output of the epilogue, in its order; None where nobody wants it.
        epilogue: hosted on a Matmul, its first parameter is that accumulator; on a plain tensor (a name), its first
            parameter is that tensor; on nothing (None), all its parameters are `inputs`.
        inputs: (parameter, value) for every other parameter, in the epilogue's order.
        extents: (M, N), N in units of width 1, and (M, N, B) where the epilogue has one row per sample.
    """

    results: tuple[str | None, ...]
    epilogue: Epilogue
    host: Matmul | str | None
    inputs: tuple[tuple[str, Value], ...] = attrs.field(eq=repr)  # compared as written: 0.0 is not -0.0
    extents: tuple[Dim, ...]
    loc: Loc | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that it reads, in order."""
        host = (self.host.a, self.host.b) if isinstance(self.host, Matmul) else (self.host,) if self.host else ()
        return host + tuple(value for _, value in self.inputs if isinstance(value, str))

    @property
    def makes(self) -> tuple[str, ...]:
        """The values that it makes, in order."""
        return tuple(name for name in self.results if name is not None)


@attrs.frozen
class Product:
    """A matmul without an epilogue; the result is rounded to A's dtype."""

    result: str
    matmul: Matmul
    loc: Loc | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that it reads."""
        return (self.matmul.a, self.matmul.b)

    @property
    def makes(self) -> tuple[str, ...]:
        """The value that it makes."""
        return (self.result,)


@attrs.frozen
class Vector:
    """An auxiliary step: an elementwise expression of vectors and scalars, or the sum, max or min of one.

    Attributes:
        expression: an epilogue without an accumulator, on [1, length]: its parameters are rows of width 1 and scalars,
            each with the name of the value or extent that it is given, in the order in which the nodes have them; its
            one output, also called `result`, is a stored row or scalar, or a reduction of a row to a scalar.  Its ops
            are elementwise.  Names of dims are EXPRESSION_DIMS.
        length: of its vectors; 1 where all are scalars.
    """

    result: str
    expression: Epilogue
    length: Dim
    loc: Loc | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def reads(self) -> tuple[str, ...]:
        """The values, and the extents used as numbers, that it reads."""
        return tuple(param.name for param in self.expression.params)

    @property
    def makes(self) -> tuple[str, ...]:
        """The value that it makes."""
        return (self.result,)


EXPRESSION_DIMS = ("One", "Length")

Statement = Apply | Product | Vector


@attrs.frozen(cache_hash=True)
class Program:
    """A chain of statements.  `results` are names of values (parameters, too), each once, in the order returned."""

    name: str
    params: tuple[ProgramParam, ...]
    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    loc: Loc | None = attrs.field(default=None, eq=False, repr=False)

    def param(self, name: str) -> ProgramParam:
        """The parameter of that name.  Raises KeyError where there is none."""
        for param in self.params:
            if param.name == name:
                return param
        raise KeyError(name)

    @property
    def dims(self) -> tuple[str, ...]:
        """The dimension names of the parameters, in the order in which they first occur."""
        found: dict[str, None] = {}
        for param in self.params:
            for extent in param.type.shape:
                found.update(dict.fromkeys(name for monomial, _ in extent.terms for name in monomial))
        return tuple(found)

    def epilogues(self) -> Iterator[Epilogue]:
        """The epilogues that are applied, each once, in the order of their first use."""
        seen: dict[Epilogue, None] = {}
        for statement in self.statements:
            if isinstance(statement, Apply) and statement.epilogue not in seen:
                seen[statement.epilogue] = None
                yield statement.epilogue
