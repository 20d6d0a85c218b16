"""The reference interpreter: an epilogue run with torch, whole or tile by tile, on any device.

It is the oracle for every other stage and the backend where there is no GPU.  Values keep the shape of their kind
until an op combines them:

| kind   | shape in here |
|--------|---------------|
| scalar | []            |
| row    | [w*N]         |
| col    | [M, 1]        |
| tile   | [M, w*N]      |

so torch's broadcasting is the language's, and `even`, `odd` and `join` act on the last axis.  Everything is torch
ops, hence differentiable by torch.autograd.

`storage` turns on the *rounding mode*: what is stored is rounded as the kernel rounds it, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction

import attrs
import torch
from torch import Tensor

from codalang.errors import CodaCallError
from codalang.ir.epilogue import Epilogue, Output, Param, Store
from codalang.ir.types import Kind, ValueType, show_extent, show_shape

TORCH_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def _join(a: Tensor, b: Tensor) -> Tensor:
    """Interleave columns: a's become the even ones, b's the odd ones."""
    pair = torch.stack(torch.broadcast_tensors(a, b), dim=-1)
    return pair.reshape(*pair.shape[:-2], 2 * pair.shape[-2])


OP_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "where": torch.where,
    "min": torch.minimum,
    "max": torch.maximum,
    "abs": torch.abs,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "stop_gradient": Tensor.detach,
    "even": lambda x: x[..., 0::2],
    "odd": lambda x: x[..., 1::2],
    "join": _join,
}


@attrs.frozen
class Reduction:
    """How a reduction folds one tile over some of its axes, and how it merges the partials of several tiles."""

    fold: Callable[[Tensor, tuple[int, ...]], Tensor]
    merge: Callable[[Tensor], Tensor]


REDUCTION_FUNCTIONS: dict[str, Reduction] = {
    "sum": Reduction(fold=lambda x, axes: x.sum(axes), merge=lambda partials: partials.sum(0)),
}

# The axes of [M, w*N] that a reduction to each kind folds away.
_FOLDED_AXES: dict[Kind, tuple[int, ...]] = {Kind.COL: (1,), Kind.ROW: (0,), Kind.SCALAR: (0, 1)}


@attrs.frozen
class Storage:
    """The dtypes that outputs are rounded to.

    Attributes:
        default: dtype of a tile output that has no annotation (A's dtype, or the accumulator tensor's).
        dtypes: output name -> dtype, for outputs whose dtype the caller decides; it wins over an annotation.
    """

    default: torch.dtype
    dtypes: Mapping[str, torch.dtype] = attrs.field(factory=dict)

    def of(self, output: Output) -> torch.dtype:
        """The dtype in which an output is stored: the caller's, the annotation's, or the default (reductions: f32)."""
        if output.name in self.dtypes:
            return self.dtypes[output.name]
        if output.dtype is not None:
            return TORCH_DTYPES[output.dtype]
        return self.default if isinstance(output, Store) else torch.float32


def run(
    epilogue: Epilogue,
    inputs: Mapping[str, Tensor | float],
    *,
    dtype: torch.dtype = torch.float64,
    extents: tuple[int, int] | None = None,
    storage: Storage | None = None,
) -> dict[str, Tensor]:
    """Run an epilogue on whole matrices.

    Args:
        epilogue: what to run.
        inputs: every parameter by name, the accumulator included: a tile [M, w*N], a row [w*N], a col [M], a scalar
            [] or a number; any strides, any floating dtype.
        dtype: what is computed in.
        extents: (M, N), needed where no input determines one of them.
        storage: rounds the outputs as the kernel does; without it they keep `dtype`.

    Returns:
        The outputs by name in textual order, contiguous: tiles [M, w*N], rows [w*N], cols [M], scalars [].  One that
        merely repeats an input may be that input.

    Raises:
        CodaCallError: an input is missing, unknown, of the wrong shape, dtype or device, or extents are undetermined.
    """
    call = _bind(epilogue, inputs, dtype, extents)
    m, n = call.extents
    values = _evaluate(epilogue, call.values, call)
    outputs: dict[str, Tensor] = {}
    for output, value in zip(epilogue.outputs, values, strict=True):
        outputs[output.name] = _tile_result(epilogue, output, value, m, n)
    return _finish(epilogue, outputs, storage)


def run_tiled(
    epilogue: Epilogue,
    inputs: Mapping[str, Tensor | float],
    *,
    tile: tuple[int, int],
    dtype: torch.dtype = torch.float64,
    extents: tuple[int, int] | None = None,
    storage: Storage | None = None,
) -> dict[str, Tensor]:
    """Run an epilogue as the kernel does: one tile of the output after another, their partial results merged after.

    `tile` is rows and columns of a tile in units of (M, N): a value of width w is cut into tiles of w times as many
    columns, so the columns must be even where some value has half width.  Tiles at the edges are smaller.
    Otherwise as `run`.

    Raises:
        CodaCallError: as `run`, or the tile's shape does not fit.
    """
    call = _bind(epilogue, inputs, dtype, extents)
    if tile[0] < 1 or tile[1] < 1 or (tile[1] % 2 and _has_half_width(epilogue)):
        raise CodaCallError(
            f"`{epilogue.name}` cannot run in tiles of {tile[0]} x {tile[1]}: both must be positive, and the columns "
            "even where a value has half width",
            argument="tile",
        )
    m, n = call.extents
    row_ranges, column_ranges = _ranges(m, tile[0]), _ranges(n, tile[1])
    grids: dict[str, list[list[Tensor]]] = {o.name: [] for o in epilogue.outputs}
    for rows in row_ranges:
        for output in epilogue.outputs:
            grids[output.name].append([])
        for columns in column_ranges:
            local = {p.name: _slice(p.type, call.values[p.name], rows, columns) for p in epilogue.params}
            for output, value in zip(epilogue.outputs, _evaluate(epilogue, local, call), strict=True):
                part = _tile_result(epilogue, output, value, len(rows), len(columns))
                grids[output.name][-1].append(part)
    outputs = {o.name: _merge(o, grids[o.name]) for o in epilogue.outputs}
    return _finish(epilogue, outputs, storage)


# ---- evaluation -----------------------------------------------------------------------------------------------------


def _evaluate(epilogue: Epilogue, values: Mapping[str, Tensor], call: _Call) -> list[Tensor]:
    """The value of each output, in order.  A value is dropped after its last use, so that long programs fit."""
    uses = epilogue.uses()
    results: dict[int, Tensor] = {}
    for index, node in enumerate(epilogue.nodes):
        if node.op == "param":
            results[index] = values[str(node.attr)]
        elif node.op == "const":
            kind = torch.bool if isinstance(node.attr, bool) else call.dtype
            results[index] = torch.tensor(node.attr, dtype=kind, device=call.device)
        else:
            results[index] = OP_FUNCTIONS[node.op](*(results[a] for a in node.args))
        for arg in node.args:
            uses[arg] -= 1
            if not uses[arg]:
                results.pop(arg, None)
    return [results[o.value] for o in epilogue.outputs]


def _tile_result(epilogue: Epilogue, output: Output, value: Tensor, rows: int, columns: int) -> Tensor:
    """What one tile of `rows` x `columns` (in units of M and N) contributes to an output."""
    wide = value.expand(rows, _scaled(epilogue.domain_width(output), columns))
    if isinstance(output, Store):
        return wide
    return REDUCTION_FUNCTIONS[output.how].fold(wide, _FOLDED_AXES[output.type.kind])


def _merge(output: Output, grid: Sequence[Sequence[Tensor]]) -> Tensor:
    """One output from its tiles' parts, `grid[i][j]` for row range i and column range j."""
    if isinstance(output, Store):
        return torch.cat([torch.cat(list(parts), dim=1) for parts in grid], dim=0)
    merge = REDUCTION_FUNCTIONS[output.how].merge
    if output.type.kind is Kind.COL:
        return torch.cat([merge(torch.stack(list(parts))) for parts in grid])
    if output.type.kind is Kind.ROW:
        return torch.cat([merge(torch.stack(list(parts))) for parts in zip(*grid, strict=True)])
    return merge(torch.stack([part for parts in grid for part in parts]))


