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

import math
from collections.abc import Mapping, Sequence

import attrs

from codalang.errors import CodaNameError, CodaTypeError, CodaUnsupportedError, Loc
from codalang.ir.build import EpilogueBuilder
from codalang.ir.dims import ONE, Dim
from codalang.ir.epilogue import Epilogue, Param, Reduce
from codalang.ir.names import Namer
from codalang.ir.program import (
    EXPRESSION_DIMS,
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
from codalang.ir.types import SCALAR, Dtype, Kind, ValueType, register_dtype, row

# Ops that are not elementwise: no auxiliary step has them.
NOT_ELEMENTWISE = frozenset({"even", "odd", "join", "row_index", "col_index", "group_sum", "group_max"})

_Notes = tuple[tuple[Loc, str], ...]


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
        self._dims: dict[str, Loc | None] = {}
        self._matrices: dict[str, Loc | None] = {}  # what is a matrix, and where it was made or first used as one
        self._vectors: dict[str, Loc | None] = {}  # parameters of several axes that an auxiliary step reads, and where
        self._epilogues: dict[Epilogue, Epilogue] = {}
        self._epilogue_names = Namer({name})

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
        for dim in (n for extent in shape for n in sorted(extent.names)):
            if dim in self.types:
                raise self._twice(dim, "a value and a dimension", self._places[dim], loc)
            self._dims.setdefault(dim, loc)
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
        extents: Sequence[Dim] | None = None,
        places: Mapping[str, Loc] | None = None,
    ) -> tuple[str | None, ...]:
        """Apply an epilogue.  `inputs` holds a value for every parameter but a host's; `extents`, (M, N) or (M, N, B),
        is needed where no operand determines one of them; `places` are those of the arguments, by parameter.

        An epilogue that differs from another one of its name, or has the program's, gets a name of its own.  Without a
        host, an accumulator among the inputs is one.  Returns the names of the results.

        Raises CodaTypeError where shapes or dtypes do not fit, CodaNameError for unknown or missing names.
        """
        first = epilogue.accumulator
        if host is None and first is not None and isinstance(given := inputs.get(first.name), str):
            host, inputs = given, {name: value for name, value in inputs.items() if name != first.name}
        hosted = epilogue.params[1:] if host is not None else epilogue.params
        if host is not None and first is None:
            raise CodaTypeError(f"`{epilogue.name}` has no accumulator, hence no host", loc)
        if len(results) != len(epilogue.outputs):
            names = ", ".join(o.name for o in epilogue.outputs)
            count = f"{len(epilogue.outputs)} result{'s' * (len(epilogue.outputs) != 1)}"
            raise CodaTypeError(f"`{epilogue.name}` has {count} ({names}), got {_names(len(results))}", loc)
        unknown = [name for name in inputs if name not in {p.name for p in hosted}]
        missing = [p.name for p in hosted if p.name not in inputs]
        if unknown or missing:
            what = f"has no parameter `{unknown[0]}`" if unknown else f"needs `{missing[0]}`"
            takes = ", ".join(p.name for p in hosted) or "none"
            raise CodaNameError(f"`{epilogue.name}` {what}; its parameters are {takes}", loc)
        places = places or {}
        operands = _Operands(self, epilogue, extents, loc)
        if host is not None:
            accumulator = epilogue.params[0]
            at = places.get(accumulator.name, loc)
            have = (
                self.product(host, at) if isinstance(host, Matmul) else self._tile(host, accumulator, epilogue.name, at)
            )
            operands.axis(0, have[0], str(host), host, at)
            operands.columns(have[1], accumulator, str(host), host, at)
        for param in hosted:
            operands.input(param, inputs[param.name], places.get(param.name, loc))
        known = operands.known()
        statement = Apply(
            tuple(results),
            self._named_apart(epilogue),
            host,
            tuple((p.name, _as_stored(inputs[p.name], p.type.dtype)) for p in hosted),
            known,
            loc,
        )
        for name, output in zip(results, epilogue.outputs, strict=True):
            if name is not None:
                self._make(name, TensorType(operands.shape(output.type), output.type.dtype), loc)
        self._statements.append(statement)
        return tuple(results)

    def matmul(self, result: str, matmul: Matmul, loc: Loc | None = None) -> str:
        """A matmul without an epilogue.  Raises as `product` does."""
        shape = self.product(matmul, loc)
        self._make(result, TensorType(shape), loc)
        self._statements.append(Product(result, matmul, loc))
        return result

    def vector(
        self, result: str, expression: Epilogue, loc: Loc | None = None, places: Mapping[str, Loc] | None = None
    ) -> str:
        """An auxiliary step; see `program.Vector`.  Its parameters are named like the values and extents they take;
        `places` says where they are read.

        Raises CodaTypeError where vectors differ in length or an op is not elementwise, CodaNameError for unknown
        names.
        """
        places = places or {}
        expression = elementwise(expression, loc)
        read = [p for p in expression.params if p.name in self.types or p.name not in self._dims]
        for param in expression.params:
            if param.name not in self.types and param.name in self._dims and param.type != SCALAR:
                raise CodaTypeError(f"`{param.name}` is a dimension, hence a scalar where it is read", loc)
        for param in read:
            self._check_read(param, places.get(param.name, loc))
        vectors = [p.name for p in read if p.type.kind is Kind.ROW]
        length = self.types[vectors[0]].vector if vectors else ONE
        for name in vectors:
            have = self.types[name].vector
            if have != length:
                raise CodaTypeError(
                    f"`{vectors[0]}` has {length} elements and `{name}` has {have}: an auxiliary step is on vectors of "
                    "one length",
                    places.get(name, loc),
                    notes=self.notes(vectors[0], name),
                )
        output = expression.outputs[0]
        type_ = TensorType((length,) if output.type.kind is Kind.ROW else (), output.type.dtype)
        self._make(result, type_, loc)
        self._statements.append(Vector(result, expression, length, loc))
        return result

    def finish(self, results: Sequence[str], loc: Loc | None = None) -> Program:
        """The program that returns these values.  Raises CodaNameError for one that is not there, or is there twice."""
        seen: set[str] = set()
        for name in results:
            self.type_of(name, loc)
            if name in seen:
                raise CodaNameError(f"`{name}` is returned twice", loc)
            seen.add(name)
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

    def check_extent(self, value: Value | None, loc: Loc | None) -> None:
        """Raise CodaNameError where a value is an extent of a name that is no dimension of this program."""
        for name in sorted(value.names) if isinstance(value, Dim) else ():
            if name not in self._dims:
                dims = ", ".join(self._dims) or "none"
                raise CodaNameError(f"`{name}` is no dimension of `{self.name}`, which has {dims}", loc)

    def product(self, matmul: Matmul, loc: Loc | None = None) -> tuple[Dim, Dim]:
        """Rows and columns of a matmul.  Raises CodaTypeError where an operand is no matrix, or K differs."""
        a, b = self._operand(matmul.a, loc), self._operand(matmul.b, loc)
        a = a[::-1] if matmul.a_transposed else a
        b = b[::-1] if matmul.b_transposed else b
        if a[1] != b[0]:
            fits = "`x @ w.T` contracts the last axes of both"
            turned = matmul.b_transposed != matmul.a_transposed and a[0] == b[0]
            if a[1] == b[1]:
                turn = Matmul(matmul.a, matmul.b, matmul.a_transposed, not matmul.b_transposed)
                fits = f"`{turn}` fits"
            elif a[0] == b[0] or turned:
                fits = f"`{Matmul(matmul.a, matmul.b, not matmul.a_transposed, matmul.b_transposed)}` fits"
            raise CodaTypeError(
                f"`{matmul}` contracts {a[1]} elements of `{matmul.a}` with {b[0]} of `{matmul.b}`",
                loc,
                notes=self.notes(matmul.a, matmul.b),
                hint=fits,
            )
        return a[0], b[1]

    def notes(self, *names: str) -> _Notes:
        """Where values were made, and of which shape."""
        found = [(self._places.get(n), f"`{n}` is {self.show(n)}") for n in dict.fromkeys(names) if n in self.types]
        return tuple((place, text) for place, text in found if place is not None)

    def show(self, name: str) -> str:
        """A value's type for a message."""
        type_ = self.types[name]
        return str(type_) if type_.dtype is Dtype.F32 else f"{type_} of {type_.dtype.value}"

    def _operand(self, name: str, loc: Loc | None) -> tuple[Dim, Dim]:
        type_ = self.type_of(name, loc)
        if type_.dtype is not Dtype.F32:
            raise CodaTypeError(
                f"`{name}` holds {type_.dtype.value}, and a matmul is of numbers", loc, notes=self.notes(name)
            )
        return self._matrix(name, "a matmul is of matrices", loc)

    def _tile(self, name: str, param: Param, epilogue: str, loc: Loc | None) -> tuple[Dim, Dim]:
        have = self.type_of(name, loc)
        if have.dtype is not param.type.dtype:
            raise CodaTypeError(
                f"`{param.name}` of `{epilogue}` holds {param.type.dtype.value}, and `{name}` holds {have.dtype.value}",
                loc,
                notes=self.notes(name),
            )
        return self._matrix(name, f"`{param.name}` of `{epilogue}` is a tile", loc)

    def _matrix(self, name: str, because: str, loc: Loc | None) -> tuple[Dim, Dim]:
        matrix = self.type_of(name, loc).matrix
        if matrix is None:
            kind = "vector" if self.types[name].shape else "scalar"
            raise CodaTypeError(f"a matrix is needed, and `{name}` is a {kind}: {because}", loc, notes=self.notes(name))
        self.use_as_matrix(name, loc)
        return matrix

    def use_as_matrix(self, name: str, loc: Loc | None) -> None:
        """Note that a value of several axes is a matrix.  Raises CodaTypeError where it is used as a vector, too."""
        if name in self._vectors:
            place = self._vectors[name]
            raise CodaTypeError(
                f"`{name}` is used as a matrix here, and as a vector by an auxiliary step",
                loc,
                notes=(*self.notes(name), *(((place, "here"),) if place else ())),
            )
        self._matrices.setdefault(name, loc)

    def _check_read(self, param: Param, loc: Loc | None) -> None:
        """A value that an auxiliary step reads."""
        have = self.type_of(param.name, loc)
        if param.type.dtype is not have.dtype or (param.type.kind is Kind.SCALAR) != (have.shape == ()):
            raise CodaTypeError(f"`{param.name}` is {self.show(param.name)}, which does not fit where it is read", loc)
        if param.name in self._matrices:
            raise self.no_vector(param.name, loc)
        if have.matrix is not None:
            self._vectors.setdefault(param.name, loc)

    def no_vector(self, name: str, loc: Loc | None) -> CodaTypeError:
        """The error of a matrix that an auxiliary step reads."""
        use = self._matrices.get(name)
        used = ((use, "it is used as a matrix here"),) if use is not None and use != self._places[name] else ()
        return CodaTypeError(
            f"`{name}` is a matrix, and an auxiliary step is on vectors and scalars",
            loc,
            notes=(*self.notes(name), *used),
            hint=f"an epilogue can be applied to a matrix: `y = my_epilogue({name})`",
        )

    def _named_apart(self, epilogue: Epilogue) -> Epilogue:
        """The epilogue, renamed where its name is another's."""
        if epilogue not in self._epilogues:
            name = self._epilogue_names.fresh(epilogue.name)
            self._epilogues[epilogue] = epilogue if name == epilogue.name else attrs.evolve(epilogue, name=name)
        return self._epilogues[epilogue]

    def _make(self, name: str, type_: TensorType, loc: Loc | None) -> None:
        if type_.pair_axis is not None:
            raise CodaUnsupportedError(
                f"`{name}` would be {type_}, whose first axis is that of pairs",
                loc,
                hint="give the 2 in the shape of a parameter a name",
            )
        self._define(name, type_, loc)
        if type_.matrix is not None:
            self._matrices[name] = loc

    def _define(self, name: str, type_: TensorType, loc: Loc | None) -> None:
        if name in self._dims:
            raise self._twice(name, "a dimension and a value", self._dims[name], loc)
        if name in self.types:
            raise self._twice(name, "two values", self._places.get(name), loc)
        self.types[name], self._places[name] = type_, loc

    def _twice(self, name: str, what: str, first: Loc | None, loc: Loc | None) -> CodaNameError:
        notes = ((first, "first defined here"),) if first else ()
        return CodaNameError(f"`{name}` names {what}", loc, notes=notes, hint="in a program every name means one thing")


