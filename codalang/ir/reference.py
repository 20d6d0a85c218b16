"""The reference interpreter: an epilogue run with torch, whole or tile by tile, on any device.

It is the oracle for every other stage and the backend where there is no GPU.  Values keep the shape of their kind
until an op combines them:

| kind   | shape in here |
|--------|---------------|
| scalar | []            |
| row    | [w*N]         |
| col    | [M, 1]        |
| tile   | [M, w*N]      |
| rows   | [M, w*N]      |

so torch's broadcasting is the language's, and `even`, `odd`, `join` and the group ops act on the last axis.  Everything
is torch ops, hence differentiable by torch.autograd.  The gradient of a maximum goes to the first place that it is at.
Floats are computed in `dtype`, indices in int32.

`storage` turns on the *rounding mode*: what is stored is rounded as the kernel rounds it, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import attrs
import torch
from torch import Tensor

from codalang.errors import CodaCallError
from codalang.ir.bind import Call, bind, granularity
from codalang.ir.epilogue import Epilogue, Output, Reduce, Store
from codalang.ir.evaluate import TORCH_DTYPES, Context, evaluate_function, evaluate_nodes
from codalang.ir.fold import REDUCTION_FUNCTIONS, contribution, merged
from codalang.ir.types import Dtype, Kind, ValueType

__all__ = ["TORCH_DTYPES", "Storage", "run", "run_tiled"]


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
    extents: tuple[int, ...] | None = None,
    storage: Storage | None = None,
) -> dict[str, Tensor]:
    """Run an epilogue on whole matrices.

    Args:
        epilogue: what to run.
        inputs: every parameter by name, the accumulator included: a tile [M, w*N], a row [w*N], a col [M], a scalar
            [] or a number, one row per sample [B, w*N]; any strides; any floating dtype, int32 or int64 for an index,
            bool for a mask.
        dtype: what is computed in.
        extents: (M, N), needed where no input determines one of them; (M, N, B) where none determines the samples.
        storage: rounds the outputs as the kernel does; without it they keep `dtype`.

    Returns:
        The outputs by name in textual order, contiguous: tiles [M, w*N], rows [w*N], cols [M], scalars [], one row per
        sample [B, w*N].

    Raises:
        CodaCallError: an input is missing, unknown, of the wrong shape, dtype or device, or extents are undetermined.
    """
    call = bind(epilogue, inputs, dtype, extents)
    parts = _tile_results(epilogue, call.values, call.whole)
    return _finish(epilogue, {o.name: _assembled(o, [[parts]], call.whole) for o in epilogue.outputs}, storage)


def run_tiled(
    epilogue: Epilogue,
    inputs: Mapping[str, Tensor | float],
    *,
    tile: tuple[int, int],
    dtype: torch.dtype = torch.float64,
    extents: tuple[int, ...] | None = None,
    storage: Storage | None = None,
) -> dict[str, Tensor]:
    """Run an epilogue as the kernel does: one tile of the output after another, their partial results merged after.

    `tile` is rows and columns of a tile in units of (M, N): a value of width w is cut into tiles of w times as many
    columns, so the columns must be even where some value has half width, and each group of columns must lie in one
    tile.  Tiles at the edges are smaller.  Otherwise as `run`.

    Raises:
        CodaCallError: as `run`, or the tile's shape does not fit.
    """
    call = bind(epilogue, inputs, dtype, extents)
    step = granularity(epilogue)
    if tile[0] < 1 or tile[1] < 1 or tile[1] % step:
        raise CodaCallError(
            f"`{epilogue.name}` cannot run in tiles of {tile[0]} x {tile[1]}: both must be positive, and the columns a "
            f"multiple of {step} for its half-width values and its groups",
            argument="tile",
        )
    grid = [
        [
            _tile_results(epilogue, *_cut(epilogue, call, rows, columns))
            for columns in _ranges(call.whole.columns, tile[1])
        ]
        for rows in _ranges(call.whole.rows, tile[0])
    ]
    return _finish(epilogue, {o.name: _assembled(o, grid, call.whole) for o in epilogue.outputs}, storage)


def _finish(epilogue: Epilogue, outputs: dict[str, Tensor], storage: Storage | None) -> dict[str, Tensor]:
    if storage is not None:
        outputs = {o.name: outputs[o.name].to(storage.of(o)) for o in epilogue.outputs}
    return {name: value.contiguous() for name, value in outputs.items()}


# ---- one tile --------------------------------------------------------------------------------------------------------

# What a tile contributes to each output: a stored tile or vector, a partial reduction, or carried values.
_Parts = dict[str, tuple[Tensor, ...]]


def _tile_results(epilogue: Epilogue, values: Mapping[str, Tensor], context: Context) -> _Parts:
    """What one tile, of the context's rows and columns, contributes to each output."""
    roots = [value for output in epilogue.outputs for value in output.values]
    found = iter(evaluate_nodes(epilogue.nodes, roots, values, context))
    carried: dict[object, tuple[Tensor, ...]] = {}
    parts: _Parts = {}
    for output in epilogue.outputs:
        shape = (len(context.rows), _scaled(epilogue.domain_width(output), len(context.columns)))
        operands = [next(found) for _ in output.values]
        if isinstance(output, Store):
            parts[output.name] = (_stored(output.type.kind, operands[0], shape),)
            continue
        wide = [value.expand(shape) for value in operands]
        if isinstance(output, Reduce):
            parts[output.name] = contribution(output, wide, context)
            continue
        transform = (output.values, output.definition, output.type.kind, output.type.width)
        if transform not in carried:  # results of one transform are folded once
            carried[transform] = contribution(output, wide, context)
        parts[output.name] = carried[transform]
    return parts


