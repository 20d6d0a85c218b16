"""The extents of a call, from its operands and inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

import torch

from codalang.errors import CodaCallError
from codalang.ir.epilogue import Epilogue, Output, Param
from codalang.ir.types import Kind
from codalang.lower.spec import SLAB_ROWS, base_width


class Shape:
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

    def holds(self, tensor: torch.Tensor, item: Param | Output) -> bool:
        """Whether a tensor is a tile of a parameter's or output's extents, in two dimensions or folded in more."""
        shape = tensor.shape
        if item.type.kind is Kind.ROWS:
            return tuple(shape) == self.of(item)
        return tensor.ndim >= 2 and (math.prod(shape[:-1]), shape[-1]) == self.of(item)


def samples_of(epilogue: Epilogue, inputs: Mapping[str, torch.Tensor | float], given: int | None = None) -> int:
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


def hosted_extents(epilogue: Epilogue, inputs: Mapping[str, torch.Tensor | float]) -> tuple[int, Fraction]:
    """(M, N) by its inputs, with N of width 1.  Raises CodaCallError where they do not determine them."""
    m = n = None
    for param in epilogue.params:
        value = inputs.get(param.name)
        if isinstance(value, torch.Tensor):
            if param.type.kind.per_row and value.ndim:
                m = value.shape[0] if m is None else m
            if param.type.width is not None and value.ndim:
                n = value.shape[-1] / param.type.width if n is None else n
    if m is None or n is None:
        raise CodaCallError(
            f"the inputs of `{epilogue.name}` do not determine its {'rows' if m is None else 'columns'}",
            argument="extents",
            hint="pass extents=(M, N)",
        )
    return m, n
