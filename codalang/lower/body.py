"""What a generated epilogue declares about its inputs and outputs, as the kernels read it.

`width` is relative to the accumulator; `registers` is how many columns of it one thread holds side by side for two
accumulator columns.
"""

from __future__ import annotations

from fractions import Fraction

import attrs


@attrs.frozen
class Input:
    """A loaded parameter.  kind: tile, row, col or scalar; dtype: bf16, f16, f32, or number (passed by value)."""

    name: str
    kind: str
    width: Fraction
    dtype: str

    @property
    def registers(self) -> int:
        """Columns per thread and two accumulator columns (1 for what has no columns)."""
        return int(2 * self.width) if self.kind in ("tile", "row") else 1


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
class Partial:
    """A reduction: kind of the result (col, row, scalar), width of the domain that is reduced, and how."""

    name: str
    kind: str
    width: Fraction
    how: str

    @property
    def registers(self) -> int:
        """Columns per thread and two accumulator columns of the reduced domain."""
        return int(2 * self.width)
