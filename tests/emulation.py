"""Kernels on the CPU: what stands in for a compiled function where there is no GPU.

Computes as the real one does: tile by tile, one partial per tile and carried value, into the buffers that it is given,
and merges partials in a kernel of its own.  Values are those of the reference, in f64 or f32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import attrs
import torch
from torch import Tensor

from codalang.ir import reference
from codalang.ir.bind import Call, bind
from codalang.ir.epilogue import Epilogue, Reduce, State
from codalang.ir.evaluate import Context, evaluate_function
from codalang.ir.fold import REDUCTION_FUNCTIONS, merged
from codalang.ir.types import Kind, ValueType
from codalang.lower import balance, call, decide, plan, run, split
from codalang.lower.spec import PLAIN, SLAB_ROWS, Folding, KernelSpec, base_width, foldings_fit, folds, loaded_params


@contextlib.contextmanager
def emulated(dtype: torch.dtype = torch.float64) -> Iterator[list[KernelSpec]]:
    """`lower.run` runs on the CPU in `dtype`, its buffers poisoned; yields the kernels that were asked for."""
    specs: list[KernelSpec] = []

    def function(spec: KernelSpec) -> Callable[..., None]:
        specs.append(spec)
        kernel = _merge if spec.merge is not None else _main if spec.parts is None else _vector
        return lambda *arguments: kernel(spec, dtype, *arguments)

    originals = run.function, call.empty, decide._sms
    run.function, call.empty, decide._sms = function, poisoned, lambda device: 132
    try:
        yield specs
    finally:
        run.function, call.empty, decide._sms = originals


def poisoned(shape: tuple[int, ...], strides: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that shows what was not written."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else -(2**30), dtype=dtype, device=device)


def _main(spec: KernelSpec, compute: torch.dtype, *arguments: object) -> None:
    """The kernel of a spec: (a, b, inputs, outputs, clusters) on a GEMM, (inputs, outputs, m, n) hosted."""
    epilogue, base = spec.epilogue, base_width(spec.epilogue)
    given = {}
    if spec.operand:
        a, b, inputs, outputs, (clusters, *numbers) = arguments
        assert clusters == 132 // (spec.config.cluster[0] * spec.config.cluster[1])
        assert len(numbers) == spec.config.balanced * len(attrs.fields(balance.Balance))
        a, b = (
            flat(tensor, folding, major)
            for tensor, folding, major in (
                (a, spec.operand.a_folding, spec.operand.a_major),
                (b, spec.operand.b_folding, spec.operand.b_major),
            )
        )
        assert foldings_fit(spec, spec.config.tile, spec.config.cluster)
        if spec.config.split > 1:
            *outputs, workspace, counters = outputs
            assert workspace.numel() == split.workspace(spec.config, a.shape[0], b.shape[0])
            assert counters.numel() >= split.tiles(spec.config, a.shape[0], b.shape[0]) and not counters.any()
        if spec.config.balanced:
            *outputs, workspace, counters = outputs
            needed = balance.workspace(spec.config, a.shape[0], b.shape[0], balance.Balance(*numbers))
            assert (workspace.numel(), counters.numel()) >= needed and not counters.any()
        given[epilogue.params[0].name] = a.double() @ b.double().T
        tile, m, n = spec.config.tile, a.shape[0], b.shape[0]
    else:
        inputs, outputs, m, n = arguments
        tile = (plan.hosted_rows(epilogue), 32 * plan.hosted_run(spec.aligned))
    buffers, outputs = outputs, [t if t.ndim == 2 else t.reshape(-1, t.shape[-1]).clone() for t in outputs]
    params = loaded_params(epilogue, spec.operand is not None)
    foldings = spec.input_foldings or (PLAIN,) * len(params)
    for param, dtype, tensor, folding in zip(params, spec.input_dtypes, inputs, foldings, strict=True):
        if param.type.kind is Kind.TILE and (spec.operand or spec.aligned):
            tensor = flat(tensor, folding)
        given[param.name] = _loaded(tensor, dtype, param.type)
    used = tuple(p for p in epilogue.params if p.name in given)
    by_sample = [(g, b) for g, b in _partials(epilogue, outputs) if g[0].type.kind is Kind.ROWS]
    samples = [given[p.name].shape[0] for p in used if p.type.kind is Kind.ROWS]
    samples += [b[0].shape[1] // int(n * epilogue.domain_width(g[0]) / base) for g, b in by_sample]
    assert len(set(samples)) < 2
    extents = (m, int(n / base), *samples[:1])
    epilogue = attrs.evolve(epilogue, params=used)
    call = bind(epilogue, given, compute, extents)
    bands = _bands(range(m), tile[0])
    if by_sample and spec.operand is None:  # tiles end where samples end
        bands = [band for sample in call.whole.samples for band in _bands(sample, tile[0])]
    for i, rows in enumerate(bands):
        for j, columns in enumerate(_bands(range(extents[1]), int(tile[1] / base))):
            _one_tile(epilogue, call, outputs, (i, j), rows, columns)
    if by_sample:
        _sum_by_sample(epilogue, call, by_sample, SLAB_ROWS if spec.operand else tile[0])
    foldings = spec.output_foldings or (PLAIN,) * len(spec.output_dtypes)
    for buffer, written, folding in zip(buffers, outputs, foldings, strict=False):
        if folding != PLAIN:
            flat(buffer, folding)
            buffer.copy_(written.view(buffer.shape))


def _bands(whole: range, step: int) -> list[range]:
    return [whole[start : start + step] for start in range(0, len(whole), step)]


def _partials(epilogue: Epilogue, outputs: Sequence[Tensor]) -> list[tuple[tuple[Reduce | State, ...], list[Tensor]]]:
    """Each reduction with its buffers, one per carried value."""
    rest = iter(outputs[len(epilogue.stores) + len(epilogue.vectors) :])
    carried = [(g, len(g[0].definition.carried) if isinstance(g[0], State) else 1) for g in folds(epilogue)]
    return [(group, [next(rest) for _ in range(count)]) for group, count in carried]


def _sum_by_sample(
    epilogue: Epilogue, call: Call, by_sample: list[tuple[tuple[Reduce | State, ...], list[Tensor]]], height: int
) -> None:
    """One partial per so many rows of a sample, those of all samples side by side."""
    for index, sample in enumerate(call.whole.samples):
        bands = _bands(sample, height)
        for part, rows in enumerate(bands):
            assert epilogue.accumulator is None or height != SLAB_ROWS or len(rows) == height
            parts = reference._tile_results(epilogue, *reference._cut(epilogue, call, rows, call.whole.columns))
            for group, buffers in by_sample:
                for buffer, values in zip(buffers, parts[group[0].name], strict=True):
                    columns = values.shape[1]
                    assert buffer.shape == (len(bands), len(call.whole.samples) * columns)
                    buffer[part, index * columns : (index + 1) * columns] = values[index]


def flat(tensor: Tensor, folding: Folding, major: str = "k") -> Tensor:
    """A matrix that TMA can address, in two dimensions."""
    rows = 1 + len(folding.rows)
    assert (tuple(tensor.shape[1:rows]), tuple(tensor.shape[rows + 1 :])) == (folding.rows, folding.columns)
    contiguous = tensor.ndim - 1 if major == "k" else rows - 1
    assert tensor.stride(contiguous) == 1
    assert tensor.data_ptr() % 16 == 0
    assert all(s * tensor.element_size() % 16 == 0 for i, s in enumerate(tensor.stride()) if i != contiguous)
    return tensor.reshape(math.prod(tensor.shape[:rows]), math.prod(tensor.shape[rows:]))


def _loaded(value: object, dtype: str, type_: ValueType) -> object:
    """An argument of a kernel as the reference takes it: masks come as bytes, scalars as one element."""
    if not isinstance(value, Tensor):
        return value
    if dtype == "bool":
        assert value.dtype is torch.uint8
        value = value.view(torch.bool)
    return value.reshape(()) if type_.kind is Kind.SCALAR else value


def _one_tile(epilogue, call: Call, outputs, tile: tuple[int, int], rows: range, columns: range) -> None:  # noqa: ANN001
    parts = reference._tile_results(epilogue, *reference._cut(epilogue, call, rows, columns))

    def section(buffer: Tensor, type_: ValueType, width: Fraction | None) -> Tensor:
        scale = width or Fraction(1)
        wide = slice(int(columns.start * scale), int(columns.stop * scale))
        along = {
            Kind.TILE: (slice(rows.start, rows.stop), wide),
            Kind.COL: (..., slice(rows.start, rows.stop)),
            Kind.ROW: (..., wide),
            Kind.SCALAR: (...,),
        }
        return buffer[along[type_.kind]]

    given = iter(outputs)
    for store in epilogue.stores:
        section(next(given), store.type, store.type.width).copy_(parts[store.name][0])
    for vector in epilogue.vectors:
        buffer = next(given)
        assert buffer.shape[0] == 1
        section(buffer[0], vector.type, vector.type.width).copy_(parts[vector.name][0])
    for group in folds(epilogue):
        kind = group[0].type.kind
        for value in parts[group[0].name]:
            buffer = next(given)
            if kind is Kind.ROWS:
                continue
            if kind is Kind.SCALAR:
                buffer[tile] = value
            else:
                part = buffer[tile[1] if kind is Kind.COL else tile[0]]
                section(part, group[0].type, group[0].type.width).copy_(value)


def _vector(
    spec: KernelSpec, compute: torch.dtype, inputs: Sequence[object], outputs: tuple[Tensor, ...], n: int
) -> None:
    """The kernel of an auxiliary step."""
    given = {}
    for (param, dtype), tensor, how in zip(spec.inputs, inputs, spec.parts, strict=True):
        if how:
            assert isinstance(tensor, Tensor) and tensor.shape[1:] == (n,) and tensor.is_contiguous() and dtype == "f32"
            given[param.name] = REDUCTION_FUNCTIONS[how](tensor.to(compute), (0,))
        else:
            given[param.name] = _loaded(tensor, dtype, param.type)
    results = reference.run(
        attrs.evolve(spec.epilogue, params=tuple(p for p, _ in spec.inputs)), given, dtype=compute, extents=(1, n)
    )
    for output, result in zip(outputs, results.values(), strict=True):
        assert output.numel() == result.numel()
        output[0] = result


def _merge(spec: KernelSpec, compute: torch.dtype, partials: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    """The kernel that merges the partials of one reduction: [parts, length] of each carried value."""
    state = folds(spec.epilogue)[spec.merge][0]
    if isinstance(state, Reduce):
        assert outputs[0].shape == (1, partials[0].shape[1])
        outputs[0][0] = REDUCTION_FUNCTIONS[state.how](partials[0].to(compute), (0,))
        return
    definition, context = state.definition, Context(compute)
    wide = [p.to(context.torch_dtype(dtype)) for p, (_, dtype) in zip(partials, definition.carried, strict=True)]
    carried = merged(definition, wide, 0, context)
    results = evaluate_function(definition.finalize, carried, context)
    for output, result in zip(outputs, results, strict=True):
        assert output.shape == (1, partials[0].shape[1])
        output[0] = result
