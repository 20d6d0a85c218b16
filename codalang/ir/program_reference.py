"""The reference interpreter of programs: statement after statement, each epilogue by `reference.run`.

    sizes   the number that each dimension name stands for, from the shapes of the arguments
    view    a tensor as the matrix or vector that a statement sees
    run     a program's results

Everything is torch ops, hence differentiable by torch.autograd.  `storage` turns on the rounding mode: the results of
each statement are rounded as kernels round them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from codalang.errors import CodaCallError
from codalang.ir import reference
from codalang.ir.dims import Dim
from codalang.ir.program import Apply, Matmul, Product, Program, ProgramParam, Statement, TensorType, Value, Vector
from codalang.ir.reference import Storage
from codalang.ir.types import Dtype, Kind

Number = float | int | bool


def sizes(
    program: Program, shapes: Mapping[str, Sequence[int]], given: Mapping[str, Sequence[int]] | None = None
) -> dict[str, int]:
    """The number that each dimension name stands for, by the shape of each parameter that is given.

    `given`: the shapes as the caller has them, where batch dimensions were joined.

    Raises CodaCallError where a shape does not fit its declaration, or the shapes leave a name open.
    """
    given = shapes if given is None else given
    for param in program.params:
        if param.name in shapes:
            check_rank(param, shapes[param.name])
    pending = [
        (param, extent, shapes[param.name][axis])
        for param in program.params
        if param.name in shapes
        for axis, extent in enumerate(param.type.shape)
    ]
    found: dict[str, int] = {}
    source: dict[str, ProgramParam] = {}
    while pending:
        open_ = []
        for param, extent, have in pending:
            shape = shapes[param.name]
            if extent.names <= found.keys():
                wanted = extent.evaluate(found)
                if wanted != have:
                    names = sorted(extent.names)
                    said = " and ".join(f"{n} = {found[n]} by `{source[n].name}`" for n in names)
                    deciding = {source[n].name: source[n] for n in names if source[n] is not param}
                    raise CodaCallError(
                        misfit(program, param, extent, have, shape, given[param.name])
                        + (f", and {said}" if said else ""),
                        param.loc,
                        notes=tuple(
                            (p.loc, f"`{name}` is {p.type}, here {list(given[name])}")
                            for name, p in deciding.items()
                            if p.loc is not None
                        ),
                        argument=param.name,
                        hint=_transposed_hint(param, shape, found),
                    )
            elif (solved := extent.solve(have, found)) is not None:
                dim, value = solved
                if value.denominator != 1 or value < 0:
                    raise CodaCallError(
                        misfit(program, param, extent, have, shape, given[param.name])
                        + f", for which no whole {dim} fits",
                        param.loc,
                        argument=param.name,
                    )
                found[dim], source[dim] = int(value), param
            else:
                open_.append((param, extent, have))
        if len(open_) == len(pending):
            param, extent, _ = open_[0]
            missing = ", ".join(sorted(extent.names - found.keys()))
            raise CodaCallError(
                f"the shapes do not say what {missing} of `{program.name}` is", param.loc, argument=param.name
            )
        pending = open_
    return found


def misfit(
    program: Program, param: ProgramParam, extent: Dim, have: int, shape: Sequence[int], given: Sequence[int]
) -> str:
    """That an axis is not as declared.  `shape`: batch dimensions joined; `given`: as the caller has it."""
    joined = f", with its leading dimensions joined {list(shape)}," if len(shape) != len(given) else ""
    return (
        f"`{param.name}` of shape {list(given)}{joined} has an axis of {have} where `{program.name}` declares {extent}"
    )


def check_rank(param: ProgramParam, shape: Sequence[int]) -> None:
    """Raises CodaCallError where a shape has not as many axes as declared."""
    if len(shape) != len(param.type.shape):
        raise CodaCallError(
            f"`{param.name}` is declared {param.type}, got shape {list(shape)}",
            param.loc,
            argument=param.name,
            hint=_rank_hint(param.type, shape),
        )


def _transposed_hint(param: ProgramParam, shape: Sequence[int], sizes: Mapping[str, int]) -> str | None:
    """What to do with a matrix that fits when it is transposed."""
    turned = zip(param.type.shape, reversed(shape), strict=True)
    fits = len(shape) == 2 and all(not d.names <= sizes.keys() or d.evaluate(sizes) == have for d, have in turned)
    return f"`{param.name}` is {param.type}: pass {param.name}.T" if fits else None


def _rank_hint(type_: TensorType, shape: Sequence[int]) -> str | None:
    """What makes the declared shape of one that has the same elements in other axes."""
    declared = type_.shape
    pair = type_.pair_axis
    if 0 < len(shape) < len(declared) and (pair is not None or len(declared) > 2):
        halves = "" if pair is None else ": the two halves stand one after the other"
        return f"call .view({', '.join(map(str, declared))}){halves}"
    if not declared and all(extent == 1 for extent in shape):
        return "a scalar is a number or a tensor without dimensions: call .reshape(())"
    return None


def view(tensor: Tensor, type_: TensorType, kind: Kind) -> Tensor:
    """A value as a statement sees it: the matrix or vector of its type, or the scalar that it is."""
    if kind is Kind.SCALAR:
        return tensor
    ordered = tensor.permute(type_.order)
    if kind not in (Kind.TILE, Kind.ROWS):
        return ordered.reshape(-1)
    pair = type_.pair_axis
    columns = tensor.shape[-1] * (2 if pair is not None and pair == tensor.ndim - 2 else 1)
    # Rows are counted, not left to reshape, which cannot tell where there are no columns.
    rows = 1
    for extent in ordered.shape[: -2 if columns != ordered.shape[-1] else -1]:
        rows *= extent
    return ordered.reshape(rows, columns)


def unview(tensor: Tensor, type_: TensorType, sizes_: Mapping[str, int]) -> Tensor:
    """The tensor of a declared shape whose view is `tensor`: undoes `view`."""
    shape = [int(extent.evaluate(sizes_)) for extent in type_.shape]
    ordered = tensor.reshape([shape[axis] for axis in type_.order])
    return ordered.permute(type_.order)  # an exchange of two axes undoes itself


def run(
    program: Program,
    inputs: Mapping[str, Tensor | Number],
    *,
    dtype: torch.dtype = torch.float64,
    storage: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Run a program on whole matrices.

    Args:
        program: what to run.
        inputs: parameters by name, in their declared shapes; scalars with a default may be missing.
        dtype: what is computed in.
        storage: dtype that stored tiles without annotation are rounded to; rounds everything else that is stored, too.
            None: nothing is rounded.

    Returns:
        The results by name, in the order of the program.

    Raises:
        CodaCallError: an input is missing or does not fit.
    """
    values: dict[str, Tensor] = {}
    device = next((v.device for v in inputs.values() if isinstance(v, Tensor)), torch.device("cpu"))
    for param in program.params:
        given = inputs.get(param.name, param.default)
        if given is None:
            raise CodaCallError(f"`{param.name}` of `{program.name}` is missing", argument=param.name)
        floats = param.type.dtype is Dtype.F32
        on = given.device if isinstance(given, Tensor) else device
        values[param.name] = torch.as_tensor(given, dtype=dtype if floats else None, device=on)
    extents = sizes(program, {name: value.shape for name, value in values.items()})
    execution = _Execution(dtype, storage, extents, {p.name: p.type for p in program.params}, values)
    for statement in program.statements:
        execution.step(statement)
    return {name: execution.values[name] for name in program.results}


