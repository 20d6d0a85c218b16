"""The reference interpreter: an epilogue run with torch, whole or tile by tile, on any device.

It is the oracle for every other stage and the backend where there is no GPU.  Values keep the shape of their kind
until an op combines them:

| kind   | shape in here |
|--------|---------------|
| scalar | []            |
| row    | [w*N]         |
| col    | [M, 1]        |
| tile   | [M, w*N]      |

so torch's broadcasting is the language's, and `even`, `odd`, `join` and the group ops act on the last axis.  Everything
is torch ops, hence differentiable by torch.autograd.  The gradient of a maximum goes to the first place that it is at.
Floats are computed in `dtype`, indices in int32.

`storage` turns on the *rounding mode*: what is stored is rounded as the kernel rounds it, and nothing else is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

import attrs
import torch
from torch import Tensor

from codalang.errors import CodaCallError
from codalang.ir.epilogue import Epilogue, Node, Output, Param, Reduce, State, Store
from codalang.ir.ops import OPS
from codalang.ir.states import Function, StateDef
from codalang.ir.types import Dtype, Kind, ValueType, show_extent, show_shape

TORCH_DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
}


def _join(a: Tensor, b: Tensor) -> Tensor:
    """Interleave columns: a's become the even ones, b's the odd ones."""
    pair = torch.stack(torch.broadcast_tensors(a, b), dim=-1)
    return pair.reshape(*pair.shape[:-2], 2 * pair.shape[-2])


class _Rounded(torch.autograd.Function):
    """Rounding to a storage dtype and back; its derivative is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _grouped(x: Tensor, group: int, fold: Callable[[Tensor], Tensor]) -> Tensor:
    """Fold groups of adjacent columns; every column gets its group's result."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    return fold(groups).expand(groups.shape).reshape(x.shape)


# Called with the operands, and with the attribute where the op has one.
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
    "sin": torch.sin,
    "cos": torch.cos,
    "pow": torch.pow,
    "cast": lambda x, dtype: _Rounded.apply(x, TORCH_DTYPES[dtype]),
    "group_sum": lambda x, group: _grouped(x, group, lambda groups: groups.sum(-1, keepdim=True)),
    "group_max": lambda x, group: _grouped(x, group, lambda groups: groups.amax(-1, keepdim=True)),
    "stop_gradient": Tensor.detach,
    "even": lambda x: x[..., 0::2],
    "odd": lambda x: x[..., 1::2],
    "join": _join,
}


# Ops whose result is made here, of where a tile is or of what is computed in.
PLACED = ("row_index", "col_index", "float")


def _largest(x: Tensor, axes: Sequence[int]) -> Tensor:
    """The maximum over some axes, of nothing -inf."""
    if any(x.shape[axis] == 0 for axis in axes):
        return x.new_full([size for axis, size in enumerate(x.shape) if axis not in axes], -math.inf)
    flat = x.flatten() if len(axes) > 1 else x
    return flat.max(dim=axes[0]).values  # not amax, whose gradient is shared among all places


# How a reduction folds axes of a tile, and merges the partials of several tiles, which are stacked along axis 0.
REDUCTION_FUNCTIONS: dict[str, Callable[[Tensor, Sequence[int]], Tensor]] = {
    "sum": lambda x, axes: x.sum(tuple(axes)),
    "max": _largest,
    "min": lambda x, axes: -_largest(-x, axes),
}

# The axes of [M, w*N] that a reduction to each kind folds away.
_FOLDED_AXES: dict[Kind, tuple[int, ...]] = {Kind.COL: (1,), Kind.ROW: (0,), Kind.SCALAR: (0, 1)}


@attrs.frozen
class Storage:
    """The dtypes that outputs are rounded to.

    Attributes:
        default: dtype of a stored tile that has no annotation (A's dtype, or the accumulator tensor's).
        dtypes: output name -> dtype, for outputs whose dtype the caller decides; it wins over an annotation.
    """

    default: torch.dtype
    dtypes: Mapping[str, torch.dtype] = attrs.field(factory=dict)

    def of(self, output: Output) -> torch.dtype:
        """The dtype in which an output is stored: the caller's, the annotation's, or by default that of `default` for a
        tile, int32 for an index, and float32 for any other vector or scalar."""
        if output.name in self.dtypes:
            return self.dtypes[output.name]
        if output.dtype is not None:
            return TORCH_DTYPES[output.dtype]
        if output.type.dtype is Dtype.I32:
            return torch.int32
        return self.default if output.type.kind is Kind.TILE else torch.float32


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
            [] or a number; any strides; any floating dtype, int32 or int64 for an index, bool for a mask.
        dtype: what is computed in.
        extents: (M, N), needed where no input determines one of them.
        storage: rounds the outputs as the kernel does; without it they keep `dtype`.

    Returns:
        The outputs by name in textual order, contiguous: tiles [M, w*N], rows [w*N], cols [M], scalars [].

    Raises:
        CodaCallError: an input is missing, unknown, of the wrong shape, dtype or device, or extents are undetermined.
    """
    call = _bind(epilogue, inputs, dtype, extents)
    whole = _Tile(range(call.extents[0]), range(call.extents[1]))
    parts = _tile_results(epilogue, call.values, call, whole)
    return _finish(epilogue, {o.name: _merge(epilogue, o, [[parts]], call) for o in epilogue.outputs}, storage)


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
    columns, so the columns must be even where some value has half width, and each group of columns must lie in one
    tile.  Tiles at the edges are smaller.  Otherwise as `run`.

    Raises:
        CodaCallError: as `run`, or the tile's shape does not fit.
    """
    call = _bind(epilogue, inputs, dtype, extents)
    if tile[0] < 1 or tile[1] < 1 or tile[1] % _granularity(epilogue):
        raise CodaCallError(
            f"`{epilogue.name}` cannot run in tiles of {tile[0]} x {tile[1]}: both must be positive, and the columns a "
            f"multiple of {_granularity(epilogue)}, for its half-width values and its groups",
            argument="tile",
        )
    m, n = call.extents
    grid = [
        [
            _tile_results(epilogue, _sliced(epilogue, call, rows, columns), call, _Tile(rows, columns))
            for columns in _ranges(n, tile[1])
        ]
        for rows in _ranges(m, tile[0])
    ]
    return _finish(epilogue, {o.name: _merge(epilogue, o, grid, call) for o in epilogue.outputs}, storage)


# ---- evaluation -----------------------------------------------------------------------------------------------------


@attrs.frozen
class _Tile:
    """The rows and columns, in units of (M, N), that are evaluated at once."""

    rows: range
    columns: range


def evaluate(
    function: Function, values: Sequence[Tensor], dtype: torch.dtype = torch.float64, device: torch.device | None = None
) -> list[Tensor]:
    """The results of a scalar function, elementwise on tensors that broadcast.

    Args:
        function: update, merge, finalize or vjp of a stateful transform.
        values: of each parameter, in order.
        dtype, device: of its float literals.
    """
    named = {name: value for (name, _), value in zip(function.params, values, strict=True)}
    nothing = _Tile(range(0), range(0))
    return _evaluate(function.nodes, function.results, named, dtype, device or torch.device("cpu"), nothing)


def _evaluate(
    nodes: Sequence[Node],
    roots: Sequence[int],
    values: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    tile: _Tile,
) -> list[Tensor]:
    """The value of each root, in order.  A value is dropped after its last use, so that long programs fit."""
    uses = Counter([arg for node in nodes for arg in node.args] + list(roots))
    results: dict[int, Tensor] = {}
    for index, node in enumerate(nodes):
        if node.op == "param":
            results[index] = values[str(node.attr)]
        elif node.op == "const":
            results[index] = torch.tensor(node.attr, dtype=_register(node.type.dtype, dtype), device=device)
        elif node.op in PLACED:
            results[index] = _placed(node, [results[a] for a in node.args], dtype, device, tile)
        else:
            attribute = () if OPS[node.op].attr is None else (node.attr,)
            results[index] = OP_FUNCTIONS[node.op](*(results[a] for a in node.args), *attribute)
        for arg in node.args:
            uses[arg] -= 1
            if not uses[arg]:
                results.pop(arg, None)
    return [results[root] for root in roots]


def _placed(node: Node, operands: Sequence[Tensor], dtype: torch.dtype, device: torch.device, tile: _Tile) -> Tensor:
    """Row and column indices count in the whole output; an index as a number is in the dtype of the computation."""
    if node.op == "float":
        return operands[0].to(dtype)
    along = tile.rows if node.op == "row_index" else tile.columns
    index = torch.arange(along.start, along.stop, dtype=torch.int32, device=device)
    return index.unsqueeze(1) if node.op == "row_index" else index


def _register(wanted: Dtype, dtype: torch.dtype) -> torch.dtype:
    """What torch computes a register dtype in."""
    return {Dtype.F32: dtype, Dtype.I32: torch.int32, Dtype.BOOL: torch.bool}[wanted]


# ---- outputs --------------------------------------------------------------------------------------------------------

# What a tile contributes to each output: a stored tile or vector, a partial reduction, or carried values.
_Parts = dict[str, tuple[Tensor, ...]]


def _tile_results(epilogue: Epilogue, values: Mapping[str, Tensor], call: _Call, tile: _Tile) -> _Parts:
    """What one tile contributes to each output."""
    roots = [value for output in epilogue.outputs for value in output.values]
    found = iter(_evaluate(epilogue.nodes, roots, values, call.dtype, call.device, tile))
    folded: dict[object, tuple[Tensor, ...]] = {}
    parts: _Parts = {}
    for output in epilogue.outputs:
        shape = (len(tile.rows), _scaled(epilogue.domain_width(output), len(tile.columns)))
        operands = [next(found) for _ in output.values]
        if isinstance(output, State):
            key = _transform(output)
            if key not in folded:
                axes = _FOLDED_AXES[output.type.kind]
                folded[key] = _folded(output.definition, [v.expand(shape) for v in operands], axes, call)
            parts[output.name] = folded[key]
        elif isinstance(output, Reduce):
            fold = REDUCTION_FUNCTIONS[output.how]
            parts[output.name] = (fold(operands[0].expand(shape), _FOLDED_AXES[output.type.kind]),)
        else:
            parts[output.name] = (_stored(output.type.kind, operands[0], shape),)
    return parts


def _transform(output: State) -> object:
    """What results of one stateful transform have in common."""
    return output.values, output.definition, output.type.kind, output.type.width


def _stored(kind: Kind, value: Tensor, shape: tuple[int, int]) -> Tensor:
    """A value broadcast to what is stored: tiles [rows, columns], rows [columns], cols [rows], scalars []."""
    if kind is Kind.TILE:
        return value.expand(shape)
    if kind is Kind.COL:
        return value.expand(shape[0], 1).squeeze(1)
    return value.expand(shape[1]) if kind is Kind.ROW else value


def _folded(definition: StateDef, inputs: list[Tensor], axes: Sequence[int], call: _Call) -> tuple[Tensor, ...]:
    """The values that a stateful transform carries after a tile: one update per element, merged pair by pair."""
    initial = _initial(definition, call)
    if len(axes) > 1:
        inputs = [value.flatten() for value in inputs]
    carried = evaluate(definition.update, [*initial, *inputs], call.dtype, call.device)
    carried = [c.expand(inputs[0].shape) for c in carried]
    return _merged(definition, carried, axes[0], call)


def _merged(definition: StateDef, carried: Sequence[Tensor], axis: int, call: _Call) -> tuple[Tensor, ...]:
    """Merge partial results that lie along an axis: neighbours first, so that the depth is logarithmic."""
    while carried[0].shape[axis] > 1:
        size = carried[0].shape[axis]
        pairs = [c.narrow(axis, 0, size - size % 2).unflatten(axis, (size // 2, 2)) for c in carried]
        left, right = ([p.select(axis + 1, side) for p in pairs] for side in (0, 1))
        merged = evaluate(definition.merge, [*left, *right], call.dtype, call.device)
        merged = [m.expand(side.shape) for m, side in zip(merged, left, strict=True)]
        if size % 2:
            rest = [c.narrow(axis, size - 1, 1) for c in carried]
            merged = [torch.cat(pair, dim=axis) for pair in zip(merged, rest, strict=True)]
        carried = merged
    if not carried[0].shape[axis]:
        shape = [size for other, size in enumerate(carried[0].shape) if other != axis]
        return tuple(initial.expand(shape) for initial in _initial(definition, call))
    return tuple(c.select(axis, 0) for c in carried)


def _initial(definition: StateDef, call: _Call) -> list[Tensor]:
    return [
        torch.tensor(value, dtype=_register(dtype, call.dtype), device=call.device)
        for value, (_, dtype) in zip(definition.initial, definition.carried, strict=True)
    ]


def _merge(epilogue: Epilogue, output: Output, grid: Sequence[Sequence[_Parts]], call: _Call) -> Tensor:
    """One output from its tiles' parts, `grid[i][j]` for row range i and column range j."""
    parts = [[results[output.name] for results in line] for line in grid]
    kind = output.type.kind
    if isinstance(output, Store):
        return _assembled(kind, [[part[0] for part in line] for line in parts])
    if kind is Kind.COL:
        return torch.cat([_combined(output, line, call) for line in parts])
    if kind is Kind.ROW:
        return torch.cat([_combined(output, line, call) for line in zip(*parts, strict=True)])
    return _combined(output, [part for line in parts for part in line], call)


