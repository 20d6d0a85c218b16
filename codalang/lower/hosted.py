"""The kernel that runs an epilogue on plain tensors: the same generated body, no mainloop.

Memory-bound work, so the layout is chosen for the loads.  A CTA of 8 warps takes a tile of 64 or 128 rows, a warp
every eighth row, a lane a run of adjacent columns (8 of the accumulator's where rows are 16-byte aligned, else 2).
Each thread requests what it needs of a row some rows before it computes that, so that bytes are always in flight.

Reductions leave one partial per tile, as the GEMM's epilogue does: over n by shuffles within a warp, over m in
registers and then through shared memory.  Where some reduction is to one row per sample, no tile spans two samples.
"""

from typing import Any

import attrs
import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from codalang.lower import device
from codalang.lower.body import Input, Partial
from codalang.lower.device import Registers, choose
from codalang.lower.plan import hosted_run
from codalang.lower.registers import (
    CUTE_DTYPES,
    broadcast,
    fold,
    fold_lanes,
    initial,
    load,
    load_shared,
    merge,
    minimum,
    opaque,
    spread_lanes,
    storage_words,
    store_if,
    store_shared_if,
    store_words_if,
    widened,
)

WARPS = 8
AHEAD = 4, 2  # rows whose loads are in flight: of one tile, of several.  More take registers, hence warps
TOGETHER = 8  # rows of a warp that are reduced over columns at once, where lanes can share them
ALL_LANES = (1, 2, 4, 8, 16)
COMMUTATIVE = tuple(device.REDUCTIONS.values())


class HostedKernel:
    """One epilogue hosted on plain tensors.  `__call__` is the host function to compile."""

    def __init__(self, body: Any, rows: int, aligned: bool, overlap: bool) -> None:
        self.body, self.tile_rows = body, rows
        self.rows = rows // WARPS  # of a warp
        self.aligned = aligned
        self.overlap = overlap
        self.run = hosted_run(aligned)
        self.columns = 32 * self.run
        self.scratch = [p for p in body.PARTIALS if p.kind != "col"]
        self.per_sample = next((i for i, p in enumerate(body.PARTIALS) if p.kind == "rows"), None)

    @cute.jit
    def __call__(self, inputs: tuple, outputs: tuple, m: Int32, n: Int32, stream: Any) -> None:
        """Launch on m rows and n columns of the accumulator's width; inputs and outputs as the body declares them."""
        tiles_m, tiles_n = cute.ceil_div(m, self.tile_rows), cute.ceil_div(n, self.columns)
        if cutlass.const_expr(self.per_sample is not None):
            parts, samples = self.sample_tiles(outputs, n)
            tiles_m = parts * samples
        self.kernel(inputs, outputs, m, n, tiles_n).launch(
            grid=(tiles_m * tiles_n, 1, 1), block=(32 * WARPS, 1, 1), stream=stream, use_pdl=self.overlap
        )

    @cute.kernel
    def kernel(self, inputs: tuple, outputs: tuple, m: Int32, n: Int32, tiles_n: Int32) -> None:
        """The device function."""
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        block, _, _ = cute.arch.block_idx()
        tile_m = block // tiles_n
        work = HostedTile(self, inputs, outputs, m, n, tile_m, block - tile_m * tiles_n)
        work.compute()

    def sample_tiles(self, outputs: tuple, n: Int32) -> tuple[Int32, Int32]:
        """Tiles of one sample, and samples: as the buffers of a reduction to one row per sample have them."""
        carried = [len(p.fold.initial) for p in self.body.PARTIALS[: self.per_sample]]
        target = outputs[len(self.body.TILES) + len(self.body.VECTORS) + sum(carried)]
        return target.shape[0], target.shape[1] // self.body.PARTIALS[self.per_sample].columns(n)

    def scratch_width(self, partial: Partial) -> int:
        """Columns that each warp leaves in shared memory of each carried value."""
        return int(self.columns * partial.width) if partial.kind in ("row", "rows") else 1

    def scratch_words(self, partial: Partial) -> int:
        """Words of shared memory of one partial."""
        return WARPS * len(partial.fold.initial) * self.scratch_width(partial)


