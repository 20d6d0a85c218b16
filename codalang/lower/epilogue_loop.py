"""The loop that runs a generated epilogue on the accumulator of `sm90.GemmKernel`.

Plain Python that is traced into the kernel: its loops unroll, its lists are registers.

For a tile, `begin` runs before the mainloop and requests what the epilogue will read: the first slabs of the tile
inputs (TMA), the warp's values of the cols (registers), the team's rows (registers, on their way to shared memory).
`finish` runs after it: sub-tile by sub-tile, pair by pair, it reads, calls `Epilogue.apply`, writes and sums.

Sums over n stay in one warp: registers, then the four lanes of a row.  Sums over m fold registers, then the eight
lanes of a column, then the team's warps through shared memory.  Each ends as one partial per tile, in a fixed
order: results are deterministic.
"""

from collections.abc import Callable
from typing import Any

import attrs
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync

from codalang.lower.body import Partial
from codalang.lower.device import Registers
from codalang.lower.registers import (
    broadcast,
    fold_lanes,
    load_shared,
    masked,
    minimum,
    store_if,
    store_shared,
)

SAME_ROW = (1, 2)  # lane bits that differ within a row of the accumulator
SAME_COLUMN = (4, 8, 16)  # lane bits that differ within a column


@attrs.frozen
class Staged:
    """What `begin` holds in registers until `finish`: cols as [input][row block][half], rows as [input][share]."""

    cols: list[list[list[Float32]]]
    rows: list[list[Float32]]


@attrs.frozen
class SlabPort:
    """A slab in this kernel: its data, the TMA atom and partitioned tensors, and this lane's byte offset."""

    slab: Any
    atom: cute.CopyAtom
    shared: cute.Tensor  # (slab, slot)
    memory: cute.Tensor  # (slab, slab rows, slab columns)
    base: Int32
    lane: tuple[Int32, Int32]


