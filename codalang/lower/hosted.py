"""The kernel that runs an epilogue on plain tensors: the same generated body, no mainloop.

Memory-bound work, so the layout is chosen for the loads.  A CTA of 8 warps takes a tile of 64 rows; a warp takes
every eighth row, a lane a run of adjacent columns (8 of the accumulator's where rows are 16-byte aligned, else 2).
Each thread requests the tile inputs of `BATCH` rows before it computes any, to have enough bytes in flight.

Reductions leave one partial per tile, as the GEMM's epilogue does: over n by shuffles within a warp, over m in
registers and then through shared memory.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from codalang.lower.body import Input, Partial
from codalang.lower.device import Registers
from codalang.lower.plan import HOSTED_ROWS, hosted_run
from codalang.lower.registers import (
    CUTE_DTYPES,
    broadcast,
    fold_lanes,
    load,
    masked,
    minimum,
    store,
    store_if,
)

WARPS = 8
BATCH = 4  # rows whose loads are in flight together
ALL_LANES = (1, 2, 4, 8, 16)


class HostedKernel:
    """One epilogue hosted on plain tensors.  `__call__` is the host function to compile."""

    def __init__(self, body: Any, aligned: bool) -> None:
        self.body = body
        self.aligned = aligned
        self.run = hosted_run(aligned)
        self.columns = 32 * self.run
        self.scratch = [p for p in body.PARTIALS if p.kind != "col"]

    @cute.jit
    def __call__(self, inputs: tuple, outputs: tuple, m: Int32, n: Int32, stream: Any) -> None:
        """Launch on m rows and n columns of the accumulator's width; inputs and outputs as the body declares them."""
        tiles_m, tiles_n = cute.ceil_div(m, HOSTED_ROWS), cute.ceil_div(n, self.columns)
        self.kernel(inputs, outputs, m, n, tiles_n).launch(
            grid=(tiles_m * tiles_n, 1, 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, inputs: tuple, outputs: tuple, m: Int32, n: Int32, tiles_n: Int32) -> None:
        """The device function."""
        block, _, _ = cute.arch.block_idx()
        tile_m = block // tiles_n
        work = HostedTile(self, inputs, outputs, m, n, tile_m, block - tile_m * tiles_n)
        work.compute()

    def scratch_width(self, partial: Partial) -> int:
        """Floats that each warp leaves in shared memory."""
        return int(self.columns * partial.width) if partial.kind == "row" else 1


class HostedTile:
    """One CTA's work; plain Python that is traced into the kernel."""

    def __init__(
        self, kernel: HostedKernel, inputs: tuple, outputs: tuple, m: Int32, n: Int32, tile_m: Int32, tile_n: Int32
    ) -> None:
        self.kernel, self.body = kernel, kernel.body
        self.m, self.n, self.tile_m, self.tile_n = m, n, tile_m, tile_n
        self.inputs = inputs
        self.tiles = outputs[: len(self.body.TILES)]
        self.partials = outputs[len(self.body.TILES) :]
        self.lane = cute.arch.lane_idx()
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.column = tile_n * kernel.columns + self.lane * kernel.run
        # lanes right of the edge read the first column instead, and write and sum nothing
        self.inside = self.column < n
        self.readable = select_(self.inside, self.column, Int32(0))
        floats = WARPS * sum(kernel.scratch_width(p) for p in kernel.scratch)
        self.scratch = SmemAllocator().allocate_array(Float32, max(1, floats)).toint() if floats else None
        self.fixed = [self._fixed(i, t) for i, t in zip(self.body.INPUTS, inputs, strict=True)]
        self.sums: list[dict[Any, Float32]] = [{} for _ in self.body.PARTIALS]

    def _fixed(self, item: Input, tensor: Any) -> Any:
        """What does not change from row to row: scalars, and this lane's part of a row."""
        if item.kind == "scalar":
            return (tensor if item.dtype == "number" else tensor[0].to(Float32),)
        if item.kind == "row":
            columns = int(self.kernel.run * item.width)
            first = self._scaled(self.readable, item.width)
            return tuple(tensor[minimum(first + i, tensor.shape[0] - 1)].to(Float32) for i in range(columns))
        return None

    def compute(self) -> None:
        """All rows of this warp, in batches, then the sums."""
        rows_per_warp = HOSTED_ROWS // WARPS
        for start in range(0, rows_per_warp, BATCH):
            rows = [self.tile_m * HOSTED_ROWS + (start + i) * WARPS + self.warp for i in range(BATCH)]
            loaded = [self._load_row(row) for row in rows]
            for row, values in zip(rows, loaded, strict=True):
                self._apply_row(row, values)
        self._finish_sums()

    def _scaled(self, column: Int32, width: Any) -> Int32:
        """A column of the accumulator in units of another width."""
        return column * width.numerator // width.denominator

    def _address(self, tensor: cute.Tensor, row: Int32, column: Int32, width: Any) -> Int64:
        element = tensor.element_type.width // 8
        offset = Int64(row) * Int64(tensor.stride[0]) + Int64(self._scaled(column, width))
        return tensor.iterator.toint() + offset * element

    def _load_row(self, row: Int32) -> list[Registers]:
        """This lane's part of every input in a row: all its columns in one tuple."""
        row = minimum(row, self.m - 1)
        values = []
        for item, tensor, fixed in zip(self.body.INPUTS, self.inputs, self.fixed, strict=True):
            if item.kind == "tile":
                values.append(self._load_tile(item, tensor, row))
            elif item.kind == "col":
                values.append((tensor[row].to(Float32),))
            else:
                values.append(fixed)
        return values

    def _load_tile(self, item: Input, tensor: cute.Tensor, row: Int32) -> Registers:
        columns = int(self.kernel.run * item.width)
        dtype = CUTE_DTYPES[item.dtype]
        if self.kernel.aligned:
            return load(dtype, self._address(tensor, row, self.readable, item.width), columns, cute.AddressSpace.gmem)
        first = self._scaled(self.readable, item.width)
        return tuple(tensor[row, minimum(first + i, tensor.shape[1] - 1)].to(Float32) for i in range(columns))

    def _apply_row(self, row: Int32, values: list[Registers]) -> None:
        """Run the body on every pair of columns; write and sum the results."""
        inside = self.inside & (row < self.m)
        stored: list[list[Any]] = [[] for _ in self.tiles]
        for pair in range(self.kernel.run // 2):
            arguments = [
                v[pair * i.registers : (pair + 1) * i.registers] if i.kind in ("tile", "row") else v
                for i, v in zip(self.body.INPUTS, values, strict=True)
            ]
            tiles, reduced = self.body.apply(*arguments)
            for columns, tile, registers in zip(stored, self.body.TILES, tiles, strict=True):
                columns += broadcast(registers, tile.registers)
            for index, (partial, registers) in enumerate(zip(self.body.PARTIALS, reduced, strict=True)):
                self._sum(index, partial, broadcast(registers, partial.registers), pair, inside)
        for tile, tensor, columns in zip(self.body.TILES, self.tiles, stored, strict=True):
            self._store_tile(tile, tensor, row, tuple(columns), inside)
        for index, partial in enumerate(self.body.PARTIALS):
            if partial.kind == "col":
                total = fold_lanes(self.sums[index].pop(()), ALL_LANES)
                store_if((row < self.m) & (self.lane == 0), self.partials[index], self.tile_n, row, total)

    def _sum(self, index: int, partial: Partial, values: Registers, pair: int, inside: Boolean) -> None:
        for register, value in enumerate(values):
            # the second column of a lane's pair may lie beyond an odd edge
            column = self.column + 2 * pair + (2 * register) // partial.registers
            value = masked(value, inside & (column < self.n))
            key = (pair, register) if partial.kind == "row" else ()
            sums = self.sums[index]
            sums[key] = sums[key] + value if key in sums else value

    def _store_tile(self, tile: Any, tensor: cute.Tensor, row: Int32, values: Registers, inside: Boolean) -> None:
        if self.kernel.aligned:
            address = self._address(tensor, row, self.column, tile.width)
            store_vector_if(inside, CUTE_DTYPES[tile.dtype], address, values)
            return
        first = self._scaled(self.column, tile.width)
        for i, value in enumerate(values):
            valid = inside & (first + i < tensor.shape[1])
            store_if(valid, tensor, row, first + i, value.to(CUTE_DTYPES[tile.dtype]))

    def _finish_sums(self) -> None:
        """Sums over rows: leave them by warp in shared memory, then add up the warps."""
        if not self.kernel.scratch:
            return
        for index, partial in enumerate(self.body.PARTIALS):
            if partial.kind == "row":
                for (pair, register), value in self.sums[index].items():
                    column = self.lane * int(self.kernel.run * partial.width) + pair * partial.registers + register
                    store(Float32, self._scratch(index, self.warp) + column * 4, (value,), cute.AddressSpace.smem)
            elif partial.kind == "scalar":
                total = fold_lanes(self.sums[index][()], ALL_LANES)
                store(Float32, self._scratch(index, self.warp), (total,), cute.AddressSpace.smem)
        cute.arch.sync_threads()
        thread = cute.arch.thread_idx()[0]
        for index, partial in enumerate(self.body.PARTIALS):
            if partial.kind == "col":
                continue
            width = self.kernel.scratch_width(partial)
            for j in range(-(-width // (32 * WARPS))):
                column = thread + j * 32 * WARPS
                total = Float32(0.0)
                for warp in range(WARPS):
                    address = self._scratch(index, warp) + minimum(column, width - 1) * 4
                    total = total + load(Float32, address, 1, cute.AddressSpace.smem)[0]
                target = self.partials[index]
                output = self.tile_n * width + column
                store_if((column < width) & (output < target.shape[1]), target, self.tile_m, output, total)

    def _scratch(self, index: int, warp: Any) -> Any:
        before = sum(self.kernel.scratch_width(p) for p in self.body.PARTIALS[:index] if p.kind != "col")
        width = self.kernel.scratch_width(self.body.PARTIALS[index])
        return self.scratch + (WARPS * before + warp * width) * 4


@cute.jit
def store_vector_if(valid: Boolean, dtype: cutlass.Constexpr, address: Int64, values: tuple) -> None:
    """Write adjacent elements to global memory where valid."""
    if valid:
        store(dtype, address, values, cute.AddressSpace.gmem)
