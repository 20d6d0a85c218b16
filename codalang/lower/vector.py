"""The kernel of an auxiliary step: an elementwise body on vectors of one length, some of which come as the parts that a
reduction left: one small launch that merges those and applies the expression.

A lane takes two adjacent elements.  Where some vector comes in parts [parts, length], a CTA's warps take the same
elements: each folds every eighth part, requesting `BATCH` of them before it uses any, and leaves what it has in shared
memory, where all warps merge it in one order.  Otherwise each warp takes elements of its own.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from codalang.lower.device import REDUCTIONS, Registers
from codalang.lower.registers import fold, initial, load_shared, merge, minimum, store_if, store_shared, widened

WARPS = 8
RUN = 2
COLUMNS = 32 * RUN
BATCH = 4


class VectorKernel:
    """`parts`: for each input how its parts are merged, empty where it is whole.  `__call__` is the host function to
    compile."""

    def __init__(self, body: Any, parts: tuple[str, ...], overlap: bool) -> None:
        self.body = body
        self.overlap = overlap
        self.folds = {i: REDUCTIONS[how] for i, how in enumerate(parts) if how}
        self.merged = list(self.folds)

    @cute.jit
    def __call__(self, inputs: tuple, outputs: tuple, n: Int32, stream: Any) -> None:
        """Launch on n elements.  inputs: [n] or [parts, n], scalars; outputs: [1, n], a scalar [1, 1]."""
        columns = COLUMNS if cutlass.const_expr(self.merged) else COLUMNS * WARPS
        self.kernel(inputs, outputs, n).launch(
            grid=(cute.ceil_div(n, columns), 1, 1), block=(32 * WARPS, 1, 1), stream=stream, use_pdl=self.overlap
        )

    @cute.kernel
    def kernel(self, inputs: tuple, outputs: tuple, n: Int32) -> None:
        """The device function."""
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        block, _, _ = cute.arch.block_idx()
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first = block * COLUMNS if cutlass.const_expr(self.merged) else (block * WARPS + warp) * COLUMNS
        column = first + lane * RUN
        totals: tuple[Any, ...] = ()
        if cutlass.const_expr(self.merged):
            scratch = SmemAllocator().allocate_array(Int32, len(self.merged) * WARPS * COLUMNS).toint()
            for i in cutlass.range_constexpr(len(self.merged)):
                index = self.merged[i]
                mine = self.fold_parts(self.folds[index], inputs[index], column, warp)
                store_shared(Float32, self.scratch(scratch, i, warp, lane), mine)
            cute.arch.sync_threads()
            totals = self.all_totals(scratch, lane)
        values = self.values(inputs, totals, column, n)
        _, vectors, _ = self.body.apply(None, *values)
        writes = warp == 0 if cutlass.const_expr(self.merged) else column < n
        for i in cutlass.range_constexpr(len(outputs)):
            registers = vectors[i]
            if cutlass.const_expr(self.body.VECTORS[i].kind == "scalar"):
                store_if(writes & (column == 0), outputs[i], 0, 0, registers[0])
            else:
                for j in cutlass.range_constexpr(RUN):
                    value = registers[j if len(registers) > 1 else 0]
                    store_if(writes & (column + j < n), outputs[i], 0, column + j, value)

    @cute.jit
    def fold_parts(self, how: cutlass.Constexpr, tensor: cute.Tensor, column: Int32, warp: Int32) -> tuple:
        """Every eighth part of this lane's elements, folded."""
        parts, last = tensor.shape[0], tensor.shape[1] - 1
        one, two = initial(how), initial(how)
        part = Int32(warp)
        while part < parts:
            loaded = self.batch(tensor, part, column, last)
            for j in cutlass.range_constexpr(BATCH):
                valid = part + j * WARPS < parts
                one = fold(how, one, (loaded[j][0],), valid)
                two = fold(how, two, (loaded[j][1],), valid)
            part += BATCH * WARPS
        return (one[0], two[0])

    def batch(self, tensor: cute.Tensor, part: Int32, column: Int32, last: Int32) -> list[tuple]:
        """This lane's elements of the next parts; what lies beyond an edge is the last of its axis."""
        rows = [minimum(part + j * WARPS, tensor.shape[0] - 1) for j in range(BATCH)]
        return [tuple(widened(tensor[row, minimum(column + i, last)]) for i in range(RUN)) for row in rows]

    def scratch(self, base: Int32, index: int, warp: Any, lane: Int32) -> Int32:
        """Where a warp leaves a lane's elements."""
        return base + ((index * WARPS + warp) * COLUMNS + lane * RUN) * 4

    def all_totals(self, base: Int32, lane: Int32) -> tuple[Registers, ...]:
        """What all warps left, merged."""
        totals = []
        for i, index in enumerate(self.merged):
            parts = [load_shared(Float32, self.scratch(base, i, warp, lane), RUN) for warp in range(WARPS)]
            elements = []
            for j in range(RUN):
                total = (parts[0][j],)
                for part in parts[1:]:
                    total = merge(self.folds[index], total, (part[j],))
                elements.append(total[0])
            totals.append(tuple(elements))
        return tuple(totals)

    def values(self, inputs: tuple, totals: tuple[Registers, ...], column: Int32, n: Int32) -> list[Registers]:
        """This lane's elements of every input."""
        found = []
        for i, (item, tensor) in enumerate(zip(self.body.INPUTS, inputs, strict=True)):
            if i in self.merged:
                found.append(totals[self.merged.index(i)])
            elif item.kind == "scalar":
                found.append((tensor if item.dtype == "number" else widened(tensor[0]),))
            else:
                found.append(tuple(widened(tensor[minimum(column + j, n - 1)]) for j in range(RUN)))
        return found