class EpilogueLoop:
    """See the module's docstring.  `kernel` is the GemmKernel; the rest are its device values."""

    def __init__(
        self,
        kernel: Any,
        storage: Any,
        warp: Int32,
        team: Int32,
        member: Any,
        load_atoms: tuple[Any, ...],
        load_tensors: tuple[Any, ...],
        store_atoms: tuple[Any, ...],
        store_tensors: tuple[Any, ...],
        vectors: tuple[Any, ...],
        m: Int32,
        n: Int32,
    ) -> None:
        self.kernel, self.config, self.body = kernel, kernel.config, kernel.body
        self.warp, self.team, self.member, self.m, self.n = warp, team, member, m, n
        self.lane = cute.arch.lane_idx()
        self.team_thread = (warp - team * kernel.team_warps) * 32 + self.lane
        self.load_barriers = storage.load_barriers.data_ptr()
        self.loads = self._ports(kernel.loads, load_atoms, load_tensors, storage.loads.data_ptr())
        self.stores = self._ports(kernel.stores, store_atoms, store_tensors, storage.stores.data_ptr())
        self.rows_address = storage.rows.data_ptr().toint()
        self.scratch_address = storage.scratch.data_ptr().toint()
        inputs = [i for i in self.body.INPUTS if i.kind != "tile"]
        by_kind = {kind: [v for v, i in zip(vectors, inputs, strict=True) if i.kind == kind] for kind in ("row", "col")}
        self.row_vectors, self.col_vectors = by_kind["row"], by_kind["col"]
        self.scalars = {
            i.name: v if i.dtype == "number" else v[0].to(Float32)
            for v, i in zip(vectors, inputs, strict=True)
            if i.kind == "scalar"
        }

    def _ports(
        self, slabs: list[Any], atoms: tuple[Any, ...], tensors: tuple[Any, ...], pointer: Any
    ) -> list[SlabPort]:
        ports, start = [], 0
        for slab, atom, tensor in zip(slabs, atoms, tensors, strict=True):
            base = pointer + start
            layout = slab.layout()
            shared = cute.make_tensor(cute.recast_ptr(base, layout.inner, slab.dtype), layout.outer)
            memory = cute.local_tile(tensor, (16, slab.panel_columns), (None, None))
            shared, memory = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(memory, 0, 2)
            )
            ports.append(SlabPort(slab, atom, shared, memory, base.toint(), slab.lane_offset(self.lane)))
            start += slab.elements * slab.element
        return ports

    # ---------------------------------------------------------------- before the mainloop

    def begin(self, tile_m: Int32, tile_n: Int32, visit: Int32) -> Staged:
        """Request this tile's inputs."""
        if self.loads:
            cute.arch.sync_warp()  # all lanes have read the slabs that are overwritten now
            for step in range(self.config.load_stages):
                self._request(step, tile_m, tile_n)
        cols = [
            [[self._col_value(v, tile_m, block, half) for half in (0, 1)] for block in range(self.kernel.row_blocks)]
            for v in self.col_vectors
        ]
        rows = [
            [v[minimum(tile_n * width + self._share(j, width), v.shape[0] - 1)].to(Float32) for j in shares]
            for v, width, shares in self._row_shares()
        ]
        return Staged(cols, rows)

    def _row_shares(self) -> list[tuple[Any, int, range]]:
        """For each row input: the vector, its columns per tile, and how many of them each thread stages."""
        threads = self.kernel.team_warps * 32
        widths = [int(self.kernel.tile_n * r.width) for r in self.kernel.rows]
        return [(v, w, range(-(-w // threads))) for v, w in zip(self.row_vectors, widths, strict=True)]

    def _share(self, j: int, width: int) -> Int32:
        """The j-th column that this thread stages; surplus threads repeat the last one."""
        return minimum(self.team_thread + j * self.kernel.team_warps * 32, width - 1)

    def _row_of(self, tile_m: Int32, block: int, half: int) -> Int32:
        """The output row of this lane in a row block, upper (0) or lower (1) half."""
        return self._slab_row(tile_m, block) * 16 + self.lane // 4 + 8 * half

    def _slab_row(self, tile_m: Int32, block: int) -> Int32:
        """Index of this warp's 16 rows among all 16-row slabs of the output."""
        per_block = 4 * self.kernel.team_groups
        return tile_m * (self.kernel.tile_m // 16) + block * per_block + self.member * 4 + self.warp % 4

    def _col_value(self, vector: Any, tile_m: Int32, block: int, half: int) -> Float32:
        return vector[minimum(self._row_of(tile_m, block, half), vector.shape[0] - 1)].to(Float32)

    def _request(self, step: int, tile_m: Int32, tile_n: Int32) -> None:
        """Start the TMA loads of the step-th sub-tile of this warp into the next load stage."""
        stage = step % self.config.load_stages
        barrier = self.load_barriers + (self.warp * self.config.load_stages + stage)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, sum(p.slab.bytes_per_warp for p in self.loads))
        for port in self.loads:
            for slot, row, column in self._panels(port, step, stage, tile_m, tile_n):
                cute.copy(port.atom, port.memory[(None, row, column)], port.shared[(None, slot)], tma_bar_ptr=barrier)

    def _panels(
        self, port: SlabPort, step: int, stage: int, tile_m: Int32, tile_n: Int32
    ) -> list[tuple[Int32, Int32, Int32]]:
        """(shared-memory slot, slab row, slab column) of each panel of a sub-tile."""
        subtile, block = divmod(step, self.kernel.row_blocks)
        panels = port.slab.panels
        slot = (self.warp * port.slab.stages + stage) * panels
        column = (tile_n * self.kernel.subtiles + subtile) * panels
        return [(slot + p, self._slab_row(tile_m, block), column + p) for p in range(panels)]

    # ---------------------------------------------------------------- after the mainloop

    def finish(
        self, acc: cute.Tensor, staged: Staged, tile_m: Int32, tile_n: Int32, visit: Int32, partials: tuple[Any, ...]
    ) -> None:
        """Run the epilogue on a finished accumulator."""
        kernel, config = self.kernel, self.config
        if kernel.has_team_sync:
            self._stage_rows(staged, visit)
            kernel.sync_team(self.team)
        sums = TileSums(self, tile_m, tile_n)
        steps = kernel.subtiles * kernel.row_blocks
        for step in range(steps):
            subtile, block = divmod(step, kernel.row_blocks)
            if self.loads:
                self._await_loads(step, steps, visit)
            if self.stores:
                cute.arch.cp_async_bulk_wait_group(config.store_stages - 1, read=True)
                cute.arch.sync_warp()
            for eight in range(config.subtile // 8):
                for half in (0, 1):
                    self._pair(acc, staged, step, subtile, block, eight, half, visit, sums)
            if self.loads and step + config.load_stages < steps:
                cute.arch.sync_warp()
                self._request(step + config.load_stages, tile_m, tile_n)
            if self.stores:
                self._send(step, tile_m, tile_n)
            if block == kernel.row_blocks - 1:
                sums.end_subtile(subtile)
        sums.end_tile(partials)

    def _stage_rows(self, staged: Staged, visit: Int32) -> None:
        """Write the rows that `begin` loaded to shared memory, for the whole team."""
        for index, (_, width, shares) in enumerate(self._row_shares()):
            for j in shares:
                address = self._row_address(index, visit) + self._share(j, width) * 4
                store_shared(Float32, address, (staged.rows[index][j],))

    def _row_address(self, index: int, visit: Int32) -> Int32:
        """Byte address of a staged row: [buffer][team][input]."""
        widths = [w for _, w, _ in self._row_shares()]
        buffer = (visit % 2) * self.kernel.teams + self.team
        return self.rows_address + (buffer * sum(widths) + sum(widths[:index])) * 4

    def _await_loads(self, step: int, steps: int, visit: Int32) -> None:
        stages = self.config.load_stages
        barrier = self.load_barriers + (self.warp * stages + step % stages)
        cute.arch.mbarrier_wait(barrier, (visit * (steps // stages) + step // stages) % 2)

    def _send(self, step: int, tile_m: Int32, tile_n: Int32) -> None:
        """Start the TMA stores of a sub-tile."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        for port in self.stores:
            for slot, row, column in self._panels(port, step, step % port.slab.stages, tile_m, tile_n):
                cute.copy(port.atom, port.shared[(None, slot)], port.memory[(None, row, column)])
        cute.arch.cp_async_bulk_commit_group()

    def _pair(
        self,
        acc: cute.Tensor,
        staged: Staged,
        step: int,
        subtile: int,
        block: int,
        eight: int,
        half: int,
        visit: Int32,
        sums: "TileSums",
    ) -> None:
        """Two adjacent columns of one row: read, apply, write, sum."""
        config = self.config
        column = subtile * config.subtile + 8 * eight  # first of the eight columns, within the tile
        value = block * (self.kernel.tile_n // 2) + column // 2 + 2 * half
        loads, cols = iter(self.loads), iter(staged.cols)
        rows = iter(range(len(self.kernel.rows)))
        arguments: list[Registers] = []
        for item in self.body.INPUTS:
            if item.kind == "tile":
                port = next(loads)
                address = self._address(port, step % config.load_stages, eight, half)
                arguments.append(load_shared(port.slab.dtype, address, item.registers))
            elif item.kind == "row":
                offset = int(column * item.width) * 4 + (self.lane % 4) * (item.registers * 4)
                arguments.append(load_shared(Float32, self._row_address(next(rows), visit) + offset, item.registers))
            elif item.kind == "col":
                arguments.append((next(cols)[block][half],))
            else:
                arguments.append((self.scalars[item.name],))
        tiles, reduced = self.body.apply((acc[value], acc[value + 1]), *arguments)
        for port, registers in zip(self.stores, tiles, strict=True):
            address = self._address(port, step % config.store_stages, eight, half)
            store_shared(port.slab.dtype, address, broadcast(registers, port.slab.item.registers))
        for index, (partial, registers) in enumerate(zip(self.body.PARTIALS, reduced, strict=True)):
            sums.add(index, broadcast(registers, partial.registers), column, block, eight, half)

    def _address(self, port: SlabPort, stage: int, eight: int, half: int) -> Int32:
        slab = port.slab
        panel, offset = slab.pair_offset(port.lane, eight, half)
        slot = (self.warp * slab.stages + stage) * slab.panels + panel
        return port.base + slot * (16 * slab.panel) + offset


class TileSums:
    """The partial sums of one tile, on their way from registers to memory."""

    def __init__(self, loop: EpilogueLoop, tile_m: Int32, tile_n: Int32) -> None:
        self.loop, self.kernel = loop, loop.kernel
        self.tile_m, self.tile_n = tile_m, tile_n
        self.partials: tuple[Partial, ...] = loop.body.PARTIALS
        blocks = range(self.kernel.row_blocks)
        self.rows = [[loop._row_of(tile_m, block, half) for half in (0, 1)] for block in blocks]
        # columns of the tile that exist, seen from this lane's first column
        self.limit = loop.n - tile_n * self.kernel.tile_n - 2 * (loop.lane % 4)
        # col: one sum per row of the lane; row: per eight columns and register; scalar: one
        self.sums: list[dict[Any, Float32]] = [{} for _ in self.partials]

    def add(self, index: int, values: Registers, column: int, block: int, eight: int, half: int) -> None:
        """Add one pair's values (they start `column` columns into the tile)."""
        partial, sums = self.partials[index], self.sums[index]
        for register, value in enumerate(values):
            if partial.kind != "row":  # summed over n: what lies right of the edge adds nothing
                value = masked(value, column + (2 * register) // partial.registers < self.limit)
            if partial.kind != "col":  # summed over m
                value = masked(value, self.rows[block][half] < self.loop.m)
            key = {"col": (block, half), "row": (eight, register), "scalar": ()}[partial.kind]
            sums[key] = sums[key] + value if key in sums else value

    def end_subtile(self, subtile: int) -> None:
        """Leave this warp's sums over rows in its row of the scratch."""
        for index, partial in enumerate(self.partials):
            if partial.kind != "row":
                continue
            folded = {key: fold_lanes(value, SAME_COLUMN) for key, value in self.sums[index].items()}
            self.sums[index].clear()
            for eight in range(self.loop.config.subtile // 8):
                values = tuple(folded[eight, r] for r in range(partial.registers))
                column = int((subtile * self.loop.config.subtile + 8 * eight) * partial.width)
                lane_column = (self.loop.lane % 4) * partial.registers
                # the eight lanes of a column hold the same sum and write it to the same place
                store_shared(Float32, self._scratch(index, self.loop.warp) + (column + lane_column) * 4, values)

    def end_tile(self, partials: tuple[Any, ...]) -> None:
        """Write one partial per tile."""
        for index, partial in enumerate(self.partials):
            if partial.kind == "col":
                self._write_col(index, partials[index])
            elif partial.kind == "scalar":
                total = fold_lanes(self.sums[index][()], (*SAME_ROW, *SAME_COLUMN))
                store_shared(Float32, self._scratch(index, self.loop.warp), (total,))
        if self.kernel.scratch:
            self.kernel.sync_team(self.loop.team)
            for index, partial in enumerate(self.partials):
                if partial.kind != "col":
                    self._write_scratch(index, partial, partials[index])

    def _write_col(self, index: int, target: cute.Tensor) -> None:
        for (block, half), value in self.sums[index].items():
            row = self.rows[block][half]
            inside = (row < self.loop.m) & (self.tile_n < target.shape[0]) & (self.loop.lane % 4 == 0)
            store_if(inside, target, self.tile_n, row, fold_lanes(value, SAME_ROW))

    def _write_scratch(self, index: int, partial: Partial, target: cute.Tensor) -> None:
        """Sum the team's warps and write: a column per thread, or one number by one thread."""
        width = self.kernel._scratch_width(partial)
        threads = self.kernel.team_warps * 32
        first_warp = self.loop.team * self.kernel.team_warps
        for j in range(-(-width // threads)):
            column = self.loop.team_thread + j * threads
            total = Float32(0.0)
            for w in range(self.kernel.team_warps):
                address = self._scratch(index, first_warp + w) + minimum(column, width - 1) * 4
                total = total + load_shared(Float32, address, 1)[0]
            output = self.tile_n * width + column
            inside = (column < width) & (self.tile_m < target.shape[0]) & (output < target.shape[1])
            store_if(inside, target, self.tile_m, output, total)

    def _scratch(self, index: int, warp: Any) -> Int32:
        """Byte address of a warp's row of a partial's scratch: [partial][warp][column]."""
        scratch = [p for p in self.partials[:index] if p.kind != "col"]
        before = 8 * sum(self.kernel._scratch_width(p) for p in scratch)
        return self.loop.scratch_address + (before + warp * self.kernel._scratch_width(self.partials[index])) * 4


def epilogue_of(*arguments: Any) -> tuple[Callable[..., Staged], Callable[..., None]]:
    """The two halves of an EpilogueLoop, `begin` and `finish`, as functions."""
    loop = EpilogueLoop(*arguments)
    return loop.begin, loop.finish
