"""Matrices that lie folded in a tensor of more dimensions: an interleaving is a view, never a copy.

    logical row             tensor                 the view of it that is passed
    2*j + g                 w[g, j, k]             w.permute(1, 0, 2)           [F, 2, K]
    h*2P + 2*j + g          w[h, g, j, k]          w.permute(0, 2, 1, 3)        [H, P, 2, K]

The row index is the row-major flattening of a view's leading dimensions.  TMA loads and stores such a view as it does
a matrix, in boxes of one more dimension or two, as long as a tile's rows are whole boxes; what it cannot address goes
through a copy in two dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs
import torch

from codalang.lower.spec import Folding

MOST_DIMENSIONS = 5  # of a tensor that TMA addresses
# Extents of inner dimensions are part of a kernel, so only small ones are: sequence lengths, say, must not be.
MOST_FOLDED = 256


@attrs.frozen
class Matrix:
    """A matrix whose row index is the row-major flattening of the first `row_dims` dimensions of a tensor, and whose
    column index is that of the others.  A tensor alone stands for one with a single column dimension."""

    tensor: torch.Tensor
    row_dims: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        extents = self.tensor.shape
        return math.prod(extents[: self.row_dims]), math.prod(extents[self.row_dims :])

    @property
    def T(self) -> Matrix:  # noqa: N802
        """The transpose, a view."""
        dims = range(self.tensor.ndim)
        view = self.tensor.permute(*dims[self.row_dims :], *dims[: self.row_dims])
        return Matrix(view, self.tensor.ndim - self.row_dims)

    def flat(self) -> torch.Tensor:
        """In two dimensions: a view where its strides allow one, else a copy."""
        return self.tensor if self.tensor.ndim == 2 else self.tensor.reshape(self.shape)


@attrs.frozen
class Box:
    """A matrix as TMA addresses it.

    Attributes:
        shape, stride: of the tensor that is passed: as few dimensions as its strides allow.
        major: `k` where the columns are contiguous, `mn` where the rows are.
        folding: what the kernel must know of it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    major: str
    folding: Folding

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with these dimensions."""
        return tensor.as_strided(self.shape, self.stride)


def box(matrix: Matrix) -> Box | None:
    """How TMA addresses a matrix that is folded, or None where it cannot."""
    tensor, dims = matrix.tensor, matrix.row_dims
    rows = _merged(tensor.shape[:dims], tensor.stride()[:dims])
    columns = _merged(tensor.shape[dims:], tensor.stride()[dims:])
    size = tensor.element_size()
    for major, inner, outer in (("k", columns, rows), ("mn", rows, columns)):
        strides = [stride for _, stride in outer]
        extents = tuple(extent for extent, _ in outer[1:])
        if (
            len(inner) == 1
            and inner[0][1] == 1
            and len(outer) < MOST_DIMENSIONS
            and 1 < math.prod(extents) <= MOST_FOLDED
            and all(stride > 0 and stride * size % 16 == 0 for stride in strides)
            and tensor.data_ptr() % 16 == 0
        ):
            folding = Folding(extents, ()) if major == "k" else Folding((), extents)
            shape, stride = zip(*rows, *columns, strict=True)
            return Box(shape, stride, major, folding)
    return None


def _merged(extents: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """(extent, stride) of each dimension, those that can be one made one."""
    found: list[tuple[int, int]] = []
    for extent, stride in zip(extents, strides, strict=True):
        if extent == 1 and len(extents) > 1:
            continue
        if found and found[-1][1] == stride * extent:
            found[-1] = (found[-1][0] * extent, stride)
        else:
            found.append((extent, stride))
    return found or [(1, 1)]


def as_box(tensor: torch.Tensor, found: Box) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What makes a tensor the one that is passed; None where it is so."""
    is_so = (tuple(tensor.shape), tensor.stride()) == (found.shape, found.stride)
    return None if is_so else found.view


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a piece of memory without gaps or overlaps, in any order of its dimensions."""
    size = 1
    for extent, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if extent != 1 and stride != size:
            return False
        size *= extent
    return True