def _stored(kind: Kind, value: Tensor, shape: tuple[int, int]) -> Tensor:
    """A value broadcast to what is stored: tiles [rows, columns], rows [columns], cols [rows], scalars []."""
    if kind is Kind.TILE:
        return value.expand(shape)
    if kind is Kind.COL:
        return value.expand(shape[0], 1).squeeze(1)
    return value.expand(shape[1]) if kind is Kind.ROW else value


# ---- tiles put together ----------------------------------------------------------------------------------------------


def _assembled(output: Output, grid: Sequence[Sequence[_Parts]], context: Context) -> Tensor:
    """One output from its tiles' parts, `grid[i][j]` for row range i and column range j."""
    parts = [[results[output.name] for results in line] for line in grid]
    kind = output.type.kind
    if kind is Kind.TILE:
        return torch.cat([torch.cat([part[0] for part in line], dim=1) for line in parts], dim=0)
    if kind is Kind.COL:
        return torch.cat([_combined(output, line, context) for line in parts])
    if kind in (Kind.ROW, Kind.ROWS):
        return torch.cat([_combined(output, line, context) for line in zip(*parts, strict=True)], dim=-1)
    return _combined(output, [part for line in parts for part in line], context)


def _combined(output: Output, parts: Sequence[tuple[Tensor, ...]], context: Context) -> Tensor:
    """The final value of a vector from what the tiles along the axes that it lacks contribute."""
    if isinstance(output, Store):
        return parts[0][0]  # all tiles store the same
    stacked = [torch.stack(list(partials)) for partials in zip(*parts, strict=True)]
    if isinstance(output, Reduce):
        return REDUCTION_FUNCTIONS[output.how](stacked[0], (0,))
    carried = merged(output.definition, stacked, 0, context)
    return evaluate_function(output.definition.finalize, carried, context)[output.result].expand(carried[0].shape)


# ---- cutting tiles ---------------------------------------------------------------------------------------------------


def _ranges(whole: range, step: int) -> list[range]:
    """[0, extent) cut into steps, the last one ragged.  No elements are one empty step: it contributes identities."""
    return [whole[start : start + step] for start in range(0, len(whole), step)] or [range(0)]


def _cut(epilogue: Epilogue, call: Call, rows: range, columns: range) -> tuple[dict[str, Tensor], Context]:
    """What a tile sees of the inputs, and its context."""
    values = {p.name: _slice(p.type, call.values[p.name], rows, columns) for p in epilogue.params}
    return values, attrs.evolve(call.whole, rows=rows, columns=columns)


def _slice(type: ValueType, value: Tensor, rows: range, columns: range) -> Tensor:
    if type.kind.has_rows:
        value = value[rows.start : rows.stop]
    if type.width is not None:
        value = value[..., _scaled(type.width, columns.start) : _scaled(type.width, columns.stop)]
    return value


def _scaled(width: Fraction, columns: int) -> int:
    return int(width * columns)
