"""Running an epilogue on CUDA tensors: on a GEMM's accumulator (`gemm`), on plain tensors (`hosted`) or on vectors
(`vector`).

What TMA cannot address is made so: an operand or tile whose base or pitch is not a multiple of 16 bytes goes through a
copy with a padded pitch (`prepare`), an output likewise (`results`), and the caller gets contiguous tensors all the
same.  All that is decided once for each signature (`decide`), and remembered (`call`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from codalang.ir import reference
from codalang.ir.build import EpilogueBuilder
from codalang.ir.epilogue import Epilogue
from codalang.ir.types import tile as tile_type
from codalang.lower.beside import function
from codalang.lower.call import CALLS, filled, form, forms, rehearsed, remember
from codalang.lower.decide import gemm_call, hosted_call, vector_call
from codalang.lower.dtypes import storage_dtypes
from codalang.lower.folded import Matrix
from codalang.lower.given import check_buffers
from codalang.lower.prepare import check_operands
from codalang.lower.shape import Shape, hosted_extents, samples_of
from codalang.lower.spec import Config, KernelSpec, base_width, loaded_params

overlap = False  # kernels start while the one before them in the stream ends; see `sm90`


def gemm(
    epilogue: Epilogue,
    a: torch.Tensor | Matrix,
    b: torch.Tensor | Matrix,
    inputs: Mapping[str, torch.Tensor | float],
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    out: Mapping[str, torch.Tensor] | None = None,
    config: Config | None = None,
    samples: int | None = None,
    unmerged: tuple[str, ...] = (),
) -> dict[str, torch.Tensor]:
    """The epilogue on acc = a @ b.T.

    Args:
        epilogue: its first parameter is the accumulator.
        a, b: [M, K] and [N, K], both bf16 or both f16, on one Hopper GPU; any strides.  N counts the accumulator's
            columns.  With more dimensions, rows are the row-major flattening of all but the last: see `folded`, which
            has `Matrix` for what is folded otherwise.
        inputs: the other parameters by name; tiles [M, w*N], rows [w*N], cols [M], one row per sample [B, w*N], scalars
            as numbers or one-element tensors.  Parameters that the epilogue does not use may be missing.  Tiles may be
            folded as operands are.
        dtypes: storage dtypes of outputs; default: the annotation, else a's dtype (reductions: f32).
        out: buffers for some of the outputs, contiguous, or tiles folded as operands are; see `buffers` for what they
            may share memory with.
        config: overrides the heuristic.
        samples: B of `row[B, N]`; needed where no input determines it.
        unmerged: sums, maxima and minima that are given in the parts that tiles leave, [parts, length], for `vector` to
            merge.  Where there are no tiles they are given as ever.

    Returns:
        The outputs by name: what `out` has, and fresh contiguous tensors.

    Raises:
        CodaCallError: a shape or dtype that does not fit, or a buffer that would be written before it is read.
        CodaUnsupportedError, CodaCompileError: see `tuned.choose` and `compile.compile_object`.
    """
    a, a_dims = (a.tensor, a.row_dims) if isinstance(a, Matrix) else (a, -1)
    b, b_dims = (b.tensor, b.row_dims) if isinstance(b, Matrix) else (b, -1)
    samples = samples_of(epilogue, inputs, samples)
    values = [inputs.get(name) for name in _loaded_names(epilogue, True)]
    outputs = (*(dtypes or {}).items(), *(forms(out) if out else ()))
    key = (
        epilogue,
        config,
        samples,
        unmerged,
        function,
        overlap,
        a_dims,
        form(a),
        b_dims,
        form(b),
        *map(form, values),
        *outputs,
    )
    call = CALLS.get(key)
    if call is None:
        operands = (
            Matrix(a, a.ndim - 1 if a_dims < 0 else a_dims),
            Matrix(b, b.ndim - 1 if b_dims < 0 else b_dims),
        )
        check_operands(*operands)
        shape = Shape(epilogue, operands[0].shape[0], operands[1].shape[0], a.device, samples, unmerged)
        if shape.m == 0 or shape.n == 0:
            accumulator = {epilogue.params[0].name: a.new_zeros(shape.m, shape.n)}
            return _of_nothing(shape, {**inputs, **accumulator}, a.dtype, dtypes or {}, out or {})
        if shape.cuts_slabs:  # a slab of the GEMM's epilogue would have rows of two samples
            return _in_two_steps(shape, operands, inputs, dtypes or {}, out or {})
        call = remember(key, gemm_call(shape, operands, values, dtypes or {}, out or {}, config, _compiled))
    return call.run((a, b, *values), out or {})


def hosted(
    epilogue: Epilogue,
    inputs: Mapping[str, torch.Tensor | float],
    *,
    extents: tuple[int, ...] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    out: Mapping[str, torch.Tensor] | None = None,
    default_dtype: torch.dtype | None = None,
    unmerged: tuple[str, ...] = (),
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """The epilogue on plain tensors, the accumulator among `inputs`; no matmul.

    Args:
        extents: (M, N) with N of width 1; needed where no tile determines them.  (M, N, B) where no input determines
            the number of samples.
        dtypes, out: storage dtypes of outputs, and buffers for some, as for `gemm`.
        default_dtype: storage dtype of tile outputs without annotation; default: the accumulator tensor's.
        unmerged: as for `gemm`.
        device: where it runs if no input is a tensor; default: the current one.

    Raises CodaCallError for shapes that do not fit.
    """
    values = [inputs.get(name) for name in _loaded_names(epilogue, False)]
    outputs = (*(dtypes or {}).items(), *(forms(out) if out else ()))
    rows, columns, *given = extents or hosted_extents(epilogue, inputs)
    samples = samples_of(epilogue, inputs, *given)
    tensors = [v for v in inputs.values() if isinstance(v, torch.Tensor)]
    device = _device(tensors, device)
    default = default_dtype or next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
    # what no kernel loads says something, too
    decided = (rows, columns, samples, device, default)
    key = (epilogue, *decided, unmerged, function, overlap, *map(form, values), *outputs)
    call = CALLS.get(key)
    if call is None:
        shape = Shape(epilogue, rows, int(columns * base_width(epilogue)), device, samples, unmerged)
        if shape.m == 0 or shape.n == 0:
            return _of_nothing(shape, inputs, default, dtypes or {}, out or {})
        storage = storage_dtypes(epilogue, default, dtypes or {})
        call = remember(key, hosted_call(shape, values, storage, out or {}, _compiled))
    return call.run(tuple(values), out or {})


def vector(
    expression: Epilogue,
    inputs: Mapping[str, torch.Tensor | float],
    length: int,
    *,
    parts: Mapping[str, str] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """An elementwise expression of vectors and scalars, merging what reductions left of some of them.

    Args:
        expression: an epilogue on [1, length] of rows of width 1 and scalars, that stores such.
        inputs: its parameters by name: rows [length], or [parts, length] in f32; scalars.
        parts: how an input's parts are merged: sum, max or min; others are whole.
        dtypes: storage dtypes of outputs; default: f32.
        device: as for `hosted`.

    Raises CodaCallError for shapes that do not fit.
    """
    values = [inputs.get(name) for name in _loaded_names(expression, False)]
    device = _device([v for v in inputs.values() if isinstance(v, torch.Tensor)], device)
    key = (
        expression,
        length,
        device,
        "vector",
        function,
        overlap,
        *map(form, values),
        *(parts or {}).items(),
        *(dtypes or {}).items(),
    )
    call = CALLS.get(key)
    if call is None:
        shape = Shape(expression, 1, length, device, 0)
        if length == 0:
            whole = {n: v[0] if isinstance(v, torch.Tensor) and v.ndim > 1 else v for n, v in inputs.items()}
            return _of_nothing(shape, whole, torch.float32, dtypes or {}, {})
        storage = storage_dtypes(expression, torch.float32, dtypes or {})
        call = remember(key, vector_call(shape, values, parts or {}, storage, _compiled))
    return call.run(tuple(values), {})


def _device(tensors: Sequence[torch.Tensor], otherwise: torch.device | None) -> torch.device:
    """Where a call runs."""
    if tensors:
        return tensors[0].device
    return otherwise or torch.device("cuda", torch.cuda.current_device())


def _compiled(spec: KernelSpec) -> Callable[..., None]:
    spec, found = attrs.evolve(spec, overlap=overlap), rehearsed()
    return function(spec) if found is None else found.note(spec)


@functools.lru_cache(maxsize=1024)
def _loaded_names(epilogue: Epilogue, on_gemm: bool) -> tuple[str, ...]:
    return tuple(p.name for p in loaded_params(epilogue, on_gemm))


def _in_two_steps(
    shape: Shape,
    operands: tuple[Matrix, Matrix],
    inputs: Mapping[str, torch.Tensor | float],
    dtypes: Mapping[str, torch.dtype],
    out: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The matmul, kept in f32, and the epilogue hosted on it, whose tiles end where samples end."""
    accumulator, epilogue = shape.epilogue.params[0], shape.epilogue
    builder = EpilogueBuilder(f"{epilogue.name}_matmul", epilogue.dims[:2])
    builder.store("acc", builder.param("acc", tile_type()), tile_type())
    acc = gemm(builder.finish(), *operands, {}, dtypes={"acc": torch.float32})["acc"]
    storage = storage_dtypes(epilogue, operands[0].tensor.dtype, dtypes)
    extents = (shape.m, int(shape.n / shape.base), shape.samples)
    return hosted(epilogue, {**inputs, accumulator.name: acc}, extents=extents, dtypes=storage, out=out)


def _of_nothing(
    shape: Shape,
    inputs: Mapping[str, torch.Tensor | float],
    default: torch.dtype,
    dtypes: Mapping[str, torch.dtype],
    out: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The outputs where M or N is 0, by the reference: empty tiles, and reductions of nothing."""
    epilogue = shape.epilogue
    storage = storage_dtypes(epilogue, default, dtypes)
    check_buffers(shape, storage, out)
    used = loaded_params(epilogue, False)
    given = {p.name: inputs[p.name] for p in used if inputs.get(p.name) is not None}
    extents = (shape.m, int(shape.n / shape.base), shape.samples)
    results = reference.run(attrs.evolve(epilogue, params=used), given, dtype=torch.float32, extents=extents)
    return {
        name: filled(out[name], value) if name in out else value.to(storage[name]) for name, value in results.items()
    }


__all__ = ["function", "gemm", "hosted", "overlap", "vector"]
