"""Running an epilogue on CUDA tensors: on a GEMM's accumulator (`gemm`) or on plain tensors (`hosted`).

What TMA cannot address is made so here: an operand or tile whose base or pitch is not a multiple of 16 bytes goes
through a copy with a padded pitch, an output likewise, and the caller gets contiguous tensors all the same.

Reductions come from the kernels as one partial per tile, and are merged over them in a fixed order: sums, maxima and
minima by torch's own reduction, stateful transforms by a small kernel (`merge`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import attrs
import torch

from codalang.errors import CodaCallError
from codalang.ir import reference
from codalang.ir.bind import narrowed
from codalang.ir.build import EpilogueBuilder
from codalang.ir.epilogue import Epilogue, Output, Param, Reduce, State
from codalang.ir.types import Dtype, Kind
from codalang.ir.types import tile as tile_type
from codalang.lower import balance, plan, split, tuned
from codalang.lower.buffers import Read, Written, check_sharing, span
from codalang.lower.codegen import unit
from codalang.lower.folded import Matrix, as_box, box, is_dense
from codalang.lower.load import function
from codalang.lower.spec import (
    PLAIN,
    SLAB_ROWS,
    Config,
    Folding,
    KernelSpec,
    Operand,
    base_width,
    foldings_fit,
    folds,
    loaded_params,
    merge_spec,
)

TORCH_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# What a parameter of each register dtype may be in memory.
INPUT_DTYPES = {
    Dtype.F32: DTYPE_NAMES,
    Dtype.I32: {torch.int32: "i32", torch.int64: "i64"},
    Dtype.BOOL: {torch.bool: "bool"},
}
RESULT_DTYPES = {"f32": torch.float32, "i32": torch.int32}

overlap = False  # kernels start while the one before them in the stream ends; see `sm90`
empty = torch.empty  # how outputs and partials are allocated; tests replace it by one that poisons


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
    values = [inputs.get(name) for name in _loaded_names(epilogue, True)]
    outputs = (*(dtypes or {}).items(), *(_forms(out) if out else ()))
    key = (
        epilogue,
        config,
        samples,
        unmerged,
        function,
        overlap,
        a_dims,
        _form(a),
        b_dims,
        _form(b),
        *map(_form, values),
        *outputs,
    )
    call = _CALLS.get(key)
    if call is None:
        operands = (
            Matrix(a, a.ndim - 1 if a_dims < 0 else a_dims),
            Matrix(b, b.ndim - 1 if b_dims < 0 else b_dims),
        )
        _check_operands(*operands)
        shape = _Shape(
            epilogue,
            operands[0].shape[0],
            operands[1].shape[0],
            a.device,
            _samples(epilogue, inputs, samples),
            unmerged,
        )
        if shape.m == 0 or shape.n == 0:
            accumulator = {epilogue.params[0].name: a.new_zeros(shape.m, shape.n)}
            return _of_nothing(shape, {**inputs, **accumulator}, a.dtype, dtypes or {}, out or {})
        if shape.cuts_slabs:  # a slab of the GEMM's epilogue would have rows of two samples
            return _in_two_steps(shape, operands, inputs, dtypes or {}, out or {})
        call = _remember(key, _gemm_call(shape, operands, values, dtypes or {}, out or {}, config))
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
) -> dict[str, torch.Tensor]:
    """The epilogue on plain tensors, the accumulator among `inputs`; no matmul.

    Args:
        extents: (M, N) with N of width 1; needed where no tile determines them.  (M, N, B) where no input determines
            the number of samples.
        dtypes, out: storage dtypes of outputs, and buffers for some, as for `gemm`.
        default_dtype: storage dtype of tile outputs without annotation; default: the accumulator tensor's.
        unmerged: as for `gemm`.

    Raises CodaCallError for shapes that do not fit.
    """
    values = [inputs.get(name) for name in _loaded_names(epilogue, False)]
    outputs = (*(dtypes or {}).items(), *(_forms(out) if out else ()))
    key = (epilogue, extents, default_dtype, unmerged, function, overlap, *map(_form, values), *outputs)
    call = _CALLS.get(key)
    if call is None:
        m, n, device = _hosted_extents(epilogue, inputs, extents)
        tensors = [v for v in inputs.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
        default = default_dtype or next((t.dtype for t in tensors), torch.float32)
        given = extents[2] if extents is not None and len(extents) > 2 else None
        shape = _Shape(epilogue, m, n, device, _samples(epilogue, inputs, given), unmerged)
        if m == 0 or n == 0:
            return _of_nothing(shape, inputs, default, dtypes or {}, out or {})
        storage = _storage_dtypes(epilogue, default, dtypes or {})
        call = _remember(key, _hosted_call(shape, values, storage, out or {}))
    return call.run(tuple(values), out or {})


def vector(
    expression: Epilogue,
    inputs: Mapping[str, torch.Tensor | float],
    length: int,
    *,
    parts: Mapping[str, str] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> dict[str, torch.Tensor]:
    """An elementwise expression of vectors and scalars, merging what reductions left of some of them.

    Args:
        expression: an epilogue on [1, length] of rows of width 1 and scalars, that stores such.
        inputs: its parameters by name: rows [length], or [parts, length] in f32; scalars.
        parts: how an input's parts are merged: sum, max or min; others are whole.
        dtypes: storage dtypes of outputs; default: f32.

    Raises CodaCallError for shapes that do not fit.
    """
    values = [inputs.get(name) for name in _loaded_names(expression, False)]
    key = (
        expression,
        length,
        "vector",
        function,
        overlap,
        *map(_form, values),
        *(parts or {}).items(),
        *(dtypes or {}).items(),
    )
    call = _CALLS.get(key)
    if call is None:
        device = next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cuda"))
        shape = _Shape(expression, 1, length, device, 0)
        if length == 0:
            whole = {n: v[0] if isinstance(v, torch.Tensor) and v.ndim > 1 else v for n, v in inputs.items()}
            return _of_nothing(shape, whole, torch.float32, dtypes or {}, {})
        storage = _storage_dtypes(expression, torch.float32, dtypes or {})
        call = _remember(key, _vector_call(shape, values, parts or {}, storage))
    return call.run(tuple(values), {})


# ---------------------------------------------------------------- what calls of one signature have in common

Value = torch.Tensor | float | None
Prepare = Callable[[Any], Any]


@attrs.frozen
class _Buffer:
    """What a kernel writes into.

    Attributes:
        shape: what is allocated: a tile with a padded pitch, a vector as one row, or one partial per tile.
        columns: columns of it that the kernel sees, where that is not all.
        given: the output whose buffer, given by the caller, it is; None where it is allocated.
        stride: of a folded one, which the caller gives.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    columns: int | None = None
    given: str | None = None
    stride: tuple[int, ...] | None = None

    def allocate(self, device: torch.device, out: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The kernel's argument."""
        if self.given is not None:
            buffer = out[self.given]
            return buffer.view(self.shape) if self.stride is None else buffer.as_strided(self.shape, self.stride)
        tensor = empty(self.shape, dtype=self.dtype, device=device)
        return tensor if self.columns is None else tensor[:, : self.columns]


# Results of buffers.  The second argument has the caller's buffer for each that has one: it may be written there.
Given = list[torch.Tensor | None] | None
Finish = Callable[[list[torch.Tensor], Given], Iterable[torch.Tensor]]


@attrs.frozen
class _Result:
    """How outputs are made of buffers: `finish` gives one tensor per name, which is then cast to its dtype, or copied
    into the caller's buffer where it is not there already."""

    names: tuple[str, ...]
    buffers: tuple[_Buffer, ...]
    finish: Finish
    dtypes: tuple[torch.dtype, ...]


@attrs.frozen
class _Call:
    """A launch with everything decided: only pointers change from call to call of a signature.

    Attributes:
        launch: the compiled function.
        prepare: for each tensor of the call, what makes it addressable, None where it is so.
        operands: how many of them are operands of a GEMM; the others are the epilogue's inputs.
        results: in the order of the kernel's signature.
        names: the outputs' names in textual order.
        tail: the integers, or tuples of them, that end the kernel's signature.
        written: the caller's buffers.
        parts: words of workspace and counters that a GEMM needs whose tiles come in parts; see `gather`.
    """

    launch: Callable[..., None]
    prepare: tuple[Prepare | None, ...]
    operands: int
    results: tuple[_Result, ...]
    names: tuple[str, ...]
    tail: tuple[int | tuple[int, ...], ...]
    device: torch.device
    written: tuple[Written, ...]
    parts: tuple[int, int] | None = None

    def run(self, values: tuple[Value, ...], out: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Allocate, launch on the current stream, finish.  Raises CodaCallError for buffers that share memory."""
        if _listening.calls is not None:
            _listening.calls.append(self)
        if self.written:
            check_sharing(self.written, values, out)
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return self.repeat(values, out)
        with torch.cuda.device(self.device):
            return self.repeat(values, out)

    def repeat(self, values: tuple[Value, ...], out: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same on the current device, for buffers that are known to be apart."""
        buffers = [[b.allocate(self.device, out) for b in r.buffers] for r in self.results]
        tensors = [p(v) if p else v for p, v in zip(self.prepare, values, strict=True)]
        outputs = tuple([b for group in buffers for b in group])
        if self.parts:
            workspace = empty((1, self.parts[0]), dtype=torch.float32, device=self.device)
            outputs = (*outputs, workspace, _counters(self.device, self.parts[1]))
        self.launch(*tensors[: self.operands], tuple(tensors[self.operands :]), outputs, *self.tail)
        finished = {}
        for result, group in zip(self.results, buffers, strict=True):
            finals = result.finish(group, [out.get(name) for name in result.names] if out else None)
            for name, tensor, dtype in zip(result.names, finals, result.dtypes, strict=True):
                if name in out:
                    in_place = tensor.data_ptr() == out[name].data_ptr()
                    finished[name] = out[name] if in_place else _filled(out[name], tensor)
                else:
                    finished[name] = tensor if tensor.dtype is dtype else tensor.to(dtype)
        return {name: finished[name] for name in self.names}


class _Listening(threading.local):
    calls: list[_Call] | None = None


@contextlib.contextmanager
def listening() -> Iterator[list[_Call]]:
    """What this thread launches within, in order.  Who knows that tensors have the forms of those may `repeat` it."""
    before, launched = _listening.calls, list[_Call]()
    _listening.calls = launched
    try:
        yield launched
    finally:
        _listening.calls = before


_listening = _Listening()
_CALLS: dict[Any, _Call] = {}
_LEAST_COUNTERS = 4096  # so that they are seldom allocated anew
_MOST_CALLS = 4096  # signatures remembered; a new sequence length is a new one


_COUNTERS: dict[tuple[torch.device, int], torch.Tensor] = {}  # by device and stream; each kernel leaves zeros


def _counters(device: torch.device, count: int) -> torch.Tensor:
    """At least so many zeros, i32 [1, n], that no kernel uses which may run at the same time."""
    if device.type != "cuda":
        return torch.zeros((1, count), dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():  # a graph may be replayed beside others of this stream
        return torch.zeros((1, count), dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    found = _COUNTERS.get(key)
    if found is None or found.shape[1] < count:
        found = _COUNTERS[key] = torch.zeros((1, max(count, _LEAST_COUNTERS)), dtype=torch.int32, device=device)
    return found


def _remember(key: Any, call: _Call) -> _Call:
    if len(_CALLS) >= _MOST_CALLS:
        _CALLS.clear()
    _CALLS[key] = call
    return call


def _form(value: Value) -> Any:
    """All that decides how a value is passed: two calls whose values have equal forms differ in pointers only."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.data_ptr() % 16, value.device
    return None if value is None else "number"


def _forms(tensors: Mapping[str, torch.Tensor]) -> Iterable[Any]:
    return [(name, _form(tensor)) for name, tensor in tensors.items()]


@functools.lru_cache(maxsize=1024)
def _loaded_names(epilogue: Epilogue, on_gemm: bool) -> tuple[str, ...]:
    return tuple(p.name for p in loaded_params(epilogue, on_gemm))


def _check_operands(a: Matrix, b: Matrix) -> None:
    dtype = a.tensor.dtype
    if dtype != b.tensor.dtype or dtype not in (torch.bfloat16, torch.float16):
        raise CodaCallError(
            f"a kernel multiplies two bf16 or two f16 operands, got {dtype} and {b.tensor.dtype}", argument="a"
        )
    if min(a.row_dims, b.row_dims) < 1 or a.shape[1] != b.shape[1]:
        raise CodaCallError(
            f"a [M, K] and b [N, K] must agree in K, got {list(a.tensor.shape)} and {list(b.tensor.shape)}",
            argument="b",
        )


def _gemm_call(
    shape: _Shape,
    operands: tuple[Matrix, Matrix],
    values: list[Value],
    dtypes: Mapping[str, torch.dtype],
    out: Mapping[str, torch.Tensor],
    config: Config | None,
) -> _Call:
    epilogue, (a, b) = shape.epilogue, operands
    params = loaded_params(epilogue, True)
    storage = _storage_dtypes(epilogue, a.tensor.dtype, dtypes)
    shape.check_buffers(storage, out)
    for folds_allowed in (True, False):
        passed = [_operand(matrix, folds_allowed) for matrix in operands]
        inputs = [shape.input(p, v, pad=True, fold=folds_allowed) for p, v in zip(params, values, strict=True)]
        foldings = shape.output_foldings(out, folds_allowed)
        spec = KernelSpec(
            epilogue,
            Operand(DTYPE_NAMES[a.tensor.dtype], passed[0][1], passed[1][1], passed[0][2], passed[1][2]),
            tuple(dtype for _, dtype, _ in inputs),
            tuple(DTYPE_NAMES[storage[s.name]] for s in epilogue.stores),
            None,
            input_foldings=_unless_plain(f for _, _, f in inputs),
            output_foldings=_unless_plain(foldings),
        )
        # no tile may be made of whole boxes of what is folded: then all of it goes through copies
        tilings = (config,) if config else plan.TILINGS
        if any(foldings_fit(spec, t.tile, t.cluster) for t in tilings):
            break
    chosen = config or tuned.choose(spec, shape.m, shape.n, a.shape[1], shape.device)
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
    results = shape.results(storage, chosen.tile, out, padded=True, on_gemm=True, foldings=foldings)
    return _Call(
        function(attrs.evolve(spec, config=chosen, overlap=overlap)),
        prepare,
        2,
        results,
        tuple(o.name for o in epilogue.outputs),
        (schedule,),
        shape.device,
        shape.written((None, None, *params), (a.tensor, b.tensor, *values), prepare, results, out),
        words,
    )


def _unless_plain(foldings: Iterable[Folding]) -> tuple[Folding, ...]:
    found = tuple(foldings)
    return () if all(f == PLAIN for f in found) else found


def _in_two_steps(
    shape: _Shape,
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
    storage = _storage_dtypes(epilogue, operands[0].tensor.dtype, dtypes)
    extents = (shape.m, int(shape.n / shape.base), shape.samples)
    return hosted(epilogue, {**inputs, accumulator.name: acc}, extents=extents, dtypes=storage, out=out)


def _hosted_call(
    shape: _Shape, values: list[Value], storage: Mapping[str, torch.dtype], out: Mapping[str, torch.Tensor]
) -> _Call:
    epilogue, n = shape.epilogue, shape.n
    params = loaded_params(epilogue, False)
    # groups of columns are exchanged among lanes that hold eight each: such rows are made aligned
    pad = unit(epilogue) > 8
    inputs = [shape.input(p, v, pad=pad, fold=False)[:2] for p, v in zip(params, values, strict=True)]
    # what `prepare` copies is a fresh contiguous tensor
    tiles = [
        (v if prepare is None else torch.empty(shape.of(p), dtype=v.dtype, device="meta"))
        for p, v, (prepare, _) in zip(params, values, inputs, strict=True)
        if p.type.kind in (Kind.TILE, Kind.ROWS) and isinstance(v, torch.Tensor)
    ]
    aligned = n % 8 == 0 and (pad or all(_is_aligned(t) for t in tiles))
    spec = KernelSpec(
        epilogue,
        None,
        tuple(dtype for _, dtype in inputs),
        tuple(DTYPE_NAMES[storage[s.name]] for s in epilogue.stores),
        None,
        aligned,
    )
    tile = (plan.HOSTED_ROWS, 32 * plan.hosted_run(aligned))
    shape.check_buffers(storage, out)
    foldings = shape.output_foldings(out, False)
    results = shape.results(storage, tile, out, padded=aligned, on_gemm=False, foldings=foldings)
    prepare = tuple(prepare for prepare, _ in inputs)
    names = tuple(o.name for o in epilogue.outputs)
    written = shape.written(params, values, prepare, results, out)
    return _Call(
        function(attrs.evolve(spec, overlap=overlap)), prepare, 0, results, names, (shape.m, n), shape.device, written
    )


def _vector_call(
    shape: _Shape, values: list[Value], parts: Mapping[str, str], storage: Mapping[str, torch.dtype]
) -> _Call:
    epilogue = shape.epilogue
    params = loaded_params(epilogue, False)
    inputs = [
        shape.parts(p, v) if p.name in parts else shape.input(p, v, pad=False, fold=False)[:2]
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
    )
    results = shape.results(storage, (1, 1), {}, padded=False, on_gemm=False, foldings=())
    names = tuple(o.name for o in epilogue.outputs)
    prepare = tuple(prepare for prepare, _ in inputs)
    launch = function(attrs.evolve(spec, overlap=overlap))
    return _Call(launch, prepare, 0, results, names, (shape.n,), shape.device, ())


def _of_nothing(
    shape: _Shape,
    inputs: Mapping[str, torch.Tensor | float],
    default: torch.dtype,
    dtypes: Mapping[str, torch.dtype],
    out: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The outputs where M or N is 0, by the reference: empty tiles, and reductions of nothing."""
    epilogue = shape.epilogue
    storage = _storage_dtypes(epilogue, default, dtypes)
    shape.check_buffers(storage, out)
    used = loaded_params(epilogue, False)
    given = {p.name: inputs[p.name] for p in used if inputs.get(p.name) is not None}
    extents = (shape.m, int(shape.n / shape.base), shape.samples)
    results = reference.run(attrs.evolve(epilogue, params=used), given, dtype=torch.float32, extents=extents)
    return {
        name: _filled(out[name], value) if name in out else value.to(storage[name]) for name, value in results.items()
    }


def _storage_dtypes(
    epilogue: Epilogue, default: torch.dtype, dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.dtype]:
    """Each output's storage dtype: the call's, else the annotation, else `default` for tiles and f32 for reductions."""
    tiles = {o.name for o in epilogue.stores}
    fallback = {o.name: default if o.name in tiles else RESULT_DTYPES[o.type.dtype.value] for o in epilogue.outputs}
    annotated = {o.name: TORCH_DTYPES[o.dtype] for o in epilogue.outputs if o.dtype}
    return fallback | annotated | dict(dtypes)


class _Shape:
    """The extents of a call, and what follows from them: m rows and n columns of the accumulator's width, and the
    number of samples, 0 where there are none."""

    def __init__(
        self,
        epilogue: Epilogue,
        m: int,
        n: int,
        device: torch.device,
        samples: int,
        unmerged: tuple[str, ...] = (),
    ) -> None:
        self.epilogue, self.m, self.n, self.device, self.samples = epilogue, m, n, device, samples
        self.unmerged = unmerged
        if epilogue.has_samples and (m % samples if samples else m):
            raise CodaCallError(
                f"`{epilogue.name}` has {samples} samples, which must divide its {m} rows", argument="samples"
            )
        self.base = base_width(epilogue)
        for node in epilogue.nodes:
            if node.op in ("group_sum", "group_max") and self.columns(node.type.width) % node.attr:  # type: ignore[operator]
                raise CodaCallError(
                    f"`{node.op}` of `{epilogue.name}` needs a multiple of {node.attr} columns, "
                    f"got {self.columns(node.type.width)}",
                    node.loc,
                )

    def columns(self, width: Fraction | None) -> int:
        """Columns of something `width` wide."""
        width, base = width or self.base, self.base
        return self.n * width.numerator * base.denominator // (width.denominator * base.numerator)

    def of(self, item: Param | Output) -> tuple[int, ...]:
        """The shape of a parameter or output."""
        rows = (self.m,) if item.type.kind.per_row else (self.samples,) if item.type.kind is Kind.ROWS else ()
        return rows + ((self.columns(item.type.width),) if item.type.width is not None else ())

    @property
    def cuts_slabs(self) -> bool:
        """Some reduction is to one row per sample, and samples end within the rows that one warp of a GEMM has."""
        reduced = any(o.type.kind is Kind.ROWS for o in self.epilogue.outputs)
        return reduced and self.m // self.samples % SLAB_ROWS != 0

    def input(self, param: Param, value: Value, *, pad: bool, fold: bool) -> tuple[Prepare | None, str, Folding]:
        """What makes an input addressable, if anything; its storage dtype; how it is folded, where `fold` allows it.

        Raises CodaCallError.
        """
        if value is None:
            raise CodaCallError(f"`{param.name}` of `{self.epilogue.name}` is missing", argument=param.name)
        names = INPUT_DTYPES[param.type.dtype]
        if isinstance(value, torch.Tensor):
            name = names.get(value.dtype)
            if name and param.type.kind is Kind.SCALAR and value.numel() == 1:
                return _chain(lambda t: t.reshape(1), _as_bytes(name)), name, PLAIN
            in_2d = param.type.kind in (Kind.TILE, Kind.ROWS)
            if name and not in_2d and tuple(value.shape) == self.of(param):
                return _chain(None if value.is_contiguous() else torch.Tensor.contiguous, _as_bytes(name)), name, PLAIN
            if name and in_2d and self._holds(value, param):
                narrow = narrowed if name == "i64" else None
                if narrow:  # a tile of 8-byte elements would be as wide as two of f32
                    value, name = torch.empty(value.shape, dtype=torch.int32, device="meta"), "i32"
                flatten = None
                if value.ndim > 2:
                    matrix = Matrix(value, value.ndim - 1)
                    found = box(matrix) if fold and not narrow else None
                    if found is not None and found.major == "k":
                        return _chain(as_box(value, found), _as_bytes(name)), name, found.folding
                    value, flatten = matrix.flat(), (lambda t: t.reshape(self.of(param)))
                return (
                    _chain(narrow, flatten, _as_bytes(name), (_addressable if pad else _unit_stride)(value)),
                    name,
                    PLAIN,
                )
        elif param.type.kind is Kind.SCALAR:
            if param.type.dtype is Dtype.F32:
                return float, "number", PLAIN
            dtype = {Dtype.I32: torch.int32, Dtype.BOOL: torch.uint8}[param.type.dtype]
            name = {Dtype.I32: "i32", Dtype.BOOL: "bool"}[param.type.dtype]
            # a fill, not a copy from the host: no synchronization, and a CUDA graph can hold it
            return (lambda v: torch.full((1,), int(v), dtype=dtype, device=self.device)), name, PLAIN
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise CodaCallError(
            f"`{param.name}` of `{self.epilogue.name}` must be a {' or '.join(names.values())} tensor of shape "
            f"{list(self.of(param))}, got {got}",
            argument=param.name,
        )

    def parts(self, param: Param, value: Value) -> tuple[Prepare | None, str]:
        """The same of a vector that comes in parts, or is whole: one part."""
        shape = self.of(param)
        if isinstance(value, torch.Tensor) and value.dtype is torch.float32 and tuple(value.shape[-1:]) == shape:
            if value.ndim == 1:
                return (lambda t: t.contiguous().view(1, -1)), "f32"
            if value.ndim == 2 and value.shape[0]:
                return None if value.is_contiguous() else torch.Tensor.contiguous, "f32"
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise CodaCallError(
            f"`{param.name}` of `{self.epilogue.name}` must be parts [parts, {shape[0]}] in f32, got {got}",
            argument=param.name,
        )

    def _holds(self, tensor: torch.Tensor, item: Param | Output) -> bool:
        """Whether a tensor is a tile of a parameter's or output's extents, in two dimensions or folded in more."""
        shape = tensor.shape
        if item.type.kind is Kind.ROWS:
            return tuple(shape) == self.of(item)
        return tensor.ndim >= 2 and (math.prod(shape[:-1]), shape[-1]) == self.of(item)

    def output_foldings(self, out: Mapping[str, torch.Tensor], fold: bool) -> tuple[Folding, ...]:
        """How each store is folded, where `fold` allows it: as the buffer is that the caller gives."""
        found = []
        for store in self.epilogue.stores:
            buffer = out.get(store.name)
            place = box(Matrix(buffer, buffer.ndim - 1)) if fold and buffer is not None and buffer.ndim > 2 else None
            found.append(place.folding if place is not None and place.major == "k" else PLAIN)
        return tuple(found)

    def check_buffers(self, storage: Mapping[str, torch.dtype], out: Mapping[str, torch.Tensor]) -> None:
        """Raise CodaCallError where the caller's buffers do not fit the outputs."""
        outputs = {o.name: o for o in self.epilogue.outputs}
        for name, tensor in out.items():
            if name not in outputs:
                raise CodaCallError(
                    f"`{self.epilogue.name}` has no output `{name}`; it has {', '.join(outputs)}", argument="out"
                )
            wanted = (storage[name], self.of(outputs[name]), self.device)
            if outputs[name].type.kind is Kind.TILE and tensor.ndim > 2 and is_dense(tensor):
                fits = self._holds(tensor, outputs[name])
            else:
                fits = tuple(tensor.shape) == wanted[1] and tensor.is_contiguous()
            if not fits or (tensor.dtype, tensor.device) != (wanted[0], wanted[2]):
                raise CodaCallError(
                    f"the buffer for `{name}` of `{self.epilogue.name}` must be a contiguous {wanted[0]} tensor of "
                    f"shape {list(wanted[1])} on {wanted[2]}, got {tensor.dtype} {list(tensor.shape)} with strides "
                    f"{list(tensor.stride())} on {tensor.device}",
                    argument="out",
                )

    def written(
        self,
        params: Sequence[Param | None],
        values: Sequence[Value],
        prepare: Sequence[Prepare | None],
        results: Sequence[_Result],
        out: Mapping[str, torch.Tensor],
    ) -> tuple[Written, ...]:
        """The caller's buffers, as `check_sharing` takes them.  `params`: of each tensor, None for an operand."""
        direct = {b.given for r in results for b in r.buffers}
        stores = {s.name: s for s in self.epilogue.stores}
        found = []
        for name, buffer in out.items():
            reads = []
            for index, (param, value, step) in enumerate(zip(params, values, prepare, strict=True)):
                if name not in direct or not isinstance(value, torch.Tensor) or (step and _copies(step, value)):
                    continue
                in_place = (
                    param is not None
                    and param.type.kind is Kind.TILE
                    and name in stores
                    and (value.shape, value.stride(), value.dtype) == (buffer.shape, buffer.stride(), buffer.dtype)
                )
                label = param.name if param else "ab"[index]
                reads.append(Read(index, label, span(value), in_place))
            found.append(Written(name, span(buffer), tuple(reads)))
        return tuple(found)

    def results(
        self,
        storage: Mapping[str, torch.dtype],
        tile: tuple[int, int],
        out: Mapping[str, torch.Tensor],
        *,
        padded: bool,
        on_gemm: bool,
        foldings: Sequence[Folding],
    ) -> tuple[_Result, ...]:
        """Results in the order of the kernel's signature, for a grid of such tiles."""
        found = []
        for store, folding in zip(self.epilogue.stores, foldings, strict=True):
            dtype, columns = storage[store.name], self.columns(store.type.width)
            unit = 16 // dtype.itemsize if padded else 1
            pitch = -(-columns // unit) * unit
            if folding != PLAIN:
                place = box(Matrix(out[store.name], out[store.name].ndim - 1))
                assert place is not None
                buffer = _Buffer(place.shape, dtype, given=store.name, stride=place.stride)
                found.append(_Result((store.name,), (buffer,), _as_is, (dtype,)))
            elif pitch == columns:
                direct = store.name in out and out[store.name].is_contiguous()
                direct = direct and not (padded and out[store.name].data_ptr() % 16)
                buffer = _Buffer((self.m, columns), dtype, given=store.name if direct else None)
                found.append(_Result((store.name,), (buffer,), _as_is, (dtype,)))
            else:
                found.append(_Result((store.name,), (_Buffer((self.m, pitch), dtype, columns),), _whole, (dtype,)))
        for vector in self.epilogue.vectors:
            direct = vector.name in out and storage[vector.name] is torch.float32
            given = vector.name if direct else None
            buffer = _Buffer((1, *(self.of(vector) or (1,))), torch.float32, given=given)
            is_scalar = vector.type.kind is Kind.SCALAR
            found.append(_Result((vector.name,), (buffer,), _only if is_scalar else _first, (storage[vector.name],)))
        tiles_m, tiles_n = -(-self.m // tile[0]), -(-self.n // tile[1])
        per_sample = 0
        if any(group[0].type.kind is Kind.ROWS for group in folds(self.epilogue)):
            size = self.m // self.samples
            per_sample = size // SLAB_ROWS if on_gemm else -(-size // tile[0])
            tiles_m = tiles_m if on_gemm else self.samples * per_sample
        for group in folds(self.epilogue):
            kind, width = group[0].type.kind, group[0].type.width
            shape = {
                Kind.COL: (tiles_n, self.m),
                Kind.ROW: (tiles_m, self.columns(width)),
                Kind.SCALAR: (tiles_m, tiles_n),
                Kind.ROWS: (per_sample, self.samples * self.columns(width)),
            }[kind]
            dtypes = tuple(storage[o.name] for o in group)
            finish, carried = self._fold(group, kind)
            buffers = tuple(_Buffer(shape, dtype) for dtype in carried)
            found.append(_Result(tuple(o.name for o in group), buffers, finish, dtypes))
        return tuple(found)

    def _fold(self, group: tuple[Reduce | State, ...], kind: Kind) -> tuple[Finish, tuple[torch.dtype, ...]]:
        """How a reduction's partials are merged, and the dtypes of what it carries."""
        first = group[0]
        if kind is Kind.ROWS:
            merged, carried = self._fold(group, Kind.ROW)
            return self._by_sample(merged), carried
        if isinstance(first, Reduce):
            return _MERGES[first.how, kind is Kind.SCALAR], (torch.float32,)
        dtypes = tuple(RESULT_DTYPES[dtype.value] for _, dtype in first.definition.carried)
        all_results = tuple(dtype.value for _, dtype in first.definition.results)
        merge = function(attrs.evolve(merge_spec(first, self.epilogue.precise), overlap=overlap))
        chosen = [o.result for o in group if isinstance(o, State)]
        results = [RESULT_DTYPES[name] for name in all_results]

        def finish(partials: list[torch.Tensor], out: Given) -> Iterable[torch.Tensor]:
            if kind is Kind.SCALAR:
                partials = [p.reshape(-1, 1) for p in partials]
            outputs = [empty((1, partials[0].shape[1]), dtype=d, device=self.device) for d in results]
            for i, target in zip(chosen, out or (), strict=False):
                if target is not None and target.dtype is results[i]:
                    outputs[i] = target.view(1, -1)
            merge(tuple(partials), tuple(outputs))
            return [outputs[i][0, 0] if kind is Kind.SCALAR else outputs[i][0] for i in chosen]

        return finish, dtypes

    def _by_sample(self, finish: Finish) -> Finish:
        """What a reduction of all samples side by side gives, as one row for each."""

        def finish_samples(partials: list[torch.Tensor], out: Given) -> Iterable[torch.Tensor]:
            flat = [None if target is None else target.view(-1) for target in out or ()]
            return [result.view(self.samples, -1) for result in finish(partials, flat)]

        return finish_samples


def _chain(*steps: Prepare | None) -> Prepare | None:
    """Preparations one after the other; None where there is none."""
    taken = [step for step in steps if step is not None]
    if len(taken) < 2:
        return taken[0] if taken else None
    return lambda value: functools.reduce(lambda v, step: step(v), taken, value)


def _filled(target: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A buffer of the caller with such contents."""
    return target.copy_(values.view(target.shape))


def _copies(step: Prepare, value: torch.Tensor) -> bool:
    """Whether what `step` makes of a tensor is a copy."""
    made = step(value)
    return isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()


def _as_bytes(name: str) -> Prepare | None:
    return (lambda t: t.view(torch.uint8)) if name == "bool" else None


def _as_is(buffers: list[torch.Tensor], out: Given) -> Iterable[torch.Tensor]:
    return buffers


def _whole(buffers: list[torch.Tensor], out: Given) -> Iterable[torch.Tensor]:
    return [buffers[0].contiguous()]


def _first(buffers: list[torch.Tensor], out: Given) -> Iterable[torch.Tensor]:
    return [buffers[0][0]]


def _only(buffers: list[torch.Tensor], out: Given) -> Iterable[torch.Tensor]:
    return [buffers[0][0, 0]]


def _merged(how: Callable[..., torch.Tensor], axes: tuple[int, ...]) -> Finish:
    def finish(buffers: list[torch.Tensor], out: Given) -> Iterable[torch.Tensor]:
        partial, target = buffers[0], out[0] if out else None
        if axes == (0,) and partial.shape[0] == 1:
            return [partial[0]]
        if target is not None and target.dtype is partial.dtype:
            return [how(partial, axes, out=target)]
        return [how(partial, axes)]

    return finish


# (how, whether both axes are reduced) -> how partials are merged
_MERGES: dict[tuple[str, bool], Finish] = {
    (how, is_scalar): _merged(function_, (0, 1) if is_scalar else (0,))
    for how, function_ in (("sum", torch.sum), ("max", torch.amax), ("min", torch.amin))
    for is_scalar in (False, True)
}


def _samples(epilogue: Epilogue, inputs: Mapping[str, torch.Tensor | float], given: int | None) -> int:
    """The number of samples, 0 where there are none.  Raises CodaCallError where nothing determines it."""
    if not epilogue.has_samples:
        return 0
    for param in epilogue.params:
        value = inputs.get(param.name)
        if given is None and param.type.kind is Kind.ROWS and isinstance(value, torch.Tensor) and value.ndim:
            given = value.shape[0]
    if given is None:
        raise CodaCallError(
            f"the inputs of `{epilogue.name}` do not determine the number of its samples, {epilogue.dims[2]}",
            argument="samples",
            hint=f"pass samples={epilogue.dims[2]}, or where it is hosted extents=({', '.join(epilogue.dims)})",
        )
    return given


def _hosted_extents(
    epilogue: Epilogue, inputs: Mapping[str, torch.Tensor | float], extents: tuple[int, ...] | None
) -> tuple[int, int, torch.device]:
    """(rows, columns of the accumulator's width, device)."""
    base = base_width(epilogue)
    device = next((v.device for v in inputs.values() if isinstance(v, torch.Tensor)), torch.device("cuda"))
    if extents is not None:
        return extents[0], int(extents[1] * base), device
    m = n = None
    for param in epilogue.params:
        value = inputs.get(param.name)
        if isinstance(value, torch.Tensor):
            if param.type.kind.per_row and value.ndim:
                m = value.shape[0] if m is None else m
            if param.type.width is not None and value.ndim:
                n = int(value.shape[-1] * base / param.type.width) if n is None else n
    if m is None or n is None:
        raise CodaCallError(
            f"the inputs of `{epilogue.name}` do not determine its {'rows' if m is None else 'columns'}",
            argument="extents",
            hint="pass extents=(M, N)",
        )
    return m, n, device


def _operand(matrix: Matrix, fold: bool) -> tuple[Prepare | None, str, Folding]:
    """What makes a GEMM operand addressable by TMA; its major: `k`, or `mn` where the first axis is contiguous; and how
    it is folded, where `fold` allows it."""
    tensor, shape = matrix.tensor, matrix.shape
    if shape[1] == 0:  # an empty sum: one step of zeros gives it
        return (lambda t: t.new_zeros(shape[0], 8)), "k", PLAIN
    flatten = None
    if tensor.ndim > 2:
        found = box(matrix) if fold else None
        if found is not None:
            return as_box(tensor, found), found.major, found.folding
        tensor, flatten = matrix.flat(), (lambda t: t.reshape(shape))
    prepare, major = _plain_operand(tensor)
    return _chain(flatten, prepare), major, PLAIN


def _plain_operand(tensor: torch.Tensor) -> tuple[Prepare | None, str]:
    if _is_aligned(tensor):
        return None, "k"
    if _is_aligned(tensor.T):
        return None, "mn"
    if tensor.stride(0) == 1 and tensor.stride(1) != 1:  # the contiguous axis stays so
        return (lambda t: _padded(t.T).T), "mn"
    return _padded, "k"


def _addressable(tensor: torch.Tensor) -> Prepare | None:
    return None if _is_aligned(tensor) else _padded


def _unit_stride(tensor: torch.Tensor) -> Prepare | None:
    return None if tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1] else torch.Tensor.contiguous


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Rows contiguous and starting on multiples of 16 bytes, none overlapping: what TMA can address."""
    pitch = tensor.stride(0)
    return (
        tensor.stride(1) == 1
        and pitch >= tensor.shape[1]
        and pitch * tensor.element_size() % 16 == 0
        and tensor.data_ptr() % 16 == 0
    )


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose rows are contiguous and start on multiples of 16 bytes."""
    unit = 16 // tensor.element_size()
    rows, columns = tensor.shape
    buffer = torch.empty((rows, -(-columns // unit) * unit), dtype=tensor.dtype, device=tensor.device)
    return buffer[:, :columns].copy_(tensor)


@functools.cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


__all__ = ["DTYPE_NAMES", "TORCH_DTYPES", "empty", "gemm", "hosted", "vector"]
