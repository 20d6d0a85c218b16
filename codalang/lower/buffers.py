"""Buffers that a caller gives for outputs, and the memory that they may share with what a call reads.

A kernel reads its inputs while it writes its outputs, so the two must be apart, with one exception: an output may be
written over a tile input in place, as `store c = acc + c` does to accumulate a gradient.  The buffer must then be that
very tensor: same address, shape, strides and dtype.  This is safe since both kernels move a tile input and a tile
output of equal width in the same pieces, and a piece is read and written by one warp alone, in this order:

    on a GEMM   16 rows of a sub-tile: the TMA load has arrived (its barrier) before the epilogue computes, and the TMA
                store is issued after it; loads in flight meanwhile are of other pieces
    hosted      a lane's columns of a row: loaded into registers, then stored

Lanes beyond a ragged edge read elements of other lanes, and drop them.  What goes through a copy (an input that TMA
cannot address; an output whose pitch it cannot) is read before, or written after, the kernel and may share anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from codalang.errors import CodaCallError


@attrs.frozen
class Read:
    """A tensor that the kernel itself reads.

    Attributes:
        index: which of the call's tensors.
        name: what the caller calls it.
        size: bytes from its first element to the end of its last.
        in_place: it may be the buffer.
    """

    index: int
    name: str
    size: int
    in_place: bool


@attrs.frozen
class Written:
    """A buffer of the caller: its output's name, its size in bytes, and what the kernel reads while it writes it."""

    name: str
    size: int
    reads: tuple[Read, ...]


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last; strides are not negative in torch."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def check_sharing(buffers: Sequence[Written], values: Sequence[Any], out: Mapping[str, torch.Tensor]) -> None:
    """Raise CodaCallError where a buffer shares memory that it must not share."""
    taken: list[tuple[int, int, str]] = []
    for buffer in buffers:
        start = out[buffer.name].data_ptr()
        end = start + buffer.size
        for read in buffer.reads:
            address = values[read.index].data_ptr()
            if address < end and start < address + read.size and not (read.in_place and address == start):
                raise CodaCallError(
                    f"the buffer for `{buffer.name}` shares memory with `{read.name}`, which the kernel reads while it "
                    "writes the buffer",
                    argument="out",
                    hint="an output may overwrite a tile input of its own width in place: the same tensor, or a view "
                    "of equal address, shape, strides and dtype",
                )
        for first, last, name in taken:
            if first < end and start < last:
                raise CodaCallError(f"the buffers for `{name}` and `{buffer.name}` share memory", argument="out")
        taken.append((start, end, buffer.name))
