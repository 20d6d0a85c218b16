"""Where a lane's registers lie in the slabs of shared memory, against the swizzle of TMA and the layouts of the ISA."""

from __future__ import annotations

from fractions import Fraction

import pytest

from codalang.lower.body import Tile
from codalang.lower.sm90 import Slab
from codalang.lower.spec import DTYPE_BYTES

SHAPES = [
    (dtype, width, subtile, by_matrices)
    for dtype in ("bf16", "f16", "f32")
    for width in (Fraction(1, 2), Fraction(1), Fraction(2))
    for subtile in (16, 32, 64)
    for by_matrices in (False, True)
    if subtile * width * DTYPE_BYTES[dtype] >= 16
]


def swizzled(panel: int, row: int, byte: int) -> int:
    """The offset at which TMA writes a byte of a row, in panels of `panel` bytes a row."""
    offset = row * panel + byte
    return offset ^ ((offset // 128) % (panel // 16) * 16)


@pytest.mark.parametrize(("dtype", "width", "subtile", "by_matrices"), SHAPES)
def test_lanes_address_what_they_hold(dtype: str, width: Fraction, subtile: int, by_matrices: bool) -> None:
    slab = Slab(Tile("t", width, dtype), subtile, 1, by_matrices)
    assert slab.in_matrices == (by_matrices and width == 1 and dtype != "f32")
    for lane in range(32):
        offset = slab.lane_offset(lane)
        for eight in range(0, subtile // 8, 2 if slab.in_matrices else 1):
            if slab.in_matrices:  # the lane addresses row l % 8 of matrix l // 8: halves, then eights
                places = [(0, lane % 16, 8 * (eight + lane // 16))]
            else:  # the lane holds these adjacent columns
                column = int(8 * eight * width) + lane % 4 * slab.item.registers
                places = [(half, lane // 4 + 8 * half, column) for half in (0, 1)]
            for half, row, column in places:
                panel, within = divmod(column * slab.element, slab.panel)
                assert slab.pair_offset(offset, eight, half) == (panel, swizzled(slab.panel, row, within))
