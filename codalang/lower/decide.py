"""What calls of one signature launch: the kernel's spec and configuration, its arguments and results."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping

import attrs
import torch

from codalang.errors import CodaCallError
from codalang.ir.types import Kind
from codalang.lower import balance, plan, split, tuned
from codalang.lower.call import Call, rehearsed
from codalang.lower.codegen import unit
from codalang.lower.dtypes import DTYPE_NAMES, storage_dtypes, vector_dtypes
from codalang.lower.folded import Matrix
from codalang.lower.given import check_buffers, output_foldings, written
from codalang.lower.prepare import Value, is_aligned, prepared_input, prepared_operand, prepared_parts
from codalang.lower.results import Compiled, results_of
from codalang.lower.shape import Shape
from codalang.lower.spec import PLAIN, Config, Folding, KernelSpec, Operand, foldings_fit, loaded_params


def gemm_call(
    shape: Shape,
    operands: tuple[Matrix, Matrix],
    values: list[Value],
    dtypes: Mapping[str, torch.dtype],
    out: Mapping[str, torch.Tensor],
    config: Config | None,
    compiled: Compiled,
) -> Call:
    """The epilogue on the product of two operands.  `values`: of the loaded parameters."""
    epilogue, (a, b) = shape.epilogue, operands
    params = loaded_params(epilogue, True)
    storage = storage_dtypes(epilogue, a.tensor.dtype, dtypes)
    check_buffers(shape, storage, out)
    for folds_allowed in (True, False):
        passed = [prepared_operand(matrix, folds_allowed) for matrix in operands]
        inputs = [
            prepared_input(shape, p, v, pad=True, fold=folds_allowed) for p, v in zip(params, values, strict=True)
        ]
        foldings = output_foldings(shape, out, folds_allowed)
        spec = KernelSpec(
            epilogue,
            Operand(DTYPE_NAMES[a.tensor.dtype], passed[0][1], passed[1][1], passed[0][2], passed[1][2]),
            tuple(dtype for _, dtype, _ in inputs),
            tuple(DTYPE_NAMES[storage[s.name]] for s in epilogue.stores),
            None,
            input_foldings=_unless_plain(f for _, _, f in inputs),
            output_foldings=_unless_plain(foldings),
            vector_dtypes=vector_dtypes(epilogue, storage),
        )
        # no tile may be made of whole boxes of what is folded: then all of it goes through copies
        tilings = (config,) if config else plan.TILINGS
        if any(foldings_fit(spec, t.tile, t.cluster) for t in tilings):
            break
    chosen = config or tuned.choose(spec, shape.m, shape.n, a.shape[1], _gpu(shape.device))
    if 0 < chosen.a_rows < shape.m:
        raise CodaCallError(f"a configuration for {chosen.a_rows} rows, got {shape.m}", argument="config")
    clusters, words = max(1, _sms(shape.device) // math.prod(chosen.cluster)), None
    schedule: tuple[int, ...] = (clusters,)
    if chosen.balanced:
        numbers = balance.balance(chosen, shape.m, shape.n, a.shape[1], clusters)
        schedule, words = (clusters, *attrs.astuple(numbers)), balance.workspace(chosen, shape.m, shape.n, numbers)
    elif chosen.split > 1:
        words = split.workspace(chosen, shape.m, shape.n), split.tiles(chosen, shape.m, shape.n)
    prepare = (*(prepare for prepare, _, _ in passed), *(prepare for prepare, _, _ in inputs))
    results = results_of(shape, storage, chosen.tile, out, foldings, compiled, padded=True, on_gemm=True)
    return Call(
        compiled(attrs.evolve(spec, config=chosen)),
        prepare,
        2,
        results,
        tuple(o.name for o in epilogue.outputs),
        (schedule,),
        shape.device,
        written(shape, (None, None, *params), (a.tensor, b.tensor, *values), prepare, results, out),
        words,
    )


def hosted_call(
    shape: Shape,
    values: list[Value],
    storage: Mapping[str, torch.dtype],
    out: Mapping[str, torch.Tensor],
    compiled: Compiled,
) -> Call:
    """The epilogue on plain tensors."""
    epilogue, n = shape.epilogue, shape.n
    params = loaded_params(epilogue, False)
    # groups of columns are exchanged among lanes that hold eight each: such rows are made aligned
    pad = unit(epilogue) > 8
    inputs = [prepared_input(shape, p, v, pad=pad, fold=False)[:2] for p, v in zip(params, values, strict=True)]
    # what `prepare` copies is a fresh contiguous tensor
    tiles = [
        (v if prepare is None else torch.empty(shape.of(p), dtype=v.dtype, device="meta"))
        for p, v, (prepare, _) in zip(params, values, inputs, strict=True)
        if p.type.kind in (Kind.TILE, Kind.ROWS) and isinstance(v, torch.Tensor)
    ]
    aligned = n % 8 == 0 and (pad or all(is_aligned(t) for t in tiles))
    spec = KernelSpec(
        epilogue,
        None,
        tuple(dtype for _, dtype in inputs),
        tuple(DTYPE_NAMES[storage[s.name]] for s in epilogue.stores),
        None,
        aligned,
        vector_dtypes=vector_dtypes(epilogue, storage),
    )
    tile = (plan.hosted_rows(epilogue), 32 * plan.hosted_run(aligned))
    check_buffers(shape, storage, out)
    foldings = output_foldings(shape, out, False)
    results = results_of(shape, storage, tile, out, foldings, compiled, padded=aligned, on_gemm=False)
    prepare = tuple(prepare for prepare, _ in inputs)
    names = tuple(o.name for o in epilogue.outputs)
    buffers = written(shape, params, values, prepare, results, out)
    return Call(compiled(spec), prepare, 0, results, names, (shape.m, n), shape.device, buffers)


def vector_call(
    shape: Shape,
    values: list[Value],
    parts: Mapping[str, str],
    storage: Mapping[str, torch.dtype],
    compiled: Compiled,
) -> Call:
    """An expression of vectors, some of them in parts."""
    epilogue = shape.epilogue
    params = loaded_params(epilogue, False)
    inputs = [
        prepared_parts(shape, p, v) if p.name in parts else prepared_input(shape, p, v, pad=False, fold=False)[:2]
        for p, v in zip(params, values, strict=True)
    ]
    spec = KernelSpec(
        epilogue,
        None,
        tuple(dtype for _, dtype in inputs),
        (),
        None,
        aligned=False,
        parts=tuple(parts.get(p.name, "") for p in params),
        vector_dtypes=vector_dtypes(epilogue, storage),
    )
    results = results_of(shape, storage, (1, 1), {}, (), compiled, padded=False, on_gemm=False)
    names = tuple(o.name for o in epilogue.outputs)
    prepare = tuple(prepare for prepare, _ in inputs)
    return Call(compiled(spec), prepare, 0, results, names, (shape.n,), shape.device, ())


def _unless_plain(foldings: Iterable[Folding]) -> tuple[Folding, ...]:
    found = tuple(foldings)
    return () if all(f == PLAIN for f in found) else found


def _gpu(device: torch.device) -> torch.device:
    """Where a call would run that is rehearsed on `meta`."""
    found = rehearsed()
    return device if found is None or found.device is None else found.device


@functools.cache
def _sms(device: torch.device) -> int:
    if device.type == "meta":
        return plan.SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
