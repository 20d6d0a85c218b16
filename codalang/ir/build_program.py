"""Building a program statement by statement: what the parser and the autodiff pass share.

    b = ProgramBuilder("mlp")
    x = b.param("x", (T, D))
    w = b.param("w", (F * 2, D))
    (y,) = b.apply(swiglu, Matmul("x", "w", b_transposed=True), {}, ("y",))
    program = b.finish((y,))

Shapes are inferred as statements are made, so an error points at the statement that causes it.  All names, of values
and of dimensions, are different from each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from codalang.errors import CodaNameError, CodaTypeError, Loc
from codalang.ir.build import EpilogueBuilder
from codalang.ir.dims import Dim
from codalang.ir.epilogue import Epilogue, Param
from codalang.ir.program import (
    EXPRESSION_DIMS,
    ONE,
    Apply,
    Matmul,
    Product,
    Program,
    ProgramParam,
    Statement,
    TensorType,
    Value,
    Vector,
)
from codalang.ir.types import Kind, ValueType, register_dtype, row


class ProgramBuilder:
    """Collects parameters and statements; `finish` returns the program.

    `types` holds the type of every value made so far.
    """

    def __init__(self, name: str, loc: Loc | None = None) -> None:
        self.name = name
        self.loc = loc
        self.types: dict[str, TensorType] = {}
        self._params: list[ProgramParam] = []
        self._statements: list[Statement] = []
        self._places: dict[str, Loc | None] = {}
        self._dims: dict[str, None] = {}

    # ---- what a program is made of ----------------------------------------------------------------------------------

    def param(
        self,
        name: str,
        shape: Sequence[Dim],
        dtype: str | None = None,
        default: float | None = None,
        loc: Loc | None = None,
    ) -> str:
        """Declare the next parameter, a scalar where `shape` is empty.  Its dimension names become known."""
        param = ProgramParam(name, TensorType(tuple(shape), register_dtype(dtype)), dtype, default, loc)
        self._dims.update(dict.fromkeys(n for extent in shape for n in sorted(extent.names)))
        self._define(name, param.type, loc)
        self._params.append(param)
        return name

    def apply(
        self,
        epilogue: Epilogue,
        host: Matmul | str | None,
        inputs: Mapping[str, Value],
        results: Sequence[str | None],
        loc: Loc | None = None,
        extents: tuple[Dim, Dim] | None = None,
    ) -> tuple[str | None, ...]:
        """Apply an epilogue.  `inputs` holds a value for every parameter but a host's; `extents` is needed where no tile,
        row or col determines M or N.  Returns the names of the results.

        Raises CodaTypeError where shapes or dtypes do not fit, CodaNameError for unknown or missing names.
        """
        hosted = epilogue.params[1:] if host is not None else epilogue.params
        if host is not None and epilogue.accumulator is None:
            raise CodaTypeError(f"`{epilogue.name}` has no accumulator, hence no host", loc)
        if len(results) != len(epilogue.outputs):
            names = ", ".join(o.name for o in epilogue.outputs)
            raise CodaTypeError(
                f"`{epilogue.name}` has {len(epilogue.outputs)} results ({names}), got {len(results)} names", loc
            )
        unknown = [name for name in inputs if name not in {p.name for p in hosted}]
        missing = [p.name for p in hosted if p.name not in inputs]
        if unknown or missing:
            what = f"has no parameter `{unknown[0]}`" if unknown else f"needs `{missing[0]}`"
            takes = ", ".join(p.name for p in hosted) or "none"
            raise CodaNameError(f"`{epilogue.name}` {what}; its parameters are {takes}", loc)
        shape = _Extents(epilogue, extents)
        if host is not None:
            accumulator = epilogue.params[0]
            have = self.product(host, loc) if isinstance(host, Matmul) else self._matrix(host, loc)
            shape.rows(have[0], accumulator.name, loc)
            shape.columns(have[1], accumulator, loc)
        for param in hosted:
            self._check_input(shape, param, inputs[param.name], loc)
        statement = Apply(
            tuple(results), epilogue, host, tuple((p.name, inputs[p.name]) for p in hosted), shape.known(loc), loc
        )
        for name, output in zip(results, epilogue.outputs, strict=True):
            if name is not None:
                self._define(name, TensorType(shape.of(output.type), output.type.dtype), loc)
        self._statements.append(statement)
        return tuple(results)

    def matmul(self, result: str, matmul: Matmul, loc: Loc | None = None) -> str:
        """A matmul without an epilogue.  Raises as `product` does."""
        shape = self.product(matmul, loc)
        self._define(result, TensorType(shape), loc)
        self._statements.append(Product(result, matmul, loc))
        return result

    def vector(self, result: str, expression: Epilogue, loc: Loc | None = None) -> str:
        """An auxiliary step; see `program.Vector`.  Its parameters are named like the values and extents they take.

        Raises CodaTypeError where vectors differ in length, CodaNameError for unknown names.
        """
        length, first = ONE, None
        for param in expression.params:
            if param.name in self._dims and param.name not in self.types:
                continue
            have = self.type_of(param.name, loc)
            if param.type.dtype is not have.dtype or (param.type.kind is Kind.SCALAR) != (have.shape == ()):
                raise CodaTypeError(f"`{param.name}` is {have}, which does not fit where it is read", loc)
            if param.type.kind is Kind.ROW:
                if first is not None and have.vector != length:
                    raise CodaTypeError(
                        f"`{first}` has {length} elements and `{param.name}` has {have.vector}; an auxiliary step is on "
                        "vectors of one length",
                        loc,
                    )
                length, first = have.vector, first or param.name
        output = expression.outputs[0]
        type_ = TensorType((length,) if output.type.kind is Kind.ROW else (), output.type.dtype)
        self._define(result, type_, loc)
        self._statements.append(Vector(result, expression, length, loc))
        return result

    def finish(self, results: Sequence[str], loc: Loc | None = None) -> Program:
        """The program that returns these values.  Raises CodaNameError for one that is not there."""
        for name in results:
            self.type_of(name, loc)
        return Program(self.name, tuple(self._params), tuple(self._statements), tuple(results), self.loc)

    # ---- shapes -----------------------------------------------------------------------------------------------------

    def type_of(self, name: str, loc: Loc | None = None) -> TensorType:
        """A value's type.  Raises CodaNameError for an unknown one."""
        if name not in self.types:
            raise CodaNameError(f"there is no value `{name}` here; there is {', '.join(self.types) or 'none'}", loc)
        return self.types[name]

    def is_dim(self, name: str) -> bool:
        """True for a dimension name of some parameter."""
        return name in self._dims

    def product(self, matmul: Matmul, loc: Loc | None = None) -> tuple[Dim, Dim]:
        """Rows and columns of a matmul.  Raises CodaTypeError where an operand is no matrix, or K differs."""
        a, b = self._matrix(matmul.a, loc), self._matrix(matmul.b, loc)
        a = a[::-1] if matmul.a_transposed else a
        b = b[::-1] if matmul.b_transposed else b
        if a[1] != b[0]:
            shapes = [(n, self.types[n]) for n in dict.fromkeys((matmul.a, matmul.b))]
            notes = tuple((place, f"`{n}` is {t}") for n, t in shapes if (place := self._places[n]))
            raise CodaTypeError(
                f"`{matmul}` contracts {a[1]} elements with {b[0]}: "
                + " and ".join(f"`{n}` is {t}" for n, t in shapes),
                loc,
                notes=notes,
                hint="`x @ w.T` contracts the last axes of both",
            )
        return a[0], b[1]

    def _matrix(self, name: str, loc: Loc | None) -> tuple[Dim, Dim]:
        matrix = self.type_of(name, loc).matrix
        if matrix is None:
            raise CodaTypeError(f"`{name}` is {self.types[name]}, and a matrix is needed", loc)
        return matrix

    def _check_input(self, shape: _Extents, param: Param, value: Value, loc: Loc | None) -> None:
        if not isinstance(value, str):
            if param.type.kind is not Kind.SCALAR:
                raise CodaTypeError(
                    f"`{param.name}` of `{shape.epilogue.name}` is {param.type.show(shape.epilogue.dims)}, got {value}",
                    loc,
                )
            return
        have = self.type_of(value, loc)
        if have.dtype is not param.type.dtype:
            raise CodaTypeError(
                f"`{param.name}` of `{shape.epilogue.name}` holds {param.type.dtype.value}, and `{value}` holds "
                f"{have.dtype.value}",
                loc,
            )
        if param.type.kind is Kind.TILE:
            rows, columns = self._matrix(value, loc)
            shape.rows(rows, value, loc)
            shape.columns(columns, param, loc, value)
        elif param.type.kind is Kind.COL:
            shape.rows(have.vector, value, loc)
        elif param.type.kind is Kind.ROW:
            shape.columns(have.vector, param, loc, value)
        elif have.shape:
            raise CodaTypeError(f"`{param.name}` of `{shape.epilogue.name}` is a scalar, and `{value}` is {have}", loc)

    def _define(self, name: str, type_: TensorType, loc: Loc | None) -> None:
        if name in self.types or name in self._dims:
            place = self._places.get(name)
            what = "a dimension" if name in self._dims else "defined already"
            raise CodaNameError(
                f"`{name}` is {what}: every value has a name of its own",
                loc,
                notes=((place, "first defined here"),) if place else (),
            )
        self.types[name], self._places[name] = type_, loc


