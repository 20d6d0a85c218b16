"""The loop that runs a generated epilogue on the accumulator of `sm90.GemmKernel`.

Plain Python that is traced into the kernel: its loops unroll, its lists are registers.

For a tile, `request` and `begin` run before the mainloop and ask for what the epilogue will read: the first slabs of
the tile inputs (TMA); the warp's values of the cols (registers), the team's rows (registers, on their way to shared
memory).
`finish` runs after it: sub-tile by sub-tile, pair by pair, it reads, calls `Epilogue.apply`, writes and sums.

Sums over n stay in one warp: registers, then the four lanes of a row.  Sums over m fold registers, then the eight
lanes of a column, then the team's warps through shared memory.  Each ends as one partial per tile, in a fixed
order: results are deterministic.  A reduction to one row per sample ends as one partial per 16 rows, a warp's own:
where samples have a multiple of 16 rows, they lie in one of them.  Inputs of one row per sample come from global
memory, as most of what a warp loads of them is the same row, for samples of any size.
"""

import functools
from collections.abc import Callable
from typing import Any

import attrs
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from codalang.lower import device
from codalang.lower.body import Partial
from codalang.lower.device import Registers
from codalang.lower.plan import CONSUMER_WARPS
from codalang.lower.registers import (
    CUTE_DTYPES,
    as_word,
    broadcast,
    fold,
    fold_lanes,
    initial,
    load,
    load_matrices,
    load_shared,
    merge,
    minimum,
    opaque,
    packed,
    spread_lanes,
    store_if,
    store_matrices,
    store_shared,
    store_shared_if,
    widened,
)
from codalang.lower.spec import SLAB_ROWS
from codalang.lower.waiting import Waiting

SAME_ROW = (1, 2)  # lane bits that differ within a row of the accumulator
SAME_COLUMN = (4, 8, 16)  # lane bits that differ within a column
COMMUTATIVE = tuple(device.REDUCTIONS.values())
Leave = Callable[[Int32, list[tuple], Any], None]  # writes adjacent columns from one on, where valid
EIGHTS_OF_MATRICES = 2  # of columns, and both halves of the rows: what one instruction moves by matrices