def _finish(epilogue: Epilogue, outputs: dict[str, Tensor], storage: Storage | None) -> dict[str, Tensor]:
    if storage is not None:
        outputs = {o.name: outputs[o.name].to(storage.of(o)) for o in epilogue.outputs}
    return {name: value.contiguous() for name, value in outputs.items()}


def _ranges(extent: int, step: int) -> list[range]:
    """[0, extent) cut into steps, the last one ragged.  No elements are one empty step, whose partials are zeros."""
    return [range(start, min(start + step, extent)) for start in range(0, extent, step)] or [range(0)]


def _slice(type: ValueType, value: Tensor, rows: range, columns: range) -> Tensor:
    if type.kind.has_rows:
        value = value[rows.start : rows.stop]
    if type.width is not None:
        value = value[..., _scaled(type.width, columns.start) : _scaled(type.width, columns.stop)]
    return value


def _scaled(width: Fraction, columns: int) -> int:
    return int(width * columns)


# ---- binding a call's inputs ----------------------------------------------------------------------------------------


@attrs.frozen
class _Call:
    """Inputs in the compute dtype and in the shape of their kind, and the extents (M, N) they agree on."""

    values: dict[str, Tensor]
    extents: tuple[int, int]
    dtype: torch.dtype
    device: torch.device


