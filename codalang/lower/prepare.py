"""Operands and inputs as kernels take them: addressable by TMA, in two dimensions or folded, of dtypes that they load.

What makes a tensor so is decided from its form, and applied in every call of that form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from codalang.errors import CodaCallError
from codalang.ir.bind import narrowed
from codalang.ir.epilogue import Param
from codalang.ir.types import Dtype, Kind
from codalang.lower.dtypes import INPUT_DTYPES
from codalang.lower.folded import Matrix, as_box, box
from codalang.lower.shape import Shape
from codalang.lower.spec import PLAIN, Folding

Value = torch.Tensor | float | None
Prepare = Callable[[Any], Any]


def prepared_input(
    shape: Shape, param: Param, value: Value, *, pad: bool, fold: bool
) -> tuple[Prepare | None, str, Folding]:
    """What makes an input addressable, if anything; its storage dtype; how it is folded, where `fold` allows it.

    Raises CodaCallError.
    """
    if value is None:
        raise CodaCallError(f"`{param.name}` of `{shape.epilogue.name}` is missing", argument=param.name)
    names = INPUT_DTYPES[param.type.dtype]
    if isinstance(value, torch.Tensor):
        name = names.get(value.dtype)
        if name and param.type.kind is Kind.SCALAR and value.numel() == 1:
            return _chain(lambda t: t.reshape(1), _as_bytes(name)), name, PLAIN
        in_2d = param.type.kind in (Kind.TILE, Kind.ROWS)
        if name and not in_2d and tuple(value.shape) == shape.of(param):
            return _chain(None if value.is_contiguous() else torch.Tensor.contiguous, _as_bytes(name)), name, PLAIN
        if name and in_2d and shape.holds(value, param):
            narrow = narrowed if name == "i64" else None
            if narrow:  # a tile of 8-byte elements would be as wide as two of f32
                value, name = torch.empty(value.shape, dtype=torch.int32, device="meta"), "i32"
            flatten = None
            if value.ndim > 2:
                matrix = Matrix(value, value.ndim - 1)
                found = box(matrix) if fold and not narrow else None
                if found is not None and found.major == "k":
                    return _chain(as_box(value, found), _as_bytes(name)), name, found.folding
                value, flatten = matrix.flat(), (lambda t: t.reshape(shape.of(param)))
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
        return (lambda v: torch.full((1,), int(v), dtype=dtype, device=shape.device)), name, PLAIN
    got = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise CodaCallError(
        f"`{param.name}` of `{shape.epilogue.name}` must be a {' or '.join(names.values())} tensor of shape "
        f"{list(shape.of(param))}, got {got}",
        argument=param.name,
    )


def prepared_parts(shape: Shape, param: Param, value: Value) -> tuple[Prepare | None, str]:
    """The same of a vector that comes in parts, or is whole: one part."""
    extents = shape.of(param)
    if isinstance(value, torch.Tensor) and value.dtype is torch.float32 and tuple(value.shape[-1:]) == extents:
        if value.ndim == 1:
            return (lambda t: t.contiguous().view(1, -1)), "f32"
        if value.ndim == 2 and value.shape[0]:
            return None if value.is_contiguous() else torch.Tensor.contiguous, "f32"
    got = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise CodaCallError(
        f"`{param.name}` of `{shape.epilogue.name}` must be parts [parts, {extents[0]}] in f32, got {got}",
        argument=param.name,
    )


def prepared_operand(matrix: Matrix, fold: bool) -> tuple[Prepare | None, str, Folding]:
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
    if is_aligned(tensor):
        return None, "k"
    if is_aligned(tensor.T):
        return None, "mn"
    if tensor.stride(0) == 1 and tensor.stride(1) != 1:  # the contiguous axis stays so
        return (lambda t: _padded(t.T).T), "mn"
    return _padded, "k"


def check_operands(a: Matrix, b: Matrix) -> None:
    """Raise CodaCallError where no kernel multiplies a by b."""
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


def is_aligned(tensor: torch.Tensor) -> bool:
    """Rows contiguous and starting on multiples of 16 bytes, none overlapping: what TMA can address."""
    pitch = tensor.stride(0)
    return (
        tensor.stride(1) == 1
        and pitch >= tensor.shape[1]
        and pitch * tensor.element_size() % 16 == 0
        and tensor.data_ptr() % 16 == 0
    )


def copies(step: Prepare, value: torch.Tensor) -> bool:
    """Whether what `step` makes of a tensor is a copy."""
    made = step(value)
    return isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()


def _chain(*steps: Prepare | None) -> Prepare | None:
    """Preparations one after the other; None where there is none."""
    taken = [step for step in steps if step is not None]
    if len(taken) < 2:
        return taken[0] if taken else None
    return lambda value: functools.reduce(lambda v, step: step(v), taken, value)


def _as_bytes(name: str) -> Prepare | None:
    return (lambda t: t.view(torch.uint8)) if name == "bool" else None


def _addressable(tensor: torch.Tensor) -> Prepare | None:
    return None if is_aligned(tensor) else _padded


def _unit_stride(tensor: torch.Tensor) -> Prepare | None:
    return None if tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1] else torch.Tensor.contiguous


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose rows are contiguous and start on multiples of 16 bytes."""
    unit = 16 // tensor.element_size()
    rows, columns = tensor.shape
    buffer = torch.empty((rows, -(-columns // unit) * unit), dtype=tensor.dtype, device=tensor.device)
    return buffer[:, :columns].copy_(tensor)