def load_phase(visit: Any, steps: int, step: int, stages: int) -> Any:
    """The parity of the phase of its stage's barrier in which a step's load arrives, where each tile has so many."""
    return (visit * (steps // stages) + step // stages) % 2


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
        self.sample_rows = [(i, v) for v, i in zip(vectors, inputs, strict=True) if i.kind == "rows"]
        self.scalars = {
            i.name: v if i.dtype == "number" else widened(v[0])
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

    def request(self, tile_m: Int32, tile_n: Int32) -> None:
        """Request the first slabs of this tile's inputs."""
        if self.loads:
            cute.arch.sync_warp()  # all lanes have read the slabs that are overwritten now
            for step in range(self.config.load_stages):
                self._request(step, tile_m, tile_n)

    def begin(self, tile_m: Int32, tile_n: Int32) -> Staged:
        """Read this tile's vectors."""
        cols = [
            [[self._col_value(v, tile_m, block, half) for half in (0, 1)] for block in range(self.kernel.row_blocks)]
            for v in self.col_vectors
        ]
        rows = [
            [as_word(widened(v[minimum(tile_n * width + self._share(j, width), v.shape[0] - 1)])) for j in shares]
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
        return widened(vector[minimum(self._row_of(tile_m, block, half), vector.shape[0] - 1)])

    def _request(self, step: int, tile_m: Int32, tile_n: Int32) -> None:
        """Start the TMA loads of the step-th sub-tile of this warp into the next load stage."""
        stage = step % self.config.load_stages
        barrier = self.load_barriers + (self.warp * self.config.load_stages + stage)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, sum(p.slab.bytes_per_warp for p in self.loads))
        for port in self.loads:
            for slot, row, column in self._panels(port, step, stage, tile_m, tile_n):
                source, target = port.memory[(None, row, column)], port.shared[(None, slot)]
                cute.copy(port.atom, source, target, tma_bar_ptr=barrier)

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
        sums = TileSums(self, tile_m, tile_n, partials)
        ports = [*self.loads, *self.stores]
        samples = self._samples(tile_m)
        steps, unit = kernel.subtiles * kernel.row_blocks, self.body.UNIT // 8
        for step in range(steps):
            subtile, block = divmod(step, kernel.row_blocks)
            if self.loads:
                self._await_loads(step, steps, visit)
            if self.stores:
                cute.arch.cp_async_bulk_wait_group(config.store_stages - 1, read=True)
                cute.arch.sync_warp()
            group = max(unit, EIGHTS_OF_MATRICES if any(p.slab.in_matrices for p in ports) else 1)
            loaded = self._load_tiles(step, 0, group)
            for start in range(0, config.subtile // 8, group):
                tiles = loaded + self._load_sample_rows(samples, tile_n, step, start, group)
                if start + group < config.subtile // 8:  # requested one group ahead: their latency passes in this one
                    loaded = self._load_tiles(step, start + group, group)
                pairs: list[dict[tuple[int, int], Int32]] = [{} for _ in self.stores]
                for first in range(start, start + group, unit):
                    eights = tuple(range(first, first + unit))
                    rows = [self._load_row(item, i, visit, subtile, eights) for i, item in enumerate(kernel.rows)]
                    for half in (0, 1):
                        place = Place(tile_m, tile_n, step, subtile, block, eights, half)
                        given = [[t[half][eight - start] for eight in eights] for t in tiles]
                        results = self._columns(acc, staged, given, rows, place, sums)
                        for port, values, kept in zip(self.stores, results, pairs, strict=True):
                            self._store_unit(port, place, values, kept)
                for port, kept in zip(self.stores, pairs, strict=True):
                    self._store_pairs(port, step, kept)
            if self.loads and step + config.load_stages < steps:
                cute.arch.sync_warp()
                self._request(step + config.load_stages, tile_m, tile_n)
            if self.stores:
                self._send(step, tile_m, tile_n)
            if not self.body.WHOLE_TILES:
                sums.end_block(block)
            sums.end_slab(subtile, block)
            if block == kernel.row_blocks - 1:
                sums.end_subtile(subtile)
        sums.end_tile()

    def _stage_rows(self, staged: Staged, visit: Int32) -> None:
        """Write the rows that `begin` loaded to shared memory, for the whole team."""
        for index, (_, width, shares) in enumerate(self._row_shares()):
            for j in shares:
                address = self._row_address(index, visit) + self._share(j, width) * 4
                value = staged.rows[index][j]
                store_shared(type(value), address, (value,))

    def _row_address(self, index: int, visit: Int32) -> Int32:
        """Byte address of a staged row: [buffer][team][input]."""
        widths = [w for _, w, _ in self._row_shares()]
        buffer = (visit % 2) * self.kernel.teams + self.team
        return self.rows_address + (buffer * sum(widths) + sum(widths[:index])) * 4

    def _await_loads(self, step: int, steps: int, visit: Int32) -> None:
        stages = self.config.load_stages
        barrier = self.load_barriers + (self.warp * stages + step % stages)
        cute.arch.mbarrier_wait(barrier, load_phase(visit, steps, step, stages))

    def _send(self, step: int, tile_m: Int32, tile_n: Int32) -> None:
        """Start the TMA stores of a sub-tile."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        for port in self.stores:
            for slot, row, column in self._panels(port, step, step % port.slab.stages, tile_m, tile_n):
                source, target = port.shared[(None, slot)], port.memory[(None, row, column)]
                cute.copy(port.atom, source, target)
        cute.arch.cp_async_bulk_commit_group()

    def _columns(
        self,
        acc: cute.Tensor,
        staged: Staged,
        tiles: list[list[Registers]],
        rows: list[Registers],
        place: "Place",
        sums: "TileSums",
    ) -> tuple[Registers, ...]:
        """The columns of one row that this thread holds of a unit: apply and reduce; what to write of each output."""
        arguments: list[Registers] = [
            tuple(acc[v] for eight in place.eights for v in self._accumulator_values(place, eight))
        ]
        loads, cols, given_rows = iter(tiles), iter(staged.cols), iter(rows)
        sample_rows = iter(tiles[len(self.loads) :])
        for item in self.body.INPUTS:
            if item.kind in ("tile", "rows"):
                eights = next(loads if item.kind == "tile" else sample_rows)
                arguments.append(tuple(register for eight in eights for register in eight))
            elif item.kind == "row":
                arguments.append(next(given_rows))
            elif item.kind == "col":
                arguments.append((next(cols)[place.block][place.half],))
            else:
                arguments.append((self.scalars[item.name],))
        host = GemmHost(self, place)
        results, vectors, reduced = self.body.apply(host, *arguments)
        sums.store_vectors(vectors, place, host)
        for index, values in enumerate(reduced):
            sums.add(index, values, place)
        return results

    def _accumulator_values(self, place: "Place", eight: int) -> tuple[int, int]:
        """Indices of the accumulator's pair in an eight of columns."""
        column = place.subtile * self.config.subtile + 8 * eight
        value = place.block * (self.kernel.tile_n // 2) + column // 2 + 2 * place.half
        return value, value + 1

    def _load_tiles(self, step: int, start: int, group: int) -> list[list[list[Registers]]]:
        """What this thread holds of a group of eights of each tile input: [input][half][eight]."""
        return [self._load_tile(port, step % self.config.load_stages, start, group) for port in self.loads]

    def _load_tile(self, port: SlabPort, stage: int, start: int, group: int) -> list[list[Registers]]:
        slab, eights = port.slab, range(start, start + group)
        if not slab.in_matrices:
            return [
                [load_shared(slab.dtype, self._address(port, stage, e, half), slab.item.registers) for e in eights]
                for half in (0, 1)
            ]
        halves: list[list[Registers]] = [[], []]
        for eight in eights[::EIGHTS_OF_MATRICES]:
            pairs = load_matrices(slab.dtype, self._address(port, stage, eight, 0))
            for i, pair in enumerate(pairs):
                halves[i % 2].append(pair)
        return halves

    def _samples(self, tile_m: Int32) -> list[list[Int32]]:
        """The sample of each row that this lane has: [row block][half]; nothing where no input has samples."""
        if not self.sample_rows:
            return []
        size = self.m // self.sample_rows[0][1].shape[0]
        blocks = range(self.kernel.row_blocks)
        return [[minimum(self._row_of(tile_m, b, half), self.m - 1) // size for half in (0, 1)] for b in blocks]

    def _load_sample_rows(
        self, samples: list[list[Int32]], tile_n: Int32, step: int, start: int, group: int
    ) -> list[list[list[Registers]]]:
        """As `_load_tiles`, of the inputs of one row per sample."""
        subtile, block = divmod(step, self.kernel.row_blocks)
        columns = [subtile * self.config.subtile + 8 * eight for eight in range(start, start + group)]
        return [
            [[self._load_sample_row(i, t, samples[block][half], tile_n, c) for c in columns] for half in (0, 1)]
            for i, t in self.sample_rows
        ]

    def _load_sample_row(self, item: Any, tensor: Any, sample: Int32, tile_n: Int32, first: int) -> Registers:
        """What this lane holds of an eight of columns; right of the edge, the last ones."""
        count = item.registers
        column = tile_n * int(self.kernel.tile_n * item.width) + (int(first * item.width) + self.lane % 4 * count)
        column = minimum(column, (tensor.shape[1] - 1) // count * count)
        offset = Int64(sample) * Int64(tensor.stride[0]) + Int64(column)
        address = tensor.iterator.toint() + offset * (tensor.element_type.width // 8)
        return load(CUTE_DTYPES[item.dtype], address, count, cute.AddressSpace.gmem)

    def _store_unit(
        self, port: SlabPort, place: "Place", values: Registers, kept: dict[tuple[int, int], Int32]
    ) -> None:
        """Write an output's columns of a unit, or keep the pairs that wait for others of their matrices."""
        slab, count = port.slab, port.slab.item.registers
        columns = broadcast(values, count * len(place.eights))
        for i, eight in enumerate(place.eights):
            registers = columns[i * count : (i + 1) * count]
            if slab.in_matrices:
                kept[eight, place.half] = packed(slab.dtype, registers)
            else:
                address = self._address(port, place.step % self.config.store_stages, eight, place.half)
                store_shared(slab.dtype, address, registers)

    def _store_pairs(self, port: SlabPort, step: int, kept: dict[tuple[int, int], Int32]) -> None:
        """Write what `_store_unit` kept of a group."""
        for first in sorted({eight for eight, _ in kept})[::EIGHTS_OF_MATRICES]:
            eights = range(first, first + EIGHTS_OF_MATRICES)
            address = self._address(port, step % self.config.store_stages, first, 0)
            store_matrices(address, tuple(kept[eight, half] for eight in eights for half in (0, 1)))

    def _load_row(self, item: Any, index: int, visit: Int32, subtile: int, eights: tuple[int, ...]) -> Registers:
        """The staged columns of a row that this thread holds of a unit; both halves of the rows take the same."""
        base = self._row_address(index, visit) + (self.lane % 4) * (item.registers * 4)
        first = subtile * self.config.subtile
        offsets = [int((first + 8 * eight) * item.width) * 4 for eight in eights]
        dtype = Float32 if item.dtype in ("bf16", "f16", "f32") else Int32
        words = tuple(w for offset in offsets for w in load_shared(dtype, base + offset, item.registers))
        return tuple(w != 0 for w in words) if item.dtype == "bool" else words

    def _address(self, port: SlabPort, stage: int, eight: int, half: int) -> Int32:
        slab = port.slab
        panel, offset = slab.pair_offset(port.lane, eight, half)
        slot = (self.warp * slab.stages + stage) * slab.panels + panel
        return port.base + slot * (16 * slab.panel) + offset


@attrs.frozen
class Place:
    """Where a unit of columns lies: the tile, the step of the epilogue, the eights of columns, the half of the rows."""

    tile_m: Int32
    tile_n: Int32
    step: int
    subtile: int
    block: int
    eights: tuple[int, ...]
    half: int


class GemmHost:
    """What a body asks of its host: where its registers lie in the output, and the columns of other lanes.

    `registers` is how many columns of a value one thread holds for two of the accumulator's.
    """

    def __init__(self, loop: EpilogueLoop, place: Place) -> None:
        self.loop, self.place = loop, place

    def row_index(self) -> Registers:
        """The output row."""
        return (self.loop._row_of(self.place.tile_m, self.place.block, self.place.half),)

    def col_index(self, registers: int) -> Registers:
        """The output column of each register."""
        kernel, first = self.loop.kernel, self.place.subtile * self.loop.config.subtile
        lane = self.place.tile_n * (kernel.tile_n * registers // 2) + (self.loop.lane % 4) * registers
        starts = [(first + 8 * eight) * registers // 2 for eight in self.place.eights]
        return tuple(lane + (start + r) for start in starts for r in range(registers))

    def group_sum(self, values: Registers, size: int, registers: int) -> Registers:
        """Each register's group sum."""
        return self._grouped("group_sum", values, size, registers)

    def group_max(self, values: Registers, size: int, registers: int) -> Registers:
        """Each register's group maximum."""
        return self._grouped("group_max", values, size, registers)

    def _grouped(self, name: str, values: Registers, size: int, registers: int) -> Registers:
        # four lanes hold the 4 * registers columns of an eight
        mine = max(1, size // (4 * registers)) * registers if size >= registers else size
        lanes = tuple(b for b in SAME_ROW if b * registers < size)
        return tuple(
            total
            for first in range(0, len(values), mine)
            for total in [device.combine(name, values[first : first + mine], cute.arch.shuffle_sync_bfly, lanes)] * mine
        )


class TileSums:
    """The partial reductions of one tile, on their way from registers to memory; and its stored vectors.

    `outputs` are the vectors' tensors, then for each partial one tensor per carried value.
    """

    def __init__(self, loop: EpilogueLoop, tile_m: Int32, tile_n: Int32, outputs: tuple[Any, ...]) -> None:
        self.loop, self.kernel = loop, loop.kernel
        self.tile_m, self.tile_n = tile_m, tile_n
        self.partials: tuple[Partial, ...] = loop.body.PARTIALS
        self.vectors = outputs[: len(loop.body.VECTORS)]
        rest = iter(outputs[len(loop.body.VECTORS) :])
        self.targets = [[next(rest) for _ in p.fold.initial] for p in self.partials]
        blocks = range(self.kernel.row_blocks)
        self.rows = [[loop._row_of(tile_m, block, half) for half in (0, 1)] for block in blocks]
        # columns of the tile that exist, seen from this lane's first column
        self.limit = loop.n - tile_n * self.kernel.tile_n - 2 * (loop.lane % 4)
        # col: one per row of the lane; row, rows: one per eight columns and register; scalar: one
        self.carried: list[dict[Any, tuple]] = [{} for _ in self.partials]
        columns = loop.n - tile_n * self.kernel.tile_n
        # what is all of a tile's columns is folded over the row's lanes, too
        lanes = SAME_ROW if loop.body.WHOLE_TILES else ()
        self.waiting = Waiting(self.partials, columns, self.kernel.tile_n, loop.lane % 4, tile_n, lanes)

    def add(self, index: int, values: tuple[Registers, ...], place: Place) -> None:
        """Fold one unit's values."""
        partial, carried = self.partials[index], self.carried[index]
        count = partial.registers
        columns = [broadcast(v, count * len(place.eights)) for v in values]
        for i, eight in enumerate(place.eights):
            first = place.subtile * self.loop.config.subtile + 8 * eight
            if partial.waits:
                elements = (column[i * count : (i + 1) * count] for column in columns)
                self.waiting.add((index, (place.block, place.half)), first, zip(*elements, strict=True))
                continue
            for register in range(count):
                valid: Any = True
                if partial.crosses_warps:  # reduced over m: what lies below the edge does not exist
                    valid = self.rows[place.block][place.half] < self.loop.m
                if partial.kind in ("col", "scalar"):  # reduced over n: nor what lies right of it
                    exists = first + (2 * register) // count < self.limit
                    valid = exists if valid is True else exists & valid
                keys = {"col": (place.block, place.half), "scalar": ()}
                key = keys.get(partial.kind, (eight, register))
                element = tuple(c[i * count + register] for c in columns)
                start = initial(partial.fold)
                if partial.kind in ("scalar", "col"):
                    start = opaque(start)
                carried[key] = fold(partial.fold, carried.get(key) or start, element, valid)

    def store_vectors(self, values: tuple[Registers, ...], place: Place, host: GemmHost) -> None:
        """Write stored vectors, each element by one thread of the whole grid."""
        loop = self.loop
        row = self.rows[place.block][place.half]
        for vector, target, registers in zip(loop.body.VECTORS, self.vectors, values, strict=True):
            first = place.subtile == 0 and place.eights[0] == 0
            if vector.kind == "row" and place.block == 0 and place.half == 0:
                top = (self.tile_m == 0) & (loop.team_thread < 4)
                count = vector.registers * len(place.eights)
                for column, value in zip(host.col_index(vector.registers), broadcast(registers, count), strict=True):
                    store_if(top & (column < target.shape[1]), target, 0, column, value)
            elif vector.kind == "col" and first:
                left = (self.tile_n == 0) & (loop.lane % 4 == 0)
                store_if(left & (row < loop.m), target, 0, row, registers[0])
            elif vector.kind == "scalar" and first and place.block == 0 and place.half == 0:
                corner = (self.tile_m == 0) & (self.tile_n == 0) & (loop.team_thread == 0)
                store_if(corner, target, 0, 0, registers[0])

    def end_subtile(self, subtile: int) -> None:
        """Leave this warp's partial rows in its part of the scratch."""
        for index, partial in enumerate(self.partials):
            if partial.kind == "row":
                self._write_columns(index, subtile, functools.partial(self._leave, index))

    def end_block(self, block: int) -> None:
        """Fold what waits of a block of rows."""
        for (index, key), part in self.waiting.folded(block).items():
            before = self.carried[index].get(key)
            self.carried[index][key] = part if before is None else merge(self.partials[index].fold, before, part)

    def end_slab(self, subtile: int, block: int) -> None:
        """Write this warp's partial rows of its 16 rows, all of one sample."""
        for index, partial in enumerate(self.partials):
            if partial.kind == "rows":
                slab = self.loop._slab_row(self.tile_m, block)
                self._write_columns(index, subtile, functools.partial(self._write_of_sample, index, slab))

    def _write_columns(self, index: int, subtile: int, leave: Leave) -> None:
        """Fold the lanes of each column of a sub-tile, and write."""
        partial, carried = self.partials[index], self.carried[index]
        parts = [carried[key] for key in sorted(carried)]
        carried.clear()
        is_power = len(parts) & (len(parts) - 1) == 0
        write = self._write_spread if partial.fold in COMMUTATIVE and is_power else self._write_parts
        write(partial, parts, int(subtile * self.loop.config.subtile * partial.width), leave)

    def _write_of_sample(self, index: int, slab: Int32, column: Int32, parts: list[tuple], valid: Any) -> None:
        """Write adjacent columns of one sample's partial: [part, sample * columns + column]."""
        partial, targets = self.partials[index], self.targets[index]
        columns, per_sample = partial.columns(self.loop.n), targets[0].shape[0]
        sample = slab // per_sample
        first = self.tile_n * int(self.kernel.tile_n * partial.width) + column
        for i, values in enumerate(parts):
            inside = (first + i < columns) & (slab * SLAB_ROWS < self.loop.m) & Boolean(valid)
            for target, value in zip(targets, values, strict=True):
                store_if(inside, target, slab - sample * per_sample, sample * columns + (first + i), value)

    def _write_spread(self, partial: Partial, parts: list[tuple], start: int, leave: Leave) -> None:
        """Each lane writes some columns."""
        mine, first = spread_lanes(partial.fold, parts, self.loop.lane, tuple(reversed(SAME_COLUMN)))
        count = min(partial.registers, len(mine))
        for i in range(0, len(mine), count):
            at = first + i
            column = start + self._column(at // partial.registers, partial) + at % partial.registers
            leave(column, mine[i : i + count], True)

    def _write_parts(self, partial: Partial, parts: list[tuple], start: int, leave: Leave) -> None:
        """Four lanes write all: what a user folds need not be commutative."""
        count = partial.registers
        for eight in range(len(parts) // count):
            mine = [fold_lanes(partial.fold, part, SAME_COLUMN) for part in parts[eight * count : (eight + 1) * count]]
            leave(start + self._column(eight, partial), mine, self.loop.lane < 4)

    def _column(self, eight: Any, partial: Partial) -> Int32:
        """The lane's first column in an eight of the accumulator's columns."""
        return (eight * 4 + self.loop.lane % 4) * partial.registers

    def _leave(self, index: int, column: Int32, parts: list[tuple], valid: Any) -> None:
        """Write adjacent columns to the warp's scratch."""
        for component, dtype in enumerate(self.partials[index].fold.dtypes):
            address = self._scratch(index, component, self.loop.warp) + column * 4
            store_shared_if(Boolean(valid), CUTE_DTYPES[dtype], address, tuple(part[component] for part in parts))

    def end_tile(self) -> None:
        """Write one partial per tile."""
        for block in range(self.kernel.row_blocks):
            self.end_block(block)
        for index, partial in enumerate(self.partials):
            if partial.kind == "col":
                self._write_col(index)
            elif partial.kind == "scalar":
                total = fold_lanes(partial.fold, self.carried[index][()], (*SAME_ROW, *SAME_COLUMN))
                for component, dtype in enumerate(partial.fold.dtypes):
                    address = self._scratch(index, component, self.loop.warp)
                    store_shared_if(self.loop.lane == 0, CUTE_DTYPES[dtype], address, (total[component],))
        if self.kernel.scratch:
            self.kernel.sync_team(self.loop.team)
            for index, partial in enumerate(self.partials):
                if partial.crosses_warps:
                    self._write_scratch(index, partial)

    def _write_col(self, index: int) -> None:
        for (block, half), carried in self.carried[index].items():
            row = self.rows[block][half]
            is_whole = self.partials[index].waits and self.waiting.lanes
            total = carried if is_whole else fold_lanes(self.partials[index].fold, carried, SAME_ROW)
            for target, value in zip(self.targets[index], total, strict=True):
                inside = (row < self.loop.m) & (self.tile_n < target.shape[0]) & (self.loop.lane % 4 == 0)
                store_if(inside, target, self.tile_n, row, value)

    def _write_scratch(self, index: int, partial: Partial) -> None:
        """Merge the team's warps and write: a column per thread, or one result by one thread."""
        width = self.kernel.scratch_width(partial)
        threads = self.kernel.team_warps * 32
        first_warp = self.loop.team * self.kernel.team_warps
        for j in range(-(-width // threads)):
            column = self.loop.team_thread + j * threads
            total = initial(partial.fold)
            for w in range(self.kernel.team_warps):
                total = merge(
                    partial.fold, total, self._read_scratch(index, first_warp + w, minimum(column, width - 1))
                )
            output = self.tile_n * width + column
            for target, value in zip(self.targets[index], total, strict=True):
                inside = (column < width) & (self.tile_m < target.shape[0]) & (output < target.shape[1])
                store_if(inside, target, self.tile_m, output, value)

    def _read_scratch(self, index: int, warp: Any, column: Int32) -> tuple:
        dtypes = self.partials[index].fold.dtypes
        addresses = [self._scratch(index, component, warp) + column * 4 for component in range(len(dtypes))]
        return tuple(load_shared(CUTE_DTYPES[d], a, 1)[0] for d, a in zip(dtypes, addresses, strict=True))

    def _scratch(self, index: int, component: int, warp: Any) -> Int32:
        """Byte address of a warp's part of the scratch: [partial][carried value][warp][column]."""
        width = self.kernel.scratch_width(self.partials[index])
        before = sum(self.kernel.scratch_floats(p) for p in self.partials[:index] if p.crosses_warps)
        return self.loop.scratch_address + (before + (component * CONSUMER_WARPS + warp) * width) * 4


def epilogue_of(*arguments: Any) -> tuple[Callable[..., None], Callable[..., Staged], Callable[..., None]]:
    """The steps of an EpilogueLoop, `request`, `begin` and `finish`, as functions."""
    loop = EpilogueLoop(*arguments)
    return loop.request, loop.begin, loop.finish