_AXES = ("rows", "columns", "samples")


@attrs.define
class _Operands:
    """M, N and the number of samples of an application, learned from its operands one after another."""

    builder: ProgramBuilder
    epilogue: Epilogue
    given: Sequence[Dim | None] | None
    loc: Loc | None
    extents: list[Dim | None] = attrs.field(init=False)
    source: list[tuple[str, tuple[str, ...]]] = attrs.field(init=False)  # what said it, and the values in that

    def __attrs_post_init__(self) -> None:
        count = 3 if self.epilogue.has_samples else 2
        if self.given is not None and len(self.given) != count:
            dims = ", ".join(self.epilogue.dims)
            raise CodaTypeError(f"`{self.epilogue.name}` has extents [{dims}], got {len(self.given)}", self.loc)
        for extent in self.given or ():
            self.builder.check_extent(extent, self.loc)
        self.extents = [None] * count if self.given is None else list(self.given)
        self.source = [("", ())] * count

    def input(self, param: Param, value: Value, loc: Loc | None) -> None:
        """Check an argument, and learn from it."""
        builder, kind = self.builder, param.type.kind
        shown = f"`{param.name}` of `{self.epilogue.name}` is {param.type.show(self.epilogue.dims)}"
        if not isinstance(value, str):
            if kind is not Kind.SCALAR:
                raise CodaTypeError(f"{shown}, got the number {value}", loc)
            builder.check_extent(value, loc)
            self._check_number(param, value, loc)
            return
        have = builder.type_of(value, loc)
        if have.dtype is not param.type.dtype:
            raise CodaTypeError(f"{shown}, and `{value}` holds {have.dtype.value}", loc, notes=builder.notes(value))
        if kind is Kind.SCALAR and have.shape:
            raise CodaTypeError(f"{shown}, and `{value}` is {have}", loc, notes=builder.notes(value))
        if kind is not Kind.SCALAR and not have.shape:
            raise CodaTypeError(f"{shown}, and `{value}` is a scalar", loc, notes=builder.notes(value))
        if kind in (Kind.TILE, Kind.ROWS):
            rows, columns = self._matrix(value, shown, loc)
            self.axis(0 if kind is Kind.TILE else 2, rows, value, value, loc)
            self.columns(columns, param, value, value, loc)
        elif kind is Kind.COL:
            self.axis(0, have.vector, value, value, loc)
        elif kind is Kind.ROW:
            self.columns(have.vector, param, value, value, loc)

    def _check_number(self, param: Param, value: Value, loc: Loc | None) -> None:
        dtype = param.type.dtype
        fits = {
            Dtype.F32: not isinstance(value, bool),
            Dtype.I32: isinstance(value, int) and not isinstance(value, bool) and -(2**31) <= value < 2**31,
            Dtype.BOOL: isinstance(value, bool),
        }
        if not fits[dtype]:
            wanted = {Dtype.F32: "a number", Dtype.I32: "an integer of 32 bits", Dtype.BOOL: "true or false"}[dtype]
            raise CodaTypeError(f"`{param.name}` of `{self.epilogue.name}` must be {wanted}, got {value}", loc)

    def _matrix(self, value: str, shown: str, loc: Loc | None) -> tuple[Dim, Dim]:
        have = self.builder.types[value]
        if have.matrix is None:
            raise CodaTypeError(
                f"{shown}, and `{value}` is {have}: a matrix is needed", loc, notes=self.builder.notes(value)
            )
        self.builder.use_as_matrix(value, loc)
        return have.matrix

    def axis(self, axis: int, have: Dim, shown: str, operand: Matmul | str, loc: Loc | None) -> None:
        """Learn, or check, an extent."""
        known = self.extents[axis]
        values = (operand.a, operand.b) if isinstance(operand, Matmul) else (operand,)
        if known is None:
            self.extents[axis], self.source[axis] = have, (shown, values)
        elif known != have:
            raise self._mismatch(axis, have, known, shown, values, loc)

    def columns(self, have: Dim, param: Param, shown: str, operand: Matmul | str, loc: Loc | None) -> None:
        """Learn, or check, N by a parameter of some width."""
        width = param.type.width
        assert width is not None
        known = self.extents[1]
        if known is not None and known * width != have:
            values = (operand.a, operand.b) if isinstance(operand, Matmul) else (operand,)
            raise self._mismatch(1, have, known * width, shown, values, loc)
        self.axis(1, have / width, shown, operand, loc)

    def _mismatch(
        self, axis: int, have: Dim, wanted: Dim, shown: str, values: tuple[str, ...], loc: Loc | None
    ) -> CodaTypeError:
        source, others = self.source[axis]
        said = f"`{source}` says" if source else "the brackets say"
        return CodaTypeError(
            f"`{shown}` has {have} {_AXES[axis]} where `{self.epilogue.name}` needs {wanted}: "
            f"{said} what its {self.epilogue.dims[axis]} is",
            loc,
            notes=self.builder.notes(*others, *values),
        )

    def known(self) -> tuple[Dim, ...]:
        """M and N, and the number of samples.  Raises CodaTypeError where an operand determines one of them not."""
        for axis, extent in enumerate(self.extents):
            if extent is None:
                name, dims = self.epilogue.name, ", ".join(self.epilogue.dims)
                raise CodaTypeError(
                    f"nothing says what `{self.epilogue.dims[axis]}` of `{name}` is in this program",
                    self.loc,
                    hint=f"write `{name}[{dims}](...)` with what [{dims}] is here",
                )
        return tuple(e for e in self.extents if e is not None)

    def shape(self, type_: ValueType) -> tuple[Dim, ...]:
        """The shape of an output."""
        m, n, *samples = self.known()
        rows = (samples[0] if type_.kind is Kind.ROWS else m,) if type_.kind.has_rows else ()
        return rows + ((n * type_.width,) if type_.width is not None else ())


