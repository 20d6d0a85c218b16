"""The kernel that merges the partials of one reduction and finalizes it: one small launch after the main one.

Partials lie as [parts, length], one tensor per carried value: a part per tile, in a fixed order.  Where length is
more than one, a thread merges the parts of one element, with its neighbours reading adjacent memory; a scalar's parts
are merged by one warp.
"""

from typing import Any

import cutlass
from cutlass import Int32, cute

from codalang.lower.body import Fold
from codalang.lower.registers import finalize, fold_lanes, initial, merge, minimum, store_if

THREADS = 128
ALL_LANES = (1, 2, 4, 8, 16)


class MergeKernel:
    """Merge and finalize one fold.  `__call__` is the host function to compile."""

    def __init__(self, fold: Fold, is_scalar: bool, overlap: bool) -> None:
        self.fold, self.is_scalar, self.overlap = fold, is_scalar, overlap

    @cute.jit
    def __call__(self, partials: tuple, outputs: tuple, stream: Any) -> None:
        """Launch.  partials: [parts, length] of each carried value; outputs: [1, length] of each result."""
        length = 1 if cutlass.const_expr(self.is_scalar) else partials[0].shape[1]
        threads = 32 if cutlass.const_expr(self.is_scalar) else THREADS
        self.kernel(partials, outputs).launch(
            grid=(cute.ceil_div(length, threads) if cutlass.const_expr(not self.is_scalar) else 1, 1, 1),
            block=(threads, 1, 1),
            stream=stream,
            use_pdl=self.overlap,
        )

    @cute.kernel
    def kernel(self, partials: tuple, outputs: tuple) -> None:
        """The device function."""
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        parts = partials[0].shape[0]
        step = 32 if cutlass.const_expr(self.is_scalar) else 1
        part = thread if cutlass.const_expr(self.is_scalar) else Int32(0)
        element = Int32(0) if cutlass.const_expr(self.is_scalar) else block * THREADS + thread
        carried = initial(self.fold)
        while part < parts:
            column = minimum(element, partials[0].shape[1] - 1)
            carried = merge(self.fold, carried, tuple(p[part, column] for p in partials))
            part += step
        if cutlass.const_expr(self.is_scalar):
            carried = fold_lanes(self.fold, carried, ALL_LANES)
        writes = thread == 0 if cutlass.const_expr(self.is_scalar) else element < partials[0].shape[1]
        results = finalize(self.fold, carried)
        for i in cutlass.range_constexpr(len(outputs)):
            store_if(writes, outputs[i], 0, element, results[i])
