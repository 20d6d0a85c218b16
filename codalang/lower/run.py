"""Running an epilogue on CUDA tensors: on a GEMM's accumulator (`gemm`) or on plain tensors (`hosted`).

What TMA cannot address is made so here: an operand or tile whose base or pitch is not a multiple of 16 bytes goes
through a copy with a padded pitch, an output likewise, and the caller gets contiguous tensors all the same.

Reductions come from the kernels as one partial per tile, and are merged by one sum over them, in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import attrs
import torch

from codalang.errors import CodaCallError
from codalang.ir.epilogue import Epilogue, Output, Param
from codalang.ir.types import Kind
from codalang.lower import plan
from codalang.lower.load import function
from codalang.lower.spec import Config, KernelSpec, Operand, base_width, loaded_params

TORCH_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

empty = torch.empty  # how outputs and partials are allocated; tests replace it by one that poisons


def gemm(
    epilogue: Epilogue,
    a: torch.Tensor,
    b: torch.Tensor,
    inputs: Mapping[str, torch.Tensor | float],
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    config: Config | None = None,
) -> dict[str, torch.Tensor]:
    """The epilogue on acc = a @ b.T.

    Args:
        epilogue: its first parameter is the accumulator.
        a, b: [M, K] and [N, K], both bf16 or both f16, on one Hopper GPU; any strides.  N counts the accumulator's
            columns.
        inputs: the other parameters by name; tiles [M, w*N], rows [w*N], cols [M], scalars as numbers or one-element
            tensors.  Parameters that the epilogue does not use may be missing.
        dtypes: storage dtypes of outputs; default: the annotation, else a's dtype (reductions: f32).
        config: overrides the heuristic.

    Returns:
        The outputs by name, contiguous.

    Raises:
        CodaCallError: a shape or dtype that does not fit.
        CodaUnsupportedError, CodaCompileError: see `plan.choose` and `compile.compile_object`.
    """
    values = [inputs.get(name) for name in _loaded_names(epilogue, True)]
    key = (epilogue, config, function, _form(a), _form(b), *map(_form, values), *(dtypes or {}).items())
    call = _CALLS.get(key) or _remember(key, _gemm_call(epilogue, a, b, values, dict(dtypes or {}), config))
    return call.run((a, b, *values))


def hosted(
    epilogue: Epilogue,
    inputs: Mapping[str, torch.Tensor | float],
    *,
    extents: tuple[int, int] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    default_dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """The epilogue on plain tensors, the accumulator among `inputs`; no matmul.

    Args:
        extents: (M, N) with N of width 1; needed where no tile determines them.
        dtypes: storage dtypes of outputs, as for `gemm`.
        default_dtype: storage dtype of tile outputs without annotation; default: the accumulator tensor's.

    Raises CodaCallError for shapes that do not fit.
    """
    values = [inputs.get(name) for name in _loaded_names(epilogue, False)]
    key = (epilogue, extents, default_dtype, function, *map(_form, values), *(dtypes or {}).items())
    call = _CALLS.get(key)
    if call is None:
        call = _remember(key, _hosted_call(epilogue, inputs, values, extents, dict(dtypes or {}), default_dtype))
    return call.run(tuple(values))


# ---------------------------------------------------------------- what calls of one signature have in common

Value = torch.Tensor | float | None
Prepare = Callable[[Any], Any]


@attrs.frozen
class _Output:
    """How one output is allocated and finished.

    Attributes:
        buffer: the shape that is allocated: a padded pitch, or one partial per tile.
        columns: columns of the buffer that the kernel sees, where that is not all.
        merge: axes to sum over, for partials.
        result: dtype of the result.
    """

    name: str
    buffer: tuple[int, ...]
    columns: int | None
    merge: tuple[int, ...]
    dtype: torch.dtype
    result: torch.dtype

    def allocate(self, device: torch.device) -> torch.Tensor:
        """The kernel's argument."""
        tensor = empty(self.buffer, dtype=self.dtype, device=device)
        return tensor if self.columns is None else tensor[:, : self.columns]

    def finish(self, tensor: torch.Tensor) -> torch.Tensor:
        """The caller's result: contiguous, merged, in its dtype."""
        if self.merge:
            tensor = tensor[0] if self.merge == (0,) and self.buffer[0] == 1 else tensor.sum(self.merge)
        elif self.columns is not None:
            tensor = tensor.contiguous()
        return tensor if tensor.dtype is self.result else tensor.to(self.result)