@attrs.frozen
class RowHost:
    """What a body asks of its host: where its registers lie in the output, and the columns of other lanes.

    `registers` is how many columns of a value a thread would hold for two of the accumulator's.
    """

    tile: Any
    row: Int32

    def row_index(self) -> Registers:
        """The output row."""
        return (self.row,)

    def col_index(self, registers: int) -> Registers:
        """The output column of each register."""
        count = self.tile.kernel.run * registers // 2
        return tuple(self.tile.column * registers // 2 + i for i in range(count))

    def group_sum(self, values: Registers, size: int, registers: int) -> Registers:
        """Each register's group sum."""
        return self._grouped("group_sum", values, size)

    def group_max(self, values: Registers, size: int, registers: int) -> Registers:
        """Each register's group maximum."""
        return self._grouped("group_max", values, size)

    def _grouped(self, name: str, values: Registers, size: int) -> Registers:
        mine = min(size, len(values))
        lanes = tuple(b for b in ALL_LANES if b * len(values) < size)
        return tuple(
            total
            for first in range(0, len(values), mine)
            for total in [device.combine(name, values[first : first + mine], cute.arch.shuffle_sync_bfly, lanes)] * mine
        )


class HostedTile:
    """One CTA's work; plain Python that is traced into the kernel."""

    def __init__(
        self, kernel: HostedKernel, inputs: tuple, outputs: tuple, m: Int32, n: Int32, tile_m: Int32, tile_n: Int32
    ) -> None:
        self.kernel, self.body = kernel, kernel.body
        self.m, self.n, self.tile_m, self.tile_n = m, n, tile_m, tile_n
        self.inputs = inputs
        # rows of the tile are first .. end - 1
        self.first, self.end = tile_m * kernel.tile_rows, m
        self.part, self.sample = tile_m, Int32(0)
        if kernel.per_sample is not None:
            parts, samples = kernel.sample_tiles(outputs, n)
            self.sample = tile_m // parts
            self.part = tile_m - self.sample * parts
            self.first = self.sample * (m // samples) + self.part * kernel.tile_rows
            self.end = (self.sample + 1) * (m // samples)
        rest = iter(outputs)
        self.tiles = [next(rest) for _ in self.body.TILES]
        self.vectors = [next(rest) for _ in self.body.VECTORS]
        self.targets = [[next(rest) for _ in p.fold.initial] for p in self.body.PARTIALS]
        self.lane = cute.arch.lane_idx()
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.column = tile_n * kernel.columns + self.lane * kernel.run
        # lanes right of the edge read the first column instead, and write and reduce nothing
        self.inside = self.column < n
        self.readable = choose(self.inside, self.column, Int32(0))
        words = sum(kernel.scratch_words(p) for p in kernel.scratch)
        self.scratch = SmemAllocator().allocate_array(Int32, words).toint() if words else None
        self.fixed = [self._fixed(i, t) for i, t in zip(self.body.INPUTS, inputs, strict=True)]
        self.carried: list[dict[Any, tuple]] = [{} for _ in self.body.PARTIALS]
        self.waiting: list[list[tuple]] = [[] for _ in self.body.PARTIALS]  # rows to be reduced over columns

    def _fixed(self, item: Input, tensor: Any) -> Any:
        """What does not change from row to row: scalars, and this lane's part of a row."""
        if item.kind == "scalar":
            return (tensor if item.dtype == "number" else widened(tensor[0]),)
        if item.kind == "row":
            columns = int(self.kernel.run * item.width)
            first = self._scaled(self.readable, item.width)
            return tuple(widened(tensor[minimum(first + i, tensor.shape[0] - 1)]) for i in range(columns))
        return None

    def compute(self) -> None:
        """All rows of this warp, then the reductions over rows."""
        rows = [self.first + i * WARPS + self.warp for i in range(self.kernel.rows)]
        ahead = AHEAD[sum(item.kind == "tile" for item in self.body.INPUTS) > 1]
        loaded = [self._load_row(row) for row in rows[:ahead]]
        for i, row in enumerate(rows):
            # before this row's stores: the compiler moves no load across them
            loaded += [self._load_row(later) for later in rows[i + ahead : i + ahead + 1]]
            self._apply_row(row, loaded[i], is_first=i == 0)
        self._finish_partials()

    def _scaled(self, column: Int32, width: Any) -> Int32:
        """A column of the accumulator in units of another width."""
        return column * width.numerator // width.denominator

    def _address(self, tensor: cute.Tensor, row: Int32, column: Int32, width: Any) -> Int64:
        element = tensor.element_type.width // 8
        offset = Int64(row) * Int64(tensor.stride[0]) + Int64(self._scaled(column, width))
        return tensor.iterator.toint() + offset * element

    def _load_row(self, row: Int32) -> list[Registers]:
        """This lane's part of every input in a row."""
        row = minimum(row, self.end - 1)
        values = []
        for item, tensor, fixed in zip(self.body.INPUTS, self.inputs, self.fixed, strict=True):
            if item.kind == "tile":
                values.append(self._load_tile(item, tensor, row))
            elif item.kind == "rows":
                values.append(self._load_tile(item, tensor, row // (self.m // tensor.shape[0])))
            elif item.kind == "col":
                values.append((widened(tensor[row]),))
            else:
                values.append(fixed)
        return values

    def _load_tile(self, item: Input, tensor: cute.Tensor, row: Int32) -> Registers:
        columns = int(self.kernel.run * item.width)
        dtype = CUTE_DTYPES[item.dtype]
        if self.kernel.aligned:
            return load(dtype, self._address(tensor, row, self.readable, item.width), columns, cute.AddressSpace.gmem)
        first = self._scaled(self.readable, item.width)
        return tuple(widened(tensor[row, minimum(first + i, tensor.shape[1] - 1)]) for i in range(columns))

    def _apply_row(self, row: Int32, values: list[Registers], *, is_first: bool) -> None:
        """Run the body on this lane's columns of a row; write and reduce the results."""
        inside = self.inside & (row < self.end)
        host = RowHost(self, row)
        tiles, vectors, reduced = self.body.apply(host, *values)
        for tile, tensor, registers in zip(self.body.TILES, self.tiles, tiles, strict=True):
            count = int(self.kernel.run * tile.width)
            self._store_tile(tile, tensor, row, broadcast(registers, count), inside)
        self._store_vectors(vectors, host, row, is_first)
        for index, (partial, elements) in enumerate(zip(self.body.PARTIALS, reduced, strict=True)):
            self._fold(index, partial, elements, row)
            if partial.kind == "col":
                self._reduce_row(index, partial, row)

    def _fold(self, index: int, partial: Partial, values: tuple[Registers, ...], row: Int32) -> None:
        count = int(self.kernel.run * partial.width)
        columns = [broadcast(v, count) for v in values]
        carried = self.carried[index]
        for register in range(count):
            # the second column of a lane's run may lie beyond an odd edge
            valid = self.column + int(register / partial.width) < self.n
            if partial.kind != "col":
                valid = valid & (row < self.end)
            key = register if partial.kind in ("row", "rows") else ()
            element = tuple(c[register] for c in columns)
            start = initial(partial.fold)
            if partial.kind != "col":
                start = opaque(start)
            carried[key] = fold(partial.fold, carried.get(key) or start, element, valid)

    def _store_tile(self, tile: Any, tensor: cute.Tensor, row: Int32, values: Registers, inside: Boolean) -> None:
        if self.kernel.aligned:
            address = self._address(tensor, row, self.column, tile.width)
            store_words_if(inside, address, storage_words(CUTE_DTYPES[tile.dtype], values))
            return
        first = self._scaled(self.column, tile.width)
        for i, value in enumerate(values):
            valid = inside & (first + i < tensor.shape[1])
            store_if(valid, tensor, row, first + i, value.to(CUTE_DTYPES[tile.dtype]))

    def _store_vectors(self, values: tuple[Registers, ...], host: RowHost, row: Int32, is_first: bool) -> None:
        """Write stored vectors, each element by one thread of the whole grid."""
        for vector, target, registers in zip(self.body.VECTORS, self.vectors, values, strict=True):
            if vector.kind == "col":
                store_if((self.tile_n == 0) & (self.lane == 0) & (row < self.end), target, 0, row, registers[0])
            elif vector.kind == "scalar" and is_first:
                corner = (self.tile_m == 0) & (self.tile_n == 0) & (self.warp == 0) & (self.lane == 0)
                store_if(corner, target, 0, 0, registers[0])
            elif vector.kind == "row" and is_first:
                top = (self.tile_m == 0) & (self.warp == 0)
                columns = host.col_index(vector.registers)
                for column, value in zip(columns, broadcast(registers, len(columns)), strict=True):
                    store_if(top & (column < target.shape[1]), target, 0, column, value)

    def _finish_partials(self) -> None:
        """Reductions over rows: leave them by warp in shared memory, then merge the warps."""
        if not self.kernel.scratch:
            return
        for index, partial in enumerate(self.body.PARTIALS):
            if partial.kind in ("row", "rows"):
                for register, carried in self.carried[index].items():
                    column = self.lane * int(self.kernel.run * partial.width) + register
                    self._leave(index, partial, column, carried, True)
            elif partial.kind == "scalar":
                total = fold_lanes(partial.fold, self.carried[index][()], ALL_LANES)
                self._leave(index, partial, Int32(0), total, self.lane == 0)
        cute.arch.sync_threads()
        thread = cute.arch.thread_idx()[0]
        for index, partial in enumerate(self.body.PARTIALS):
            if partial.kind == "col":
                continue
            width = self.kernel.scratch_width(partial)
            for j in range(-(-width // (32 * WARPS))):
                column = thread + j * 32 * WARPS
                total = initial(partial.fold)
                for warp in range(WARPS):
                    part = self._taken(index, partial, warp, minimum(column, width - 1))
                    total = merge(partial.fold, total, part)
                output = self.tile_n * width + column
                inside, part, start = column < width, self.tile_m, Int32(0)
                if partial.kind == "rows":
                    columns = partial.columns(self.n)
                    inside, part, start = inside & (output < columns), self.part, self.sample * columns
                for target, value in zip(self.targets[index], total, strict=True):
                    store_if(inside & (start + output < target.shape[1]), target, part, start + output, value)

    def _reduce_row(self, index: int, partial: Partial, row: Int32) -> None:
        """Merge the lanes: of several rows at once where the order of elements does not matter."""
        part, waiting = self.carried[index].pop(()), self.waiting[index]
        if partial.fold not in COMMUTATIVE:
            self._write_row(index, row, fold_lanes(partial.fold, part, ALL_LANES), self.lane == 0)
            return
        waiting.append(part)
        if len(waiting) == TOGETHER:
            (total,), mine = spread_lanes(partial.fold, waiting, self.lane, ALL_LANES)
            first = row - (TOGETHER - 1) * WARPS
            self._write_row(index, first + mine * WARPS, total, self.lane < TOGETHER)
            waiting.clear()

    def _write_row(self, index: int, row: Int32, values: tuple, valid: Any) -> None:
        for target, value in zip(self.targets[index], values, strict=True):
            store_if((row < self.end) & valid, target, self.tile_n, row, value)

    def _leave(self, index: int, partial: Partial, column: Int32, carried: tuple, valid: Any) -> None:
        for component, dtype in enumerate(partial.fold.dtypes):
            address = self._scratch(index, component, self.warp) + column * 4
            store_shared_if(Boolean(valid), CUTE_DTYPES[dtype], address, (carried[component],))

    def _taken(self, index: int, partial: Partial, warp: int, column: Int32) -> tuple:
        addresses = [self._scratch(index, c, warp) + column * 4 for c in range(len(partial.fold.dtypes))]
        return tuple(load_shared(CUTE_DTYPES[d], a, 1)[0] for d, a in zip(partial.fold.dtypes, addresses, strict=True))

    def _scratch(self, index: int, component: int, warp: Any) -> Any:
        """Byte address of a warp's part of the scratch: [partial][carried value][warp][column]."""
        before = sum(self.kernel.scratch_words(p) for p in self.body.PARTIALS[:index] if p.kind != "col")
        width = self.kernel.scratch_width(self.body.PARTIALS[index])
        return self.scratch + (before + (component * WARPS + warp) * width) * 4