@attrs.define
class _Extents:
    """M and N of an application, learned from its operands one after another."""

    epilogue: Epilogue
    given: tuple[Dim, Dim] | None
    m: Dim | None = attrs.field(init=False)
    n: Dim | None = attrs.field(init=False)
    m_from: str = attrs.field(init=False, default="the call")
    n_from: str = attrs.field(init=False, default="the call")

    def __attrs_post_init__(self) -> None:
        self.m, self.n = self.given or (None, None)

    def rows(self, have: Dim, value: str, loc: Loc | None) -> None:
        """Learn, or check, M."""
        if self.m is None:
            self.m, self.m_from = have, value
        elif self.m != have:
            raise self._mismatch(0, "rows", value, have, self.m, self.m_from, loc)

    def columns(self, have: Dim, param: Param, loc: Loc | None, value: str | None = None) -> None:
        """Learn, or check, N by a parameter of some width."""
        width, value = param.type.width, value or param.name
        assert width is not None
        if self.n is None:
            self.n, self.n_from = have / width, value
        elif self.n != have / width:
            raise self._mismatch(1, "columns", value, have, self.n * width, self.n_from, loc)

    def _mismatch(
        self, axis: int, what: str, value: str, have: Dim, wanted: Dim, source: str, loc: Loc | None
    ) -> CodaTypeError:
        dim = self.epilogue.dims[axis]
        return CodaTypeError(
            f"`{value}` has {have} {what} where `{self.epilogue.name}` needs {wanted}: `{source}` says what its {dim} is",
            loc,
        )

    def known(self, loc: Loc | None) -> tuple[Dim, Dim]:
        """M and N.  Raises CodaTypeError where an operand determines neither, hence never for a tile."""
        if self.m is None or self.n is None:
            dim = self.epilogue.dims[0 if self.m is None else 1]
            raise CodaTypeError(f"nothing says what `{dim}` of `{self.epilogue.name}` is in this program", loc)
        return self.m, self.n

    def of(self, type_: ValueType) -> tuple[Dim, ...]:
        """The shape of an output."""
        assert self.m is not None and self.n is not None
        rows = (self.m,) if type_.kind.has_rows else ()
        return rows + ((self.n * type_.width,) if type_.width is not None else ())