def _assembled(kind: Kind, parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """What was stored; a vector is the same in all tiles along the axis that it lacks."""
    if kind is Kind.TILE:
        return torch.cat([torch.cat(list(line), dim=1) for line in parts], dim=0)
    if kind is Kind.COL:
        return torch.cat([line[0] for line in parts])
    return torch.cat(list(parts[0])) if kind is Kind.ROW else parts[0][0]


def _combined(output: Reduce | State, parts: Sequence[tuple[Tensor, ...]], call: _Call) -> Tensor:
    """The final value of a reduction, or of a result of a stateful transform, from the partials of several tiles."""
    stacked = [torch.stack(list(partials)) for partials in zip(*parts, strict=True)]
    if isinstance(output, Reduce):
        return REDUCTION_FUNCTIONS[output.how](stacked[0], (0,))
    carried = _merged(output.definition, stacked, 0, call)
    result = evaluate(output.definition.finalize, carried, call.dtype, call.device)[output.result]
    return result.expand(carried[0].shape)


def _finish(epilogue: Epilogue, outputs: dict[str, Tensor], storage: Storage | None) -> dict[str, Tensor]:
    if storage is not None:
        outputs = {o.name: outputs[o.name].to(storage.of(o)) for o in epilogue.outputs}
    return {name: value.contiguous() for name, value in outputs.items()}


def _ranges(extent: int, step: int) -> list[range]:
    """[0, extent) cut into steps, the last one ragged.  No elements are one empty step, whose partials are zeros."""
    return [range(start, min(start + step, extent)) for start in range(0, extent, step)] or [range(0)]


def _sliced(epilogue: Epilogue, call: _Call, rows: range, columns: range) -> dict[str, Tensor]:
    """The part of each input that a tile sees."""
    return {p.name: _slice(p.type, call.values[p.name], rows, columns) for p in epilogue.params}


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
        value = tensors[param.name].to(device=device, dtype=_register(param.type.dtype, dtype))
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
    numbers = _NUMBERS[param.type.dtype]
    if not isinstance(value, Tensor):
        if param.type.kind is Kind.SCALAR and isinstance(value, numbers.python) and not numbers.refuses(value):
            return torch.tensor(value, dtype=numbers.exact)
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
    if not numbers.accepts(value.dtype):
        raise CodaCallError(
            f"`{param.name}` of `{epilogue.name}` must have {numbers.described}, got {value.dtype}",
            param.loc,
            argument=param.name,
        )
    return value


@attrs.frozen
class _Numbers:
    """What may be passed for a parameter of a register dtype: tensors of some dtypes, or a Python number."""

    described: str
    accepts: Callable[[torch.dtype], bool]
    python: tuple[type, ...]
    exact: torch.dtype

    def refuses(self, value: object) -> bool:
        """A truth value is a number to Python only."""
        return isinstance(value, bool) and bool not in self.python


_NUMBERS = {
    Dtype.F32: _Numbers("a floating dtype", lambda d: d.is_floating_point, (int, float, bool), torch.float64),
    Dtype.I32: _Numbers("dtype int32 or int64", lambda d: d in (torch.int32, torch.int64), (int,), torch.int64),
    Dtype.BOOL: _Numbers("dtype bool", lambda d: d is torch.bool, (bool,), torch.bool),
}


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
    _check_groups(epilogue, n)
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


def _check_groups(epilogue: Epilogue, n: _Extent | None) -> None:
    """Groups divide the columns."""
    for node in epilogue.nodes:
        if n is None or OPS.get(node.op) is None or OPS[node.op].attr != "group":
            continue
        columns = Fraction(n.value) * (node.type.width or 1)
        if columns % int(node.attr):  # type: ignore[arg-type]
            raise CodaCallError(
                f"`{node.op}` of `{epilogue.name}` has groups of {node.attr} columns, which must divide the {columns} "
                f"columns that `{n.by}` brings",
                node.loc,
                argument=n.by,
            )


def _granularity(epilogue: Epilogue) -> int:
    """The columns of a tile, in units of N, are a multiple of this: no pair of columns and no group is cut."""
    steps = [2 if _has_half_width(epilogue) else 1]
    for node in epilogue.nodes:
        if node.op in OPS and OPS[node.op].attr == "group":
            steps.append(math.ceil(int(node.attr) / (node.type.width or 1)))  # type: ignore[arg-type]
    return math.lcm(*steps)
