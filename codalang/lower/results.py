"""How a kernel's buffers become outputs: where each is allocated or given, and how partials are merged.

Reductions come from the kernels as one partial per tile, and are merged over them in a fixed order by a small kernel
(`merge`); of a great many, torch's own reduction makes sums, maxima and minima in less time.  Those that the caller
takes unmerged are given as they come; `vector` merges them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from codalang.ir.epilogue import Reduce, State
from codalang.ir.types import Kind
from codalang.lower.call import Buffer, Finish, Given, Result, as_is, new
from codalang.lower.dtypes import DTYPE_NAMES, RESULT_DTYPES
from codalang.lower.folded import Matrix, box
from codalang.lower.shape import Shape
from codalang.lower.spec import PLAIN, SLAB_ROWS, Folding, KernelSpec, folds, merge_spec

MOST_PARTS = {False: 1024, True: 32768}  # that the kernel merges of sums, maxima, minima; whether to a scalar

Compiled = Callable[[KernelSpec], Callable[..., None]]  # the function of a kernel


def results_of(
    shape: Shape,
    storage: Mapping[str, torch.dtype],
    tile: tuple[int, int],
    out: Mapping[str, torch.Tensor],
    foldings: Sequence[Folding],
    compiled: Compiled,
    *,
    padded: bool,
    on_gemm: bool,
) -> tuple[Result, ...]:
    """Results in the order of the kernel's signature, for a grid of such tiles and stores that are folded so.

    `padded`: TMA stores the tiles.  `compiled` gives the kernels that merge.
    """
    found = []
    for store, folding in zip(shape.epilogue.stores, foldings, strict=True):
        dtype, columns = storage[store.name], shape.columns(store.type.width)
        unit = 16 // dtype.itemsize if padded else 1
        pitch = -(-columns // unit) * unit
        if folding != PLAIN:
            place = box(Matrix(out[store.name], out[store.name].ndim - 1))
            assert place is not None
            buffer = Buffer(place.shape, dtype, given=store.name, stride=place.stride)
            found.append(Result((store.name,), (buffer,), as_is, (dtype,)))
        elif pitch == columns:
            direct = store.name in out and out[store.name].is_contiguous()
            direct = direct and not (padded and out[store.name].data_ptr() % 16)
            buffer = Buffer((shape.m, columns), dtype, given=store.name if direct else None)
            found.append(Result((store.name,), (buffer,), as_is, (dtype,)))
        else:
            found.append(Result((store.name,), (Buffer((shape.m, pitch), dtype, columns),), _whole, (dtype,)))
    for vector in shape.epilogue.vectors:
        dtype = storage[vector.name] if storage[vector.name] in DTYPE_NAMES else torch.float32
        given = vector.name if vector.name in out and dtype is storage[vector.name] else None
        buffer = Buffer((1, *(shape.of(vector) or (1,))), dtype, given=given)
        is_scalar = vector.type.kind is Kind.SCALAR
        found.append(Result((vector.name,), (buffer,), _only if is_scalar else _first, (storage[vector.name],)))
    tiles_m, tiles_n = -(-shape.m // tile[0]), -(-shape.n // tile[1])
    per_sample = 0
    if any(group[0].type.kind is Kind.ROWS for group in folds(shape.epilogue)):
        size = shape.m // shape.samples
        per_sample = size // SLAB_ROWS if on_gemm else -(-size // tile[0])
        tiles_m = tiles_m if on_gemm else shape.samples * per_sample
    for group in folds(shape.epilogue):
        kind, width = group[0].type.kind, group[0].type.width
        partials = {
            Kind.COL: (tiles_n, shape.m),
            Kind.ROW: (tiles_m, shape.columns(width)),
            Kind.SCALAR: (tiles_m, tiles_n),
            Kind.ROWS: (per_sample, shape.samples * shape.columns(width)),
        }[kind]
        dtypes = tuple(storage[o.name] for o in group)
        parts = math.prod(partials) if kind is Kind.SCALAR else partials[0]
        finish, carried = _fold(shape, group, kind, parts, compiled)
        buffers = tuple(Buffer(partials, dtype) for dtype in carried)
        found.append(Result(tuple(o.name for o in group), buffers, finish, dtypes))
    return tuple(found)


def _fold(
    shape: Shape, group: tuple[Reduce | State, ...], kind: Kind, parts: int, compiled: Compiled
) -> tuple[Finish, tuple[torch.dtype, ...]]:
    """How so many partials of a reduction are merged, and the dtypes of what it carries."""
    first, is_scalar = group[0], kind is Kind.SCALAR
    if first.name in shape.unmerged:
        return as_is, (torch.float32,)
    if kind is Kind.ROWS:
        merged, carried = _fold(shape, group, Kind.ROW, parts, compiled)
        return _by_sample(shape.samples, merged), carried
    if isinstance(first, State):
        dtypes = tuple(RESULT_DTYPES[dtype.value] for _, dtype in first.definition.carried)
        results = [RESULT_DTYPES[dtype.value] for _, dtype in first.definition.results]
        chosen = [o.result for o in group if isinstance(o, State)]
    elif parts == 1:
        return _only if is_scalar else _first, (torch.float32,)
    elif parts > MOST_PARTS[is_scalar]:
        return _by_torch(_REDUCTIONS[first.how], (0, 1) if is_scalar else (0,)), (torch.float32,)
    else:
        dtypes, results, chosen = (torch.float32,), [torch.float32], [0]
    merge, device = compiled(merge_spec(first, shape.epilogue.precise)), shape.device

    def finish(partials: list[torch.Tensor], out: Given) -> Iterable[torch.Tensor]:
        if is_scalar:
            partials = [p.reshape(-1, 1) for p in partials]
        outputs = [new((1, partials[0].shape[1]), d, device) for d in results]
        for i, target in zip(chosen, out or (), strict=False):
            if target is not None and target.dtype is results[i]:
                outputs[i] = target.view(1, -1)
        merge(tuple(partials), tuple(outputs))
        return [outputs[i][0, 0] if is_scalar else outputs[i][0] for i in chosen]

    return finish, dtypes


def _by_sample(samples: int, finish: Finish) -> Finish:
    """What a reduction of all samples side by side gives, as one row for each."""

    def finish_samples(partials: list[torch.Tensor], out: Given) -> Iterable[torch.Tensor]:
        flat = [None if target is None else target.view(-1) for target in out or ()]
        return [result.view(samples, -1) for result in finish(partials, flat)]

    return finish_samples


def _whole(buffers: list[torch.Tensor], out: Given) -> Iterable[torch.Tensor]:
    return [buffers[0].contiguous()]


def _first(buffers: list[torch.Tensor], out: Given) -> Iterable[torch.Tensor]:
    return [buffers[0][0]]


def _only(buffers: list[torch.Tensor], out: Given) -> Iterable[torch.Tensor]:
    return [buffers[0][0, 0]]


_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def _by_torch(how: Callable[..., torch.Tensor], axes: tuple[int, ...]) -> Finish:
    def finish(buffers: list[torch.Tensor], out: Given) -> Iterable[torch.Tensor]:
        partial, target = buffers[0], out[0] if out else None
        if target is not None and target.dtype is partial.dtype:
            return [how(partial, axes, out=target)]
        return [how(partial, axes)]

    return finish