class ExpressionBuilder(EpilogueBuilder):
    """The expression of an auxiliary step, made of values by name."""

    def __init__(self, loc: Loc | None = None) -> None:
        super().__init__("vector", EXPRESSION_DIMS, loc)

    def value(self, name: str, type_: TensorType, loc: Loc | None = None) -> int:
        """A vector or scalar of the program, read once however often it is asked for."""
        if any(p.name == name for p in self.params):
            return self._leaf_of(name)
        vector = row() if type_.shape else ValueType(Kind.SCALAR)
        dtype = {"i32": "i32", "bool": "bool"}.get(type_.dtype.value)
        return self.param(name, attrs.evolve(vector, dtype=type_.dtype), dtype, loc)

    def result(self, name: str, value: int, loc: Loc | None = None) -> Epilogue:
        """The finished expression that stores `value` as it is."""
        have = self.nodes[value].type
        self.store(name, value, ValueType(have.kind, have.width), None, loc)
        return self.finish()

    def total(self, name: str, value: int, how: str, loc: Loc | None = None) -> Epilogue:
        """The finished expression that reduces `value` to a scalar by sum, max or min."""
        self.reduce(name, value, ValueType(Kind.SCALAR), how, None, loc)
        return self.finish()

    def _leaf_of(self, name: str) -> int:
        return next(i for i, node in enumerate(self.nodes) if node.op == "param" and node.attr == name)
