"""What a GEMM's epilogue reduces a block of columns at a time; see `blocks`.  Traced by `epilogue_loop`.

The elements of a row that one thread holds wait in registers, which they mostly are in anyway, until their block is
whole.  Then the warp branches, twice at most: is the block at the right edge?  Does any row pick one of its columns?
"""

from collections.abc import Callable, Iterable
from typing import Any

from cutlass import Boolean, Int32, cute

from codalang.lower.body import Partial
from codalang.lower.device import choose
from codalang.lower.registers import branch, fold_block, fold_lanes, initial, merge

Key = tuple[int, tuple[int, int]]  # the partial's index; row block and half
Elements = list[tuple[int, tuple]]  # column in the tile, for the lane that has the first; what is folded


class Waiting:
    """The elements of the block in the making.

    Args:
        partials: of the body.
        columns: accumulator columns of the output that are not left of the tile.
        tile_n: columns of a tile.
        lane_column: of a row's lanes, 0 to 3.
        tile_column: of the tile, in tiles.
        lanes: lane bits of a row where a block is all of the tile's columns: then it is folded with those lanes.
    """

    def __init__(
        self,
        partials: tuple[Partial, ...],
        columns: Int32,
        tile_n: int,
        lane_column: Int32,
        tile_column: Int32,
        lanes: tuple[int, ...],
    ) -> None:
        self.partials, self.columns, self.tile_n = partials, columns, tile_n
        self.lane_column, self.tile_column, self.lanes = lane_column, tile_column, lanes
        self.elements: dict[Key, Elements] = {}

    def add(self, key: Key, first: int, columns: Iterable[tuple]) -> None:
        """Elements of a row: those of an eight of the accumulator's columns, from `first` on."""
        count = self.partials[key[0]].registers
        self.elements.setdefault(key, []).extend((first * count // 2 + i, c) for i, c in enumerate(columns))

    def folded(self, block: int) -> dict[Key, tuple]:
        """What each partial carries of what waits of a block of rows, row by row; it waits no more."""
        keys = [key for key in self.elements if key[1][0] == block]
        picks = [key for key in keys if self.partials[key[0]].picks]
        others = [key for key in keys if key not in picks]
        found: dict[Key, tuple] = {}
        if others:
            is_cut = self.columns < self.tile_n
            found |= self._branched(
                others, is_cut, lambda key: self._block(key, True), lambda key: self._block(key, False)
            )
        if picks:
            at = {key: self._picked(key) for key in picks}
            is_met = cute.arch.vote_any_sync(_any(place >= 0 for place in at.values()))
            found |= self._branched(picks, is_met, lambda key: self._pick(key, at[key]), lambda key: self._start(key))
        for key in keys:
            del self.elements[key]
        return found

    def _branched(
        self, keys: list[Key], condition: Any, then: Callable[[Key], tuple], otherwise: Callable[[Key], tuple]
    ) -> dict[Key, tuple]:
        """`then` of each key where the condition holds for the warp, else `otherwise`."""
        dtypes = [dtype for index, _ in keys for dtype in self.partials[index].fold.dtypes]
        values = iter(
            branch(
                condition,
                dtypes,
                lambda: tuple(value for key in keys for value in then(key)),
                lambda: tuple(value for key in keys for value in otherwise(key)),
            )
        )
        return {key: tuple(next(values) for _ in self.partials[key[0]].fold.dtypes) for key in keys}

    def _start(self, key: Key) -> tuple:
        return initial(self.partials[key[0]].fold)

    def _block(self, key: Key, is_cut: bool) -> tuple:
        partial, elements = self.partials[key[0]], self.elements[key]
        limit = self.columns - 2 * self.lane_column
        valid = [place * 2 // partial.registers < limit for place, _ in elements] if is_cut else None
        return fold_block(partial.fold, tuple(zip(*(values for _, values in elements), strict=True)), valid, self.lanes)

    def _picked(self, key: Key) -> Int32:
        """The column that the row picks, counted as `elements` are; -1 where it is none of the block's."""
        partial, elements = self.partials[key[0]], self.elements[key]
        column = elements[0][1][1] - self.tile_column * (self.tile_n * partial.registers // 2)
        first, end = elements[0][0], elements[-1][0] - partial.registers + 1 + 4 * partial.registers
        inside = (column >= first) & (column < end) & (column < partial.columns(self.columns))
        return choose(inside, column - self.lane_column * partial.registers, Int32(-1))

    def _pick(self, key: Key, at: Int32) -> tuple:
        fold = self.partials[key[0]].fold
        (neutral,) = total = self._start(key)
        for place, (value, _) in self.elements[key]:
            total = merge(fold, total, (choose(at == place, value, neutral),))
        return fold_lanes(fold, total, self.lanes)


def _any(conditions: Iterable[Any]) -> Boolean:
    first, *rest = conditions
    for condition in rest:
        first = first | condition
    return Boolean(first)
