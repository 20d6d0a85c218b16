"""Running an epilogue on CUDA tensors: on a GEMM's accumulator (`gemm`) or on plain tensors (`hosted`).

What TMA cannot address is made so here: an operand or tile whose base or pitch is not a multiple of 16 bytes goes
through a copy with a padded pitch, an output likewise, and the caller gets contiguous tensors all the same.

Reductions come from the kernels as one partial per tile, and are merged by one sum over them, in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import attrs
import torch

from codalang.errors import CodaCallError
from codalang.ir.epilogue import Epilogue, Param
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
    if a.dtype != b.dtype or a.dtype not in (torch.bfloat16, torch.float16):
        raise CodaCallError(
            f"a kernel multiplies two bf16 or two f16 operands, got {a.dtype} and {b.dtype}", argument="a"
        )
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise CodaCallError(
            f"a [M, K] and b [N, K] must agree in K, got {list(a.shape)} and {list(b.shape)}", argument="b"
        )
    m, n = a.shape[0], b.shape[0]
    call = _Call(epilogue, True, m, n, a.device, a.dtype, dict(dtypes or {}))
    if m == 0 or n == 0:
        return call.nothing()
    if a.shape[1] == 0:  # an empty sum: one step of zeros gives it
        a, b = a.new_zeros(m, 8), b.new_zeros(n, 8)
    a, a_major = _operand(a)
    b, b_major = _operand(b)
    call.load(inputs)
    spec = KernelSpec(
        epilogue,
        Operand(DTYPE_NAMES[a.dtype], a_major, b_major),
        tuple(call.input_dtypes),
        tuple(call.store_dtypes),
        None,
    )
    chosen = config or _chosen(spec, m, n, a.shape[1])
    outputs = call.allocate(-(-m // chosen.tile[0]), -(-n // chosen.tile[1]), aligned=True)
    launch = function(attrs.evolve(spec, config=chosen))
    clusters = max(1, _sms(a.device) // (chosen.cluster[0] * chosen.cluster[1]))
    with torch.cuda.device(a.device):
        launch(a, b, tuple(call.arguments), outputs, clusters)
    return call.results(outputs)


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
    m, n, device = _hosted_extents(epilogue, inputs, extents)
    tensors = [v for v in inputs.values() if isinstance(v, torch.Tensor)]
    default = default_dtype or next((t.dtype for t in tensors), torch.float32)
    call = _Call(epilogue, False, m, n, device, default, dict(dtypes or {}))
    if m == 0 or n == 0:
        return call.nothing()
    aligned = n % 8 == 0
    call.load(inputs, pad=False)
    aligned = aligned and all(_is_aligned(t) for t in call.arguments if isinstance(t, torch.Tensor) and t.ndim == 2)
    spec = KernelSpec(epilogue, None, tuple(call.input_dtypes), tuple(call.store_dtypes), None, aligned)
    outputs = call.allocate(-(-m // plan.HOSTED_ROWS), -(-n // (32 * plan.hosted_run(aligned))), aligned=aligned)
    with torch.cuda.device(device):
        function(spec)(tuple(call.arguments), outputs, m, n)
    return call.results(outputs)


class _Call:
    """One call's tensors, in the order of the kernel's signature."""

    def __init__(
        self,
        epilogue: Epilogue,
        on_gemm: bool,
        m: int,
        n: int,
        device: torch.device,
        default: torch.dtype,
        dtypes: dict[str, torch.dtype],
    ) -> None:
        self.epilogue, self.on_gemm = epilogue, on_gemm
        self.m, self.n, self.device = m, n, device
        self.base = base_width(epilogue)
        self.dtypes = {
            o.name: dtypes.get(o.name) or (TORCH_DTYPES[o.dtype] if o.dtype else default) for o in epilogue.stores
        } | {
            o.name: dtypes.get(o.name) or (TORCH_DTYPES[o.dtype] if o.dtype else torch.float32)
            for o in epilogue.reductions
        }
        self.store_dtypes = [DTYPE_NAMES[self.dtypes[o.name]] for o in epilogue.stores]
        self.arguments: list[Any] = []
        self.input_dtypes: list[str] = []

    def columns(self, width: Fraction | None) -> int:
        """Columns of something `width` wide, where the accumulator has n."""
        width, base = width or self.base, self.base
        return self.n * width.numerator * base.denominator // (width.denominator * base.numerator)

    def load(self, inputs: Mapping[str, torch.Tensor | float], *, pad: bool = True) -> None:
        """Fill `arguments` and `input_dtypes` from the call's inputs."""
        for param in loaded_params(self.epilogue, self.on_gemm):
            if param.name not in inputs:
                raise CodaCallError(f"`{param.name}` of `{self.epilogue.name}` is missing", argument=param.name)
            value = inputs[param.name]
            if param.type.kind is Kind.SCALAR and not isinstance(value, torch.Tensor):
                self.arguments.append(float(value))
                self.input_dtypes.append("number")
                continue
            tensor = self._shaped(param, value)
            if param.type.kind is Kind.TILE:
                tensor = _addressable(tensor) if pad else _unit_stride(tensor)
            self.arguments.append(tensor)
            self.input_dtypes.append(DTYPE_NAMES[tensor.dtype])

    def _shaped(self, param: Param, value: Any) -> torch.Tensor:
        shapes = {
            Kind.TILE: (self.m, self.columns(param.type.width)),
            Kind.ROW: (self.columns(param.type.width),),
            Kind.COL: (self.m,),
            Kind.SCALAR: (1,),
        }
        want = shapes[param.type.kind]
        tensor = value.reshape(1) if param.type.kind is Kind.SCALAR and value.numel() == 1 else value
        if tuple(tensor.shape) != want or tensor.dtype not in DTYPE_NAMES:
            raise CodaCallError(
                f"`{param.name}` of `{self.epilogue.name}` must be a bf16, f16 or f32 tensor of shape {list(want)}, "
                f"got {tensor.dtype} {list(tensor.shape)}",
                argument=param.name,
            )
        return tensor if param.type.kind is Kind.TILE else tensor.contiguous()

    def allocate(self, tiles_m: int, tiles_n: int, *, aligned: bool) -> tuple[torch.Tensor, ...]:
        """Outputs and partials, in the order of the kernel's signature."""
        outputs = []
        for store in self.epilogue.stores:
            dtype = self.dtypes[store.name]
            columns = self.columns(store.type.width)
            unit = 16 // dtype.itemsize if aligned else 1
            pitch = -(-columns // unit) * unit
            buffer = empty((self.m, pitch), dtype=dtype, device=self.device)
            outputs.append(buffer if pitch == columns else buffer[:, :columns])
        for reduction in self.epilogue.reductions:
            shape = {
                Kind.COL: (tiles_n, self.m),
                Kind.ROW: (tiles_m, self.columns(reduction.type.width)),
                Kind.SCALAR: (tiles_m, tiles_n),
            }[reduction.type.kind]
            outputs.append(empty(shape, dtype=torch.float32, device=self.device))
        return tuple(outputs)

    def results(self, outputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        """Outputs by name in textual order: tiles contiguous, partials merged."""
        stores = len(self.epilogue.stores)
        named = {s.name: t.contiguous() for s, t in zip(self.epilogue.stores, outputs[:stores], strict=True)}
        for reduction, partial in zip(self.epilogue.reductions, outputs[stores:], strict=True):
            axes = (0, 1) if reduction.type.kind is Kind.SCALAR else (0,)
            named[reduction.name] = partial.sum(axes).to(self.dtypes[reduction.name])
        return {o.name: named[o.name] for o in self.epilogue.outputs}

    def nothing(self) -> dict[str, torch.Tensor]:
        """The outputs where M or N is 0: empty tiles, and sums of nothing."""
        shapes = {
            o.name: {
                Kind.TILE: (self.m, self.columns(o.type.width)),
                Kind.ROW: (self.columns(o.type.width),),
                Kind.COL: (self.m,),
                Kind.SCALAR: (),
            }[o.type.kind]
            for o in self.epilogue.outputs
        }
        return {name: torch.zeros(shape, dtype=self.dtypes[name], device=self.device) for name, shape in shapes.items()}


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


def _operand(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """A GEMM operand that TMA can address, and its major: `k`, or `mn` where the first axis is contiguous."""
    if tensor.stride(1) == 1 and _is_aligned(tensor):
        return tensor, "k"
    if tensor.stride(0) == 1 and _is_aligned(tensor.T):
        return tensor, "mn"
    # whichever axis is denser in memory stays the contiguous one
    if tensor.stride(0) < tensor.stride(1) and tensor.stride(0) == 1:
        return _padded(tensor.T).T, "mn"
    return _padded(tensor), "k"


def _addressable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(1) == 1 and _is_aligned(tensor) else _padded(tensor)


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1] else tensor.contiguous()


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


@functools.lru_cache(maxsize=4096)
def _chosen(spec: KernelSpec, m: int, n: int, k: int) -> Config:
    return plan.choose(spec, m, n, k)


@functools.cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


__all__ = ["DTYPE_NAMES", "TORCH_DTYPES", "empty", "gemm", "hosted"]