@attrs.frozen
class _Call:
    """A launch with everything decided: only pointers change from call to call of a signature.

    Attributes:
        launch: the compiled function, None where there is nothing to compute.
        prepare: for each tensor of the call, what makes it addressable, None where it is so.
        operands: how many of them are operands of a GEMM; the others are the epilogue's inputs.
        kernel_outputs: outputs in the order of the kernel's signature.
        names: the outputs' names in textual order.
        tail: the integers that end the kernel's signature.
    """

    launch: Callable[..., None] | None
    prepare: tuple[Prepare | None, ...]
    operands: int
    kernel_outputs: tuple[_Output, ...]
    names: tuple[str, ...]
    tail: tuple[int, ...]
    device: torch.device

    def run(self, values: tuple[Value, ...]) -> dict[str, torch.Tensor]:
        """Allocate, launch on the current stream, finish."""
        if self.launch is None:
            return {o.name: torch.zeros(o.buffer, dtype=o.result, device=self.device) for o in self.kernel_outputs}
        tensors = [p(v) if p else v for p, v in zip(self.prepare, values, strict=True)]
        outputs = tuple([o.allocate(self.device) for o in self.kernel_outputs])
        arguments = (*tensors[: self.operands], tuple(tensors[self.operands :]), outputs, *self.tail)
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            self.launch(*arguments)
        else:
            with torch.cuda.device(self.device):
                self.launch(*arguments)
        finished = {o.name: o.finish(t) for o, t in zip(self.kernel_outputs, outputs, strict=True)}
        return {name: finished[name] for name in self.names}


_CALLS: dict[Any, _Call] = {}
_MOST_CALLS = 4096  # signatures remembered; a new sequence length is a new one


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


@functools.lru_cache(maxsize=1024)
def _loaded_names(epilogue: Epilogue, on_gemm: bool) -> tuple[str, ...]:
    return tuple(p.name for p in loaded_params(epilogue, on_gemm))


