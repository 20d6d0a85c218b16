"""What makes of a value's tensor the matrix, vector or scalar that a statement sees."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from codalang.ir.program_reference import view
from codalang.ir.types import Kind
from codalang.lower.folded import Matrix
from codalang.torch.program_call import Shape
from codalang.torch.program_step import Known, Prepare


def prepared(value: Known, kind: Kind) -> Prepare | None:
    """What makes the matrix, vector or scalar of a value that a statement sees."""
    type_, flat = value.type, value.flat
    if kind is Kind.SCALAR:
        return None
    if type_.pair_axis is None:
        rank = 2 if kind in (Kind.TILE, Kind.ROWS) else 1
        return None if len(value.shape) == rank else functools.partial(_joined, columns=rank - 1)
    if flat == value.shape:
        return functools.partial(view, type_=type_, kind=kind)
    return lambda tensor: view(tensor.reshape(flat), type_, kind)


def _joined(tensor: Tensor, columns: int) -> Tensor:
    """All axes, or all but the last, made one; one row where there is none."""
    return tensor[None] if tensor.dim() <= columns else tensor.flatten(0, tensor.dim() - 1 - columns)


def operand(value: Known, transposed: bool) -> tuple[int, Prepare | None]:
    """An operand of the GEMM.  The pairs of a weight are brought side by side by a view of more axes."""
    type_, flat = value.type, value.flat
    pair = type_.pair_axis
    if pair is not None and pair < len(type_.shape) - 2:
        return value.slot, functools.partial(_folded, shape=flat, order=type_.order, transposed=transposed)
    prepare = prepared(value, Kind.TILE)
    if not transposed:
        return value.slot, prepare
    return value.slot, torch.t if prepare is None else lambda tensor: prepare(tensor).t()


def _folded(tensor: Tensor, shape: Shape, order: tuple[int, ...], transposed: bool) -> Matrix:
    ordered = tensor.reshape(shape).permute(order)
    matrix = Matrix(ordered, ordered.dim() - 1)
    return matrix.T if transposed else matrix
