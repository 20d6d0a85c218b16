"""The kernel that merges the partials of one reduction and finalizes it: one small launch after the main one.

Partials lie as [parts, length], one tensor per carried value: a part per tile.  A logsumexp over a vocabulary has
hundreds, and what takes time is loads that wait for each other: a CTA's warps share the parts of 32 elements, each
every eighth, and request `BATCH` of them before they merge any.  What they have is merged through shared memory, in a
fixed order.  A scalar's parts are shared by all lanes of one CTA.
"""

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from codalang.lower.body import Fold
from codalang.lower.device import choose
from codalang.lower.registers import (
    CUTE_DTYPES,
    finalize,
    fold_lanes,
    initial,
    load_shared,
    merge,
    minimum,
    store_if,
    store_shared,
)

WARPS = 8
BATCH = 8
ALL_LANES = (1, 2, 4, 8, 16)


class MergeKernel:
    """Merge and finalize one fold.  `__call__` is the host function to compile."""

    def __init__(self, fold: Fold, is_scalar: bool, overlap: bool) -> None:
        self.fold, self.is_scalar, self.overlap = fold, is_scalar, overlap
        self.step = WARPS * (32 if is_scalar else 1)  # from one of a lane's parts to the next

    @cute.jit
    def __call__(self, partials: tuple, outputs: tuple, stream: Any) -> None:
        """Launch.  partials: [parts, length] of each carried value; outputs: [1, length] of each result."""
        length = 1 if cutlass.const_expr(self.is_scalar) else partials[0].shape[1]
        self.kernel(partials, outputs).launch(
            grid=(cute.ceil_div(length, 32) if cutlass.const_expr(not self.is_scalar) else 1, 1, 1),
            block=(32 * WARPS, 1, 1),
            stream=stream,
            use_pdl=self.overlap,
        )

    @cute.kernel
    def kernel(self, partials: tuple, outputs: tuple) -> None:
        """The device function."""
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        block, _, _ = cute.arch.block_idx()
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        parts, length = partials[0].shape[0], partials[0].shape[1]
        element = Int32(0) if cutlass.const_expr(self.is_scalar) else block * 32 + lane
        part = warp * 32 + lane if cutlass.const_expr(self.is_scalar) else Int32(warp)
        carried = initial(self.fold)
        while part < parts:
            batch = self.batch(partials, part, minimum(element, length - 1))
            for i in cutlass.range_constexpr(BATCH):
                merged = merge(self.fold, carried, batch[i])
                exists = part + i * self.step < parts
                carried = tuple(choose(exists, new, old) for new, old in zip(merged, carried, strict=True))
            part += BATCH * self.step
        if cutlass.const_expr(self.is_scalar):
            carried = fold_lanes(self.fold, carried, ALL_LANES)
        scratch = SmemAllocator().allocate_array(Int32, len(self.fold.dtypes) * WARPS * 32).toint()
        self.leave(scratch, carried, warp, lane)
        cute.arch.sync_threads()
        results = finalize(self.fold, self.total(scratch, lane))
        writes = (warp == 0) & (lane == 0 if cutlass.const_expr(self.is_scalar) else element < length)
        for i in cutlass.range_constexpr(len(outputs)):
            store_if(writes, outputs[i], 0, element, results[i])

    def batch(self, partials: tuple, part: Int32, element: Int32) -> list[tuple]:
        """This lane's next parts; beyond the last, that again."""
        rows = [minimum(part + i * self.step, partials[0].shape[0] - 1) for i in range(BATCH)]
        return [tuple(p[row, element] for p in partials) for row in rows]

    def leave(self, scratch: Int32, carried: tuple, warp: Int32, lane: Int32) -> None:
        """Write what a warp has to shared memory."""
        for i, (dtype, value) in enumerate(zip(self.fold.dtypes, carried, strict=True)):
            store_shared(CUTE_DTYPES[dtype], self._address(scratch, i, warp, lane), (value,))

    def total(self, scratch: Int32, lane: Int32) -> tuple:
        """What all warps left, merged."""
        total: tuple[Any, ...] = ()
        for warp in range(WARPS):
            addresses = [self._address(scratch, i, warp, lane) for i in range(len(self.fold.dtypes))]
            kinds = [CUTE_DTYPES[dtype] for dtype in self.fold.dtypes]
            part = tuple(load_shared(kind, address, 1)[0] for kind, address in zip(kinds, addresses, strict=True))
            total = merge(self.fold, total, part) if total else part
        return total

    def _address(self, scratch: Int32, component: int, warp: Any, lane: Int32) -> Int32:
        return scratch + ((component * WARPS + warp) * 32 + lane) * 4