@attrs.frozen
class _Extent:
    """A number bound to M or N, and what bound it."""

    value: int
    by: str


def _bind(
    epilogue: Epilogue,
    inputs: Mapping[str, Tensor | float],
    dtype: torch.dtype,
    extents: tuple[int, int] | None,
) -> _Call:
    _check_names(epilogue, inputs)
    tensors = {p.name: _as_tensor(epilogue, p, inputs[p.name]) for p in epilogue.params}
    device = _common_device(epilogue, inputs)
    bound = _bind_extents(epilogue, tensors, extents)
    values = {}
    for param in epilogue.params:
        value = tensors[param.name].to(device=device, dtype=dtype)
        values[param.name] = value.unsqueeze(1) if param.type.kind is Kind.COL else value
    return _Call(values, bound, dtype, device)


def _check_names(epilogue: Epilogue, inputs: Collection[str]) -> None:
    names = [p.name for p in epilogue.params]
    for param in epilogue.params:
        name = param.name
        if name not in inputs:
            raise CodaCallError(
                f"`{epilogue.name}` needs `{name}`: {param.type.show(epilogue.dims)}, which was not given",
                param.loc,
                argument=name,
            )
    for name in inputs:
        if name not in names:
            raise CodaCallError(
                f"`{epilogue.name}` has no parameter `{name}`; it has {', '.join(names) or 'none'}", argument=name
            )


def _as_tensor(epilogue: Epilogue, param: Param, value: Tensor | float) -> Tensor:
    """A tensor with as many axes as the parameter's kind has.  A number will do for a scalar."""
    wanted = param.type.show(epilogue.dims)
    if not isinstance(value, Tensor):
        if param.type.kind is Kind.SCALAR and isinstance(value, int | float):
            return torch.tensor(float(value), dtype=torch.float64)
        raise CodaCallError(
            f"`{param.name}` of `{epilogue.name}` is {wanted}, got {type(value).__name__}",
            param.loc,
            argument=param.name,
        )
    axes = int(param.type.kind.has_rows) + int(param.type.kind.has_columns)
    if value.dim() != axes:
        raise CodaCallError(
            f"`{param.name}` of `{epilogue.name}` is {wanted}, a tensor of {axes} axes, got shape {list(value.shape)}",
            param.loc,
            argument=param.name,
        )
    if not value.dtype.is_floating_point:
        raise CodaCallError(
            f"`{param.name}` of `{epilogue.name}` must have a floating dtype, got {value.dtype}",
            param.loc,
            argument=param.name,
        )
    return value