@attrs.define
class _Execution:
    dtype: torch.dtype
    storage: torch.dtype | None
    sizes: dict[str, int]
    types: dict[str, TensorType]
    values: dict[str, Tensor]

    def step(self, statement: Statement) -> None:
        """Run one statement."""
        steps: dict[type, Callable[..., None]] = {Apply: self._apply, Product: self._product, Vector: self._vector}
        steps[type(statement)](statement)

    def _apply(self, statement: Apply) -> None:
        epilogue, host = statement.epilogue, statement.host
        inputs: dict[str, Tensor | float] = {
            p.name: self._argument(value, p.type.kind)
            for p, (_, value) in zip(epilogue.params[host is not None :], statement.inputs, strict=True)
        }
        if host is not None:
            inputs[epilogue.params[0].name] = (
                self._multiplied(host) if isinstance(host, Matmul) else self._argument(host, Kind.TILE)
            )
        m, n, *samples = statement.extents
        extents = (self._number(m), self._number(n), *map(self._number, samples))
        outputs = reference.run(epilogue, inputs, dtype=self.dtype, extents=extents, storage=self._storage())
        for name, output in zip(statement.results, epilogue.outputs, strict=True):
            if name is not None:
                rows = samples[0] if output.type.kind is Kind.ROWS else m
                shape = [rows] if output.type.kind.has_rows else []
                shape += [n * output.type.width] if output.type.width is not None else []
                self._define(name, outputs[output.name], shape, output.type.dtype)

    def _product(self, statement: Product) -> None:
        result = self._multiplied(statement.matmul)
        if self.storage is not None:
            result = result.to(self.storage).to(self.dtype)
        a, b = self.types[statement.matmul.a].matrix, self.types[statement.matmul.b].matrix
        assert a is not None and b is not None
        rows = a[1 if statement.matmul.a_transposed else 0]
        self._define(statement.result, result, [rows, b[0 if statement.matmul.b_transposed else 1]], Dtype.F32)

    def _vector(self, statement: Vector) -> None:
        inputs = {p.name: self._read(p.name, p.type.kind) for p in statement.expression.params}
        length = self._number(statement.length)
        outputs = reference.run(
            statement.expression, inputs, dtype=self.dtype, extents=(1, length), storage=self._storage()
        )
        (result,) = outputs.values()
        self._define(statement.result, result, [statement.length] if result.ndim else [], Dtype.F32)

    def _define(self, name: str, value: Tensor, shape: list[Dim], dtype: Dtype) -> None:
        """`shape` is as declared: an axis that happens to have two elements is no pair axis."""
        self.types[name] = TensorType(tuple(shape), dtype)
        self.values[name] = value.to(self.dtype) if dtype is Dtype.F32 else value

    def _multiplied(self, matmul: Matmul) -> Tensor:
        a, b = self._argument(matmul.a, Kind.TILE), self._argument(matmul.b, Kind.TILE)
        assert isinstance(a, Tensor) and isinstance(b, Tensor)
        return (a.T if matmul.a_transposed else a) @ (b.T if matmul.b_transposed else b)

    def _read(self, name: str, kind: Kind) -> Tensor | float:
        return self._argument(name, kind) if name in self.values else self._number(Dim.of(name))

    def _argument(self, value: Value, kind: Kind) -> Tensor | float:
        if isinstance(value, str):
            return view(self.values[value], self.types[value], kind)
        return self._number(value) if isinstance(value, Dim) else value

    def _number(self, extent: Dim) -> int:
        value = extent.evaluate(self.sizes)
        if value.denominator != 1:
            raise CodaCallError(f"{extent} is {value}, and an extent is a whole number")
        return int(value)

    def _storage(self) -> Storage | None:
        return None if self.storage is None else Storage(self.storage)
