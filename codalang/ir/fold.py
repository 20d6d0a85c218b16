"""Folding values over the rows or columns of a tile, and merging the results of several tiles.

The gradient of a maximum goes to the first place that it is at, as that of torch.max(dim) does.  A stateful transform
is folded as its definition lets it be: an update of the initial values by each element, all at once, whose results
merge neighbour by neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from codalang.ir.epilogue import Reduce, State
from codalang.ir.evaluate import Context, evaluate_function
from codalang.ir.states import StateDef
from codalang.ir.types import Kind

# The axes of [M, w*N] that a reduction to each kind folds away; to one row per sample, of each sample's part of it.
FOLDED_AXES: dict[Kind, tuple[int, ...]] = {Kind.COL: (1,), Kind.ROW: (0,), Kind.SCALAR: (0, 1), Kind.ROWS: (0,)}


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


def contribution(output: Reduce | State, values: list[Tensor], context: Context) -> tuple[Tensor, ...]:
    """What a tile contributes to a reduction, and for a state all that it carries: [columns], [rows], [], or [samples,
    columns] for one row per sample."""
    axes = FOLDED_AXES[output.type.kind]
    if output.type.kind is not Kind.ROWS:
        return _fold(output, values, axes, context)
    parts = []
    for sample in context.samples:
        first, last = (min(max(row - context.rows.start, 0), len(context.rows)) for row in (sample.start, sample.stop))
        parts.append(_fold(output, [value[first:last] for value in values], axes, context))
    if not parts:
        nothing = _fold(output, [value[:0] for value in values], axes, context)
        return tuple(part.expand(0, *part.shape) for part in nothing)
    return tuple(torch.stack(components) for components in zip(*parts, strict=True))


def _fold(output: Reduce | State, values: list[Tensor], axes: Sequence[int], context: Context) -> tuple[Tensor, ...]:
    if isinstance(output, Reduce):
        return (REDUCTION_FUNCTIONS[output.how](values[0], axes),)
    return folded(output.definition, values, axes, context)


def folded(definition: StateDef, inputs: list[Tensor], axes: Sequence[int], context: Context) -> tuple[Tensor, ...]:
    """The values that a stateful transform carries after a tile: one update per element, merged pair by pair."""
    initial = initial_values(definition, context)
    if len(axes) > 1:
        inputs = [value.flatten() for value in inputs]
    carried = evaluate_function(definition.update, [*initial, *inputs], context)
    carried = [c.expand(inputs[0].shape) for c in carried]
    return merged(definition, carried, axes[0], context)


def merged(definition: StateDef, carried: Sequence[Tensor], axis: int, context: Context) -> tuple[Tensor, ...]:
    """Merge partial results that lie along an axis: neighbours first, so that the depth is logarithmic."""
    while carried[0].shape[axis] > 1:
        size = carried[0].shape[axis]
        pairs = [c.narrow(axis, 0, size - size % 2).unflatten(axis, (size // 2, 2)) for c in carried]
        left, right = ([p.select(axis + 1, side) for p in pairs] for side in (0, 1))
        halved = evaluate_function(definition.merge, [*left, *right], context)
        halved = [h.expand(side.shape) for h, side in zip(halved, left, strict=True)]
        if size % 2:
            rest = [c.narrow(axis, size - 1, 1) for c in carried]
            halved = [torch.cat(pair, dim=axis) for pair in zip(halved, rest, strict=True)]
        carried = halved
    if not carried[0].shape[axis]:
        shape = [size for other, size in enumerate(carried[0].shape) if other != axis]
        return tuple(initial.expand(shape) for initial in initial_values(definition, context))
    return tuple(c.select(axis, 0) for c in carried)


def initial_values(definition: StateDef, context: Context) -> list[Tensor]:
    """What is carried before any element."""
    return [
        torch.tensor(value, dtype=context.torch_dtype(dtype), device=context.device)
        for value, (_, dtype) in zip(definition.initial, definition.carried, strict=True)
    ]