def _common_device(epilogue: Epilogue, inputs: Mapping[str, Tensor | float]) -> torch.device:
    """The device of the tensors; a 0-d CPU scalar may go with tensors of another device, as in torch."""
    first: tuple[str, torch.device] | None = None
    for param in epilogue.params:
        value = inputs[param.name]
        if not isinstance(value, Tensor) or (value.dim() == 0 and value.device.type == "cpu"):
            continue
        if first is None:
            first = (param.name, value.device)
        elif first[1] != value.device:
            raise CodaCallError(
                f"`{param.name}` of `{epilogue.name}` is on {value.device}, but `{first[0]}` is on {first[1]}",
                param.loc,
                argument=param.name,
            )
    return first[1] if first else torch.device("cpu")


def _bind_extents(epilogue: Epilogue, tensors: Mapping[str, Tensor], given: tuple[int, int] | None) -> tuple[int, int]:
    """(M, N) as all inputs and `given` agree.  Raises CodaCallError naming both sides of a disagreement."""
    m, n = (None, None) if given is None else (_Extent(given[0], "extents"), _Extent(given[1], "extents"))
    for param in epilogue.params:
        shape = tensors[param.name].shape
        if param.type.kind.has_rows:
            m = _agree(epilogue, param, 0, m, shape[0], Fraction(1))
        if param.type.width is not None:
            n = _agree(epilogue, param, 1, n, shape[-1], param.type.width)
    if n is not None and n.value % 2 and _has_half_width(epilogue):
        raise CodaCallError(
            f"`{epilogue.name}` has values of {epilogue.dims[1]}/2 columns, so {epilogue.dims[1]} must be even, "
            f"but `{n.by}` makes it {n.value}",
            argument=n.by,
        )
    return (_needed(epilogue, 0, m), _needed(epilogue, 1, n))


def _agree(epilogue: Epilogue, param: Param, axis: int, bound: _Extent | None, size: int, width: Fraction) -> _Extent:
    extent = Fraction(size) / width
    symbol = epilogue.dims[axis]
    wanted = f"`{param.name}` is {show_shape(param.type.kind, param.type.width, epilogue.dims)}"
    if extent.denominator != 1:
        raise CodaCallError(
            f"{wanted}, but its {size} columns are not a multiple of {width.numerator}", param.loc, argument=param.name
        )
    if bound is not None and bound.value != extent:
        notes = tuple((p.loc, "bound here") for p in epilogue.params if p.name == bound.by and p.loc)
        raise CodaCallError(
            f"{wanted} and has {size} {('rows', 'columns')[axis]}, which makes {symbol} = {extent}, "
            f"but `{bound.by}` makes {symbol} = {bound.value}",
            param.loc,
            notes=notes,
            argument=param.name,
        )
    return bound or _Extent(int(extent), param.name)


def _needed(epilogue: Epilogue, axis: int, bound: _Extent | None) -> int:
    """A bound extent.  An unbound one is an error unless there is nothing to compute."""
    if bound is not None:
        return bound.value
    if not epilogue.outputs:
        return 0
    raise CodaCallError(
        f"no input of `{epilogue.name}` determines {show_extent(Fraction(1), epilogue.dims[axis])}",
        epilogue.loc,
        hint="pass extents=(M, N)",
        argument="extents",
    )


def _has_half_width(epilogue: Epilogue) -> bool:
    types = [n.type for n in epilogue.nodes] + [o.type for o in epilogue.outputs] + [p.type for p in epilogue.params]
    return any(t.width == Fraction(1, 2) for t in types)
