"""What a generated epilogue declares about its inputs and outputs, as the kernels read it.

`width` is relative to the accumulator; `registers` is how many columns of it one thread holds side by side for two
accumulator columns.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import attrs

# Ops that only the host can do, for it knows where a register lies: methods of the object that `Epilogue.apply` is
# given, where the others are functions of registers.
HOST_OPS = ("row_index", "col_index", "group_sum", "group_max")


@attrs.frozen
class Input:
    """A loaded parameter.  kind: tile, row, rows (one per sample), col or scalar; dtype: a storage dtype, or number
    (passed by value)."""

    name: str
    kind: str
    width: Fraction
    dtype: str

    @property
    def registers(self) -> int:
        """Columns per thread and two accumulator columns (1 for what has no columns)."""
        return int(2 * self.width) if self.kind in ("tile", "row", "rows") else 1


@attrs.frozen
class Tile:
    """A tile output."""

    name: str
    width: Fraction
    dtype: str

    @property
    def registers(self) -> int:
        """Columns per thread and two accumulator columns."""
        return int(2 * self.width)


@attrs.frozen
class Vector:
    """A stored row, col or scalar."""

    name: str
    kind: str
    width: Fraction
    dtype: str

    @property
    def registers(self) -> int:
        """Columns per thread and two accumulator columns (1 for what has no columns)."""
        return int(2 * self.width) if self.kind == "row" else 1


@attrs.frozen
class Block:
    """What a fold carries of many elements at once.

    Attributes:
        passes: (how, value) of reductions: value takes the elements of each input as a tuple of registers, and the
            results of the passes before as 1-tuples.
        carried: (*results of the passes) -> carried.
    """

    passes: tuple[tuple[str, Callable[..., tuple[Any, ...]]], ...]
    carried: Callable[..., tuple[Any, ...]]


@attrs.frozen
class Fold:
    """How elements are folded into carried values: all functions take and give single registers as 1-tuples.

    Attributes:
        initial: the identity, one number per carried value.
        dtypes: `f32` or `i32` of each carried value.
        update: (*carried, *inputs) -> carried.
        merge: (*carried of one part, *carried of another) -> carried.
        finalize: (*carried) -> results.
        results: dtypes of the results.
        block: of many elements at once; None where they are folded one by one.
    """

    initial: tuple[float | int, ...]
    dtypes: tuple[str, ...]
    update: Callable[..., tuple[Any, ...]]
    merge: Callable[..., tuple[Any, ...]]
    finalize: Callable[..., tuple[Any, ...]]
    results: tuple[str, ...]
    block: Block | None = None


@attrs.frozen
class Partial:
    """A reduction: its outputs' names, the kind of the result (col, row, rows, scalar), the domain's width, and the
    fold.  waits: it is made by blocks; picks: what is given is (x, r), and x is reduced in column r alone."""

    names: tuple[str, ...]
    kind: str
    width: Fraction
    fold: Fold
    waits: bool = False
    picks: bool = False

    @property
    def registers(self) -> int:
        """Columns per thread and two accumulator columns of the reduced domain."""
        return int(2 * self.width)

    @property
    def crosses_warps(self) -> bool:
        """A tile's warps merge what they have into one partial: they share its rows."""
        return self.kind in ("row", "scalar")

    def columns(self, n: Any) -> Any:
        """Columns of the domain, for `n` of the accumulator."""
        return n * self.width.numerator // self.width.denominator