def _gemm_call(
    epilogue: Epilogue,
    a: torch.Tensor,
    b: torch.Tensor,
    values: list[Value],
    dtypes: dict[str, torch.dtype],
    config: Config | None,
) -> _Call:
    if a.dtype != b.dtype or a.dtype not in (torch.bfloat16, torch.float16):
        raise CodaCallError(
            f"a kernel multiplies two bf16 or two f16 operands, got {a.dtype} and {b.dtype}", argument="a"
        )
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise CodaCallError(
            f"a [M, K] and b [N, K] must agree in K, got {list(a.shape)} and {list(b.shape)}", argument="b"
        )
    shape = _Shape(epilogue, a.shape[0], b.shape[0])
    storage = _storage_dtypes(epilogue, a.dtype, dtypes)
    inputs = [shape.input(p, v, pad=True) for p, v in zip(loaded_params(epilogue, True), values, strict=True)]
    names = tuple(o.name for o in epilogue.outputs)
    if shape.is_empty:
        return _Call(None, (), 0, shape.empty_outputs(storage), names, (), a.device)
    prepare_a, a_major = _operand(a)
    prepare_b, b_major = _operand(b)
    spec = KernelSpec(
        epilogue,
        Operand(DTYPE_NAMES[a.dtype], a_major, b_major),
        tuple(dtype for _, dtype in inputs),
        tuple(DTYPE_NAMES[storage[s.name]] for s in epilogue.stores),
        None,
    )
    chosen = config or plan.choose(spec, shape.m, shape.n, a.shape[1])
    cluster = chosen.cluster[0] * chosen.cluster[1]
    return _Call(
        function(attrs.evolve(spec, config=chosen)),
        (prepare_a, prepare_b, *(prepare for prepare, _ in inputs)),
        2,
        shape.outputs(storage, chosen.tile, padded=True),
        names,
        (max(1, _sms(a.device) // cluster),),
        a.device,
    )


def _hosted_call(
    epilogue: Epilogue,
    given: Mapping[str, torch.Tensor | float],
    values: list[Value],
    extents: tuple[int, int] | None,
    dtypes: dict[str, torch.dtype],
    default_dtype: torch.dtype | None,
) -> _Call:
    m, n, device = _hosted_extents(epilogue, given, extents)
    tensors = [v for v in given.values() if isinstance(v, torch.Tensor)]
    default = default_dtype or next((t.dtype for t in tensors), torch.float32)
    shape = _Shape(epilogue, m, n)
    storage = _storage_dtypes(epilogue, default, dtypes)
    params = loaded_params(epilogue, False)
    inputs = [shape.input(p, v, pad=False) for p, v in zip(params, values, strict=True)]
    names = tuple(o.name for o in epilogue.outputs)
    if shape.is_empty:
        return _Call(None, (), 0, shape.empty_outputs(storage), names, (), device)
    # what `prepare` copies is a fresh contiguous tensor; its rows are aligned if they are whole
    tiles = [
        (v if prepare is None else torch.empty(v.shape, dtype=v.dtype, device="meta"))
        for p, v, (prepare, _) in zip(params, values, inputs, strict=True)
        if p.type.kind is Kind.TILE and isinstance(v, torch.Tensor)
    ]
    aligned = n % 8 == 0 and all(_is_aligned(t) for t in tiles)
    spec = KernelSpec(
        epilogue,
        None,
        tuple(dtype for _, dtype in inputs),
        tuple(DTYPE_NAMES[storage[s.name]] for s in epilogue.stores),
        None,
        aligned,
    )
    tile = (plan.HOSTED_ROWS, 32 * plan.hosted_run(aligned))
    outputs = shape.outputs(storage, tile, padded=aligned)
    return _Call(function(spec), tuple(prepare for prepare, _ in inputs), 0, outputs, names, (m, n), device)


def _storage_dtypes(
    epilogue: Epilogue, default: torch.dtype, dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.dtype]:
    """Each output's storage dtype: the call's, else the annotation, else `default` for tiles and f32 for reductions."""
    fallback = {o.name: default for o in epilogue.stores} | {o.name: torch.float32 for o in epilogue.reductions}
    annotated = {o.name: TORCH_DTYPES[o.dtype] for o in epilogue.outputs if o.dtype}
    return fallback | annotated | dict(dtypes)


class _Shape:
    """The extents of a call, and what follows from them: m rows and n columns of the accumulator's width."""

    def __init__(self, epilogue: Epilogue, m: int, n: int) -> None:
        self.epilogue, self.m, self.n = epilogue, m, n
        self.base = base_width(epilogue)
        self.is_empty = m == 0 or n == 0

    def columns(self, width: Fraction | None) -> int:
        """Columns of something `width` wide."""
        width, base = width or self.base, self.base
        return self.n * width.numerator * base.denominator // (width.denominator * base.numerator)

    def of(self, item: Param | Output) -> tuple[int, ...]:
        """The shape of a parameter or output."""
        rows = (self.m,) if item.type.kind.has_rows else ()
        return rows + ((self.columns(item.type.width),) if item.type.width is not None else ())

    def input(self, param: Param, value: Value, *, pad: bool) -> tuple[Prepare | None, str]:
        """What makes an input addressable, if anything, and its storage dtype.  Raises CodaCallError."""
        if value is None:
            raise CodaCallError(f"`{param.name}` of `{self.epilogue.name}` is missing", argument=param.name)
        if param.type.kind is Kind.SCALAR:
            if not isinstance(value, torch.Tensor):
                return float, "number"
            if value.numel() == 1 and value.dtype in DTYPE_NAMES:
                return (lambda t: t.reshape(1)), DTYPE_NAMES[value.dtype]
        elif isinstance(value, torch.Tensor) and tuple(value.shape) == self.of(param) and value.dtype in DTYPE_NAMES:
            if param.type.kind is Kind.TILE:
                return (_addressable if pad else _unit_stride)(value), DTYPE_NAMES[value.dtype]
            return (None if value.is_contiguous() else torch.Tensor.contiguous), DTYPE_NAMES[value.dtype]
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise CodaCallError(
            f"`{param.name}` of `{self.epilogue.name}` must be a bf16, f16 or f32 tensor of shape "
            f"{list(self.of(param))}, got {got}",
            argument=param.name,
        )

    def outputs(
        self, storage: Mapping[str, torch.dtype], tile: tuple[int, int], *, padded: bool
    ) -> tuple[_Output, ...]:
        """Outputs in the order of the kernel's signature, for a grid of such tiles."""
        found = []
        for store in self.epilogue.stores:
            dtype, columns = storage[store.name], self.columns(store.type.width)
            unit = 16 // dtype.itemsize if padded else 1
            pitch = -(-columns // unit) * unit
            found.append(_Output(store.name, (self.m, pitch), None if pitch == columns else columns, (), dtype, dtype))
        tiles_m, tiles_n = -(-self.m // tile[0]), -(-self.n // tile[1])
        for reduction in self.epilogue.reductions:
            buffer, merge = {
                Kind.COL: ((tiles_n, self.m), (0,)),
                Kind.ROW: ((tiles_m, self.columns(reduction.type.width)), (0,)),
                Kind.SCALAR: ((tiles_m, tiles_n), (0, 1)),
            }[reduction.type.kind]
            found.append(_Output(reduction.name, buffer, None, merge, torch.float32, storage[reduction.name]))
        return tuple(found)

    def empty_outputs(self, storage: Mapping[str, torch.dtype]) -> tuple[_Output, ...]:
        """The outputs where M or N is 0: empty tiles, and sums of nothing; all zeros."""
        return tuple(
            _Output(o.name, self.of(o), None, (), storage[o.name], storage[o.name]) for o in self.epilogue.outputs
        )


def _hosted_extents(
    epilogue: Epilogue, inputs: Mapping[str, torch.Tensor | float], extents: tuple[int, int] | None
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
            if param.type.kind.has_rows and value.ndim:
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


def _operand(tensor: torch.Tensor) -> tuple[Prepare | None, str]:
    """What makes a GEMM operand addressable by TMA, and its major: `k`, or `mn` where the first axis is contiguous."""
    if tensor.shape[1] == 0:  # an empty sum: one step of zeros gives it
        return (lambda t: t.new_zeros(t.shape[0], 8)), "k"
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


__all__ = ["DTYPE_NAMES", "TORCH_DTYPES", "empty", "gemm", "hosted"]