def _as_stored(value: Value, dtype: Dtype) -> Value:
    """A number in the form of its dtype; a Dim without names is one."""
    if isinstance(value, Dim):
        number = value.number
        if number is None:
            return value
        value = float(number)
    if isinstance(value, str | bool) or dtype is not Dtype.F32:
        return value
    return math.nan if math.isnan(value) else float(value)


def _names(count: int) -> str:
    return f"{count} name{'s' * (count != 1)}"


class ExpressionBuilder(EpilogueBuilder):
    """The expression of an auxiliary step, made of values by name."""

    def __init__(self, loc: Loc | None = None) -> None:
        super().__init__("vector", EXPRESSION_DIMS, loc)
        self._values: dict[str, int] = {}

    def value(self, name: str, type_: TensorType, loc: Loc | None = None) -> int:
        """A vector or scalar of the program, read once however often it is asked for."""
        if name not in self._values:
            vector = row() if type_.shape else ValueType(Kind.SCALAR)
            dtype = {"i32": "i32", "bool": "bool"}.get(type_.dtype.value)
            self._values[name] = self.param(name, attrs.evolve(vector, dtype=type_.dtype), dtype, loc)
        return self._values[name]

    def extent(self, extent: Dim, loc: Loc | None = None) -> int:
        """An extent as a number; each name in it is a parameter."""
        total: int | None = None
        for monomial, coefficient in extent.terms:
            factors = [self.value(name, TensorType(()), loc) for name in monomial]
            if coefficient.numerator != 1 or not factors:
                factors.insert(0, self.const(float(coefficient.numerator), loc))
            product = factors[0]
            for factor in factors[1:]:
                product = self.op("mul", product, factor, loc=loc)
            if coefficient.denominator != 1:
                product = self.op("div", product, self.const(float(coefficient.denominator), loc), loc=loc)
            total = product if total is None else self.op("add", total, product, loc=loc)
        return self.const(0.0, loc) if total is None else total

    def result(self, name: str, value: int, loc: Loc | None = None) -> Epilogue:
        """The finished expression that stores `value` as it is."""
        have = self.nodes[value].type
        self.store(name, value, ValueType(have.kind, have.width), None, loc)
        return elementwise(self.finish(), loc)

    def total(self, name: str, value: int, how: str, loc: Loc | None = None) -> Epilogue:
        """The finished expression that reduces `value` to a scalar by sum, max or min.  Raises CodaTypeError where it
        is a scalar already."""
        if self.nodes[value].type.kind is not Kind.ROW:
            raise CodaTypeError(f"`{how}` is of a vector, and this is a scalar", loc)
        self.reduce(name, value, ValueType(Kind.SCALAR), how, None, loc)
        return elementwise(self.finish(), loc)


def elementwise(expression: Epilogue, loc: Loc | None = None) -> Epilogue:
    """An auxiliary step's expression in its canonical form: named `vector`, with the parameters that it reads, in the
    order in which the nodes have them.  Raises CodaTypeError where it is not one."""
    for node in expression.nodes:
        if node.op in NOT_ELEMENTWISE:
            raise CodaTypeError(
                f"`{node.op}` is not elementwise, and an auxiliary step is",
                node.loc or loc,
                hint="use it in an epilogue",
            )
    (output,) = expression.outputs
    if isinstance(output, Reduce) and expression.nodes[output.value].type.kind is not Kind.ROW:
        raise CodaTypeError(f"`{output.how}` is of a vector, and this is a scalar", loc)
    params = {p.name: p for p in expression.params}
    read = tuple(params[str(n.attr)] for n in expression.nodes if n.op == "param")
    return attrs.evolve(expression, name="vector", dims=EXPRESSION_DIMS, params=read, keeps=())
