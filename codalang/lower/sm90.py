"""The GEMM of SM90: one fixed mainloop, and the loop that runs any generated epilogue on its accumulator.

    acc[M, N] = A[M, K] @ B[N, K]^T     bf16 or f16 operands, f32 accumulation; then Epilogue.apply

Warp roles (384 threads, one CTA per SM, persistent):

| warps          | role                                                                                     |
|----------------|------------------------------------------------------------------------------------------|
| 0              | producer: TMA loads of A and B into the ring, multicast over the cluster                  |
| 1-3            | idle; they only give up their registers                                                   |
| 4-7, 8-11      | two consumer warpgroups: wgmma, then the epilogue                                         |

Consumers work as one *team* of 8 warps on one tile (cooperative) or as two teams of 4 on alternating tiles
(ping-pong: one team's epilogue runs under the other's mainloop).

| pipeline     | full barrier arrivals               | empty                                                     |
|--------------|-------------------------------------|-----------------------------------------------------------|
| A/B ring     | 1 expect_tx, all bytes of the stage | team warps x CTAs that share the stage by multicast        |
| tile inputs  | 1 expect_tx, private to one warp    | none: the warp that waits is the warp that issues          |
| tile outputs | bulk groups, private to one warp    | wait for the group's reads                                 |

**The epilogue is autonomous per warp.**  A warp owns 16 rows of each 64-row block of the accumulator, so it can move
16-row slabs of tile inputs and outputs through its own piece of shared memory with its own TMA instructions: no
barrier among warps, no separate load warp, and the first slabs of a tile are requested before its mainloop, behind
which their latency disappears.  Only what crosses warps needs the team: staged rows, and reductions over rows.

Layout of the accumulator (wgmma, PTX ISA 9.7.14): value v of thread t, lane l = t % 32, warp w = t / 32 of the
warpgroup, is row 16w + l/4 + 8*((v>>1)&1), column 8*(v>>2) + 2*(l%4) + (v&1).  Two adjacent values are two adjacent
columns: the *pair* that `Epilogue.apply` sees.

Tensor cores truncate the accumulator at every addition, which shrinks it by about K * 2^-30, and by seven times as
much where all products have one sign.  For a `precise epilogue` they accumulate short runs of K, and those are added in
f32, rounded to nearest: twice the registers, so smaller tiles.

Overlap (`KernelSpec.overlap`): the launch does not wait for the kernel before it in the stream.  CTAs start as those of
that one leave, make their barriers, fetch their descriptors, and touch nothing in global memory before they know that
it has ended and that what it wrote is visible.  Kernels launched without it wait for all of this one, as ever.

Ragged edges: TMA drops what lies outside, vectors are loaded at a clamped index, and reductions mask the reduced
value.  A CTA whose own tile lies outside still takes part in its cluster's multicast.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import not_
from cutlass.memory import SmemAllocator

from codalang.lower.balance import Item, slots, walk
from codalang.lower.body import Input, Partial, Tile
from codalang.lower.epilogue_loop import epilogue_of
from codalang.lower.gather import gather
from codalang.lower.plan import CONSUMER_WARPS
from codalang.lower.registers import CUTE_DTYPES, choose_whole, store_shared_if
from codalang.lower.spec import DTYPE_BYTES, K_TILE, SLAB_ROWS, Config, Folding, Operand

THREADS = 384
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # per thread; with 128 producer threads they sum to 384 * 168
# Per thread: beside more, or tiles of another width, the assembler spills what waits for the rest of its matrices.
MATRIX_ACCUMULATORS = 128
PRECISE_STEPS = 16  # of K in one run: 64 additions that truncate lose up to 6e-6 of a sum of equal signs
PANEL_BYTES = 128  # widest shared-memory row that TMA can swizzle
TEAM_BARRIER = 1  # named barriers 1 and 2: one per team
TURN_BARRIER = 3  # named barriers 3 and 4: whose mainloop's turn it is


class Slab:
    """How one tile input or output of a warp's 16 rows by one sub-tile lies in shared memory.

    The slab is cut into panels of at most 128 bytes a row, each swizzled as TMA does; a thread's registers of one
    pair are adjacent in a panel.
    """

    def __init__(self, item: Input | Tile, subtile: int, stages: int, by_matrices: bool) -> None:
        self.item = item
        self.dtype = CUTE_DTYPES[item.dtype]
        self.element = DTYPE_BYTES[item.dtype]
        row = int(subtile * item.width) * self.element
        self.panel = min(row, PANEL_BYTES)
        self.panels = row // self.panel
        self.panel_columns = self.panel // self.element
        self.stages = stages
        self.slots = CONSUMER_WARPS * stages * self.panels
        # moved by 8x8 matrices, two eights of columns at a time: 16-bit elements in the accumulator's layout
        self.in_matrices = by_matrices and self.element == 2 and item.width == 1

    @property
    def bytes_per_warp(self) -> int:
        """Bytes of one stage of one warp."""
        return SLAB_ROWS * self.panel * self.panels

    @property
    def elements(self) -> int:
        """Elements of all stages of all warps."""
        return self.slots * SLAB_ROWS * self.panel_columns

    def layout(self) -> cute.ComposedLayout:
        """(16, panel columns, slots), swizzled."""
        kinds = warpgroup.SmemLayoutAtomKind
        kind = {16: kinds.K_INTER, 32: kinds.K_SW32, 64: kinds.K_SW64, 128: kinds.K_SW128}[self.panel]
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, (SLAB_ROWS, self.panel_columns, self.slots), (0, 1, 2))

    def lane_offset(self, lane: Int32) -> tuple[Int32, Int32]:
        """The lane's part of a byte offset: its row's, and its column's with the swizzle's exclusive-or.

        Of the pair that the lane holds; in matrices, of the row that it addresses in 16 rows of two eights.
        """
        row, column = (lane % 16, lane // 16 * 16) if self.in_matrices else (lane // 4, self._lane_bytes(lane))
        swizzle = ((row % 8 * self.panel) // 128) * 16
        return row * self.panel, column ^ swizzle

    def _lane_bytes(self, lane: Int32) -> Int32:
        return (lane % 4) * (self.item.registers * self.element)

    def pair_offset(self, lane_offset: tuple[Int32, Int32], block: int, half: int) -> tuple[int, Int32]:
        """Panel, and byte offset in it, for the lane in 8-column block `block`, row half 0 or 1."""
        column = int(8 * block * self.item.width) * self.element
        panel, within = divmod(column, self.panel)
        row, lane_column = lane_offset
        return panel, row + (lane_column ^ within) + half * 8 * self.panel


def matrix(tensor: cute.Tensor, folding: Folding) -> cute.Tensor:
    """A tensor of any number of dimensions as the matrix that it holds: the layout changes, the memory does not."""
    rows = 1 + len(folding.rows)

    def mode(extents: tuple) -> Any:
        # the innermost dimension first: a layout's coordinates are colexicographic
        return extents[0] if len(extents) == 1 else tuple(reversed(extents))

    shape, stride = tuple(tensor.shape), tuple(tensor.stride)
    layout = cute.make_layout(
        (mode(shape[:rows]), mode(shape[rows:])), stride=(mode(stride[:rows]), mode(stride[rows:]))
    )
    return cute.make_tensor(tensor.iterator, layout)


class GemmKernel:
    """A GEMM with one epilogue and one configuration.  `__call__` is the host function to compile."""

    def __init__(
        self,
        body: Any,
        config: Config,
        operand: Operand,
        input_foldings: tuple[Folding, ...],
        output_foldings: tuple[Folding, ...],
        overlap: bool,
        precise: bool,
    ) -> None:
        self.body = body
        self.overlap = overlap
        self.precise = precise
        self.config = config
        self.dtype = CUTE_DTYPES[operand.dtype]
        self.a_major, self.b_major = operand.a_major, operand.b_major
        self.a_folding, self.b_folding = operand.a_folding, operand.b_folding
        self.load_foldings = [f for f, i in zip(input_foldings, body.INPUTS, strict=True) if i.kind == "tile"]
        self.store_foldings = list(output_foldings)
        self.tile_m, self.tile_n = config.tile
        self.a_rows = config.a_rows or self.tile_m
        self.teams = 2 if config.ping_pong else 1
        self.team_warps = CONSUMER_WARPS // self.teams
        self.team_groups = 2 // self.teams
        self.row_blocks = self.tile_m // (64 * self.team_groups)  # 64-row blocks per warpgroup
        self.subtiles = self.tile_n // config.subtile
        tiles = [*(i for i in body.INPUTS if i.kind == "tile"), *body.TILES]
        by_matrices = self.row_blocks * self.tile_n // 2 <= MATRIX_ACCUMULATORS and all(t.width == 1 for t in tiles)
        self.loads = [Slab(i, config.subtile, config.load_stages, by_matrices) for i in body.INPUTS if i.kind == "tile"]
        self.stores = [Slab(t, config.subtile, config.store_stages, by_matrices) for t in body.TILES]
        self.rows = [i for i in body.INPUTS if i.kind == "row"]
        self.cols = [i for i in body.INPUTS if i.kind == "col"]
        self.scratch = [p for p in body.PARTIALS if p.crosses_warps]
        self.has_team_sync = bool(self.rows or self.scratch)

    # ---------------------------------------------------------------- host

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        inputs: tuple,
        outputs: tuple,
        schedule: tuple,
        stream: Any,
    ) -> None:
        """Launch.  a [M, K], b [N, K], or folded; inputs and outputs in the order of the body's declarations.

        schedule: how many clusters run at a time; where the last wave is balanced, then the numbers of a `Balance`.
        Where K is split, or the last wave balanced, a workspace and counters end the outputs; see `gather`.
        """
        config = self.config
        a, b = matrix(a, self.a_folding), matrix(b, self.b_folding)
        tiled_mma = self._tiled_mma()
        layout_a = self._operand_layout(self.a_major, self.tile_m)
        layout_b = self._operand_layout(self.b_major, self.tile_n)
        loaded_a = self._operand_layout(self.a_major, self.a_rows)
        atom_a, tma_a = self._operand_tma(a, loaded_a, self.a_rows, config.cluster[1])
        atom_b, tma_b = self._operand_tma(b, layout_b, self.tile_n, config.cluster[0])

        tile_inputs = [t for t, i in zip(inputs, self.body.INPUTS, strict=True) if i.kind == "tile"]
        loads = tuple(
            self._slab_tma(cpasync.CopyBulkTensorTileG2SOp(), matrix(t, f), s)
            for t, f, s in zip(tile_inputs, self.load_foldings, self.loads, strict=True)
        )
        stores = tuple(
            self._slab_tma(cpasync.CopyBulkTensorTileS2GOp(), matrix(t, f), s)
            for t, f, s in zip(outputs[: len(self.stores)], self.store_foldings, self.stores, strict=True)
        )
        vectors = tuple(t for t, i in zip(inputs, self.body.INPUTS, strict=True) if i.kind != "tile")
        partials = tuple(outputs[len(self.stores) :])
        shares = ()
        if cutlass.const_expr(config.gathers):
            partials, shares = partials[:-2], partials[-2:]

        m, n = Int32(cute.size(a, mode=[0])), Int32(cute.size(b, mode=[0]))
        clusters_m, clusters_n = self.cluster_grid(m, n)
        clusters, *numbers = schedule
        if cutlass.const_expr(not config.balanced):
            clusters = cutlass.min(clusters, clusters_m * clusters_n * config.split)
        self.kernel(
            tiled_mma,
            atom_a,
            tma_a,
            atom_b,
            tma_b,
            layout_a,
            layout_b,
            tuple(atom for atom, _ in loads),
            tuple(tensor for _, tensor in loads),
            tuple(atom for atom, _ in stores),
            tuple(tensor for _, tensor in stores),
            vectors,
            partials,
            shares,
            tuple(numbers),
            m,
            n,
        ).launch(
            grid=(config.cluster[0], config.cluster[1], clusters),
            block=(THREADS, 1, 1),
            cluster=(config.cluster[0], config.cluster[1], 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.overlap,
        )

    def _tiled_mma(self) -> cute.TiledMma:
        majors = {"k": warpgroup.OperandMajorMode.K, "mn": warpgroup.OperandMajorMode.MN}
        op = warpgroup.MmaF16BF16Op(
            self.dtype,
            Float32,
            (64, self.tile_n, 16),
            warpgroup.OperandSource.SMEM,
            majors[self.a_major],
            majors[self.b_major],
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op), (self.team_groups, 1, 1))

    def _operand_layout(self, major: str, extent: int) -> cute.ComposedLayout:
        """Shared memory of an operand: (extent, K_TILE, stages), in 128-byte swizzled rows of its major axis."""
        kinds = warpgroup.SmemLayoutAtomKind
        if major == "k":
            kind, order = kinds.K_SW128, (0, 1, 2)
        else:
            kind = kinds.MN_SW128 if extent % 64 == 0 else kinds.MN_SW64
            order = (1, 0, 2)
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, (extent, K_TILE, self.config.stages), order)

    def _operand_tma(
        self, tensor: cute.Tensor, layout: cute.ComposedLayout, extent: int, sharers: int
    ) -> tuple[cute.CopyAtom, cute.Tensor]:
        op = cpasync.CopyBulkTensorTileG2SOp() if sharers == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        atom, tma_tensor = cpasync.make_tiled_tma_atom(
            op, tensor, cute.slice_(layout, (None, None, 0)), (extent, K_TILE), num_multicast=sharers
        )
        return atom, tma_tensor

    def _slab_tma(self, op: Any, tensor: cute.Tensor, slab: Slab) -> tuple[cute.CopyAtom, cute.Tensor]:
        atom, tma_tensor = cpasync.make_tiled_tma_atom(
            op, tensor, cute.slice_(slab.layout(), (None, None, 0)), (SLAB_ROWS, slab.panel_columns)
        )
        return atom, tma_tensor

    def _shared_storage(self, layout_a: Any, layout_b: Any) -> Any:
        config = self.config
        load_bytes = sum(s.elements * s.element for s in self.loads)
        store_bytes = sum(s.elements * s.element for s in self.stores)

        @cute.struct
        class SharedStorage:
            ring: cute.struct.MemRange[Int64, 2 * config.stages]
            load_barriers: cute.struct.MemRange[Int64, max(1, CONSUMER_WARPS * config.load_stages)]
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_a)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_b)], 1024]
            loads: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, max(16, load_bytes)], 1024]
            stores: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, max(16, store_bytes)], 1024]
            rows: cute.struct.Align[cute.struct.MemRange[Float32, max(4, self._row_floats())], 16]
            scratch: cute.struct.Align[cute.struct.MemRange[Float32, max(4, self._scratch_floats())], 16]
            flags: cute.struct.Align[cute.struct.MemRange[Int32, 4], 16]

        return SharedStorage

    def _row_floats(self) -> int:
        """Staged row vectors: twice (a fast warp may stage the next tile's), once per team."""
        return 2 * self.teams * sum(int(self.tile_n * r.width) for r in self.rows)

    def _scratch_floats(self) -> int:
        """What warps leave for their team's reductions over rows, in words."""
        return sum(self.scratch_floats(p) for p in self.scratch)

    def scratch_floats(self, partial: Partial) -> int:
        """Words of one partial's scratch: a row, or one number, per warp and carried value."""
        return CONSUMER_WARPS * len(partial.fold.initial) * self.scratch_width(partial)

    def scratch_width(self, partial: Partial) -> int:
        """Columns of one partial's scratch."""
        return int(self.tile_n * partial.width) if partial.kind == "row" else 1

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        atom_a: cute.CopyAtom,
        tma_a: cute.Tensor,
        atom_b: cute.CopyAtom,
        tma_b: cute.Tensor,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
        load_atoms: tuple,
        load_tensors: tuple,
        store_atoms: tuple,
        store_tensors: tuple,
        vectors: tuple,
        partials: tuple,
        shares: tuple,
        numbers: tuple,
        m: Int32,
        n: Int32,
    ) -> None:
        """The device function; see the module's docstring for the roles."""
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (atom_a, atom_b, *load_atoms, *store_atoms):
                cpasync.prefetch_descriptor(atom)

        cluster_m, cluster_n = config.cluster
        cta_layout = cute.make_layout((cluster_m, cluster_n, 1))
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cta = cta_layout.get_flat_coord(rank)

        storage = SmemAllocator().allocate(self._shared_storage(layout_a, layout_b))
        s_a = storage.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        s_b = storage.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        sharers = cluster_m + cluster_n - 1
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.ring.data_ptr(),
            num_stages=config.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, sharers * self.team_warps),
            tx_count=(self.a_rows + self.tile_n) * K_TILE * 2,
            cta_layout_vmnk=cute.make_layout((1, cluster_m, cluster_n, 1)),
            defer_sync=True,
        )
        load_barriers = storage.load_barriers.data_ptr()
        if cutlass.const_expr(len(self.loads) > 0):
            if warp == 0:
                with cute.arch.elect_one():
                    for i in cutlass.range_constexpr(CONSUMER_WARPS * config.load_stages):
                        cute.arch.mbarrier_init(load_barriers + i, 1)
        if cutlass.const_expr(self.a_rows < self.tile_m):
            self.clear_rows(storage.a.data_ptr().toint())
        pipeline.pipeline_init_arrive(cluster_shape_mn=config.cluster, is_relaxed=True)

        # (tile rows or columns, K_TILE, tiles, K tiles)
        g_a = cute.local_tile(tma_a, (self.a_rows, K_TILE), (None, None))
        g_b = cute.local_tile(tma_b, (self.tile_n, K_TILE), (None, None))
        k_tiles = cute.ceil_div(cute.size(g_a, mode=[3]), config.split)  # of one part; beyond K there are zeros
        pipeline.pipeline_init_wait(cluster_shape_mn=config.cluster)
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()

        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        if group == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.produce(atom_a, atom_b, g_a, g_b, s_a, s_b, ring, cta, k_tiles, numbers, m, n)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(
                tiled_mma,
                s_a,
                s_b,
                ring,
                storage,
                load_atoms,
                load_tensors,
                store_atoms,
                store_tensors,
                vectors,
                partials,
                shares,
                cta,
                k_tiles,
                numbers,
                m,
                n,
            )

    @cute.jit
    def clear_rows(self, ring_a: Int32) -> None:
        """Zeros in the rows of every stage of A that nothing is loaded into."""
        thread, words = cute.arch.thread_idx()[0], (self.tile_m - self.a_rows) * (K_TILE * 2 // 16)
        zeros = (Int32(0),) * 4
        for stage in cutlass.range_constexpr(self.config.stages):
            first = ring_a + (stage * self.tile_m + self.a_rows) * (K_TILE * 2)
            for i in cutlass.range_constexpr(-(-words // THREADS)):
                word = i * THREADS + thread
                store_shared_if(word < words, Int32, first + word * 16, zeros)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def tile_of(self, index: Int32, clusters_m: Int32, clusters_n: Int32, cta: Any) -> tuple[Int32, Int32]:
        """This CTA's tile (along M, along N) of the index-th cluster.

        Clusters are taken in bands of `raster` along N, row by row, so that a wave covers a near-square patch of the
        output and the panels of A and B that it reads stay in L2.
        """
        raster = self.config.raster
        band = index // (clusters_m * raster)
        within = index - band * (clusters_m * raster)
        width = cutlass.min(raster, clusters_n - band * raster)
        row = within // width
        column = band * raster + within - row * width
        return row * self.config.cluster[0] + cta[0], column * self.config.cluster[1] + cta[1]

    @cute.jit
    def cluster_grid(self, m: Int32, n: Int32) -> tuple[Int32, Int32]:
        """Clusters along M and N."""
        return (
            cute.ceil_div(cute.ceil_div(m, self.tile_m), self.config.cluster[0]),
            cute.ceil_div(cute.ceil_div(n, self.tile_n), self.config.cluster[1]),
        )

    def items(self, k_tiles: Int32, numbers: tuple, m: Int32, n: Int32) -> tuple[Int32, Any, Any]:
        """What this CTA multiplies, as `balance.walk` has it."""
        clusters_m, clusters_n = self.cluster_grid(m, n)
        cluster, clusters, split = cute.arch.block_idx()[2], cute.arch.grid_dim()[2], self.config.split
        if self.config.balanced:
            return walk(cluster, clusters, clusters_m * clusters_n, k_tiles, numbers, choose_whole)

        def item(visit: Int32) -> Item:
            index = cluster + visit * clusters
            return Item(True, index // split, index % split * k_tiles, k_tiles, visit * k_tiles)

        return (clusters_m * clusters_n * split - cluster + clusters - 1) // clusters, item, None

    @cute.jit
    def produce(
        self,
        atom_a: cute.CopyAtom,
        atom_b: cute.CopyAtom,
        g_a: cute.Tensor,
        g_b: cute.Tensor,
        s_a: cute.Tensor,
        s_b: cute.Tensor,
        ring: Any,
        cta: Any,
        k_tiles: Int32,
        numbers: tuple,
        m: Int32,
        n: Int32,
    ) -> None:
        """Fill the ring with the A and B tiles of every tile of this CTA, in the consumers' order."""
        cluster_m, cluster_n = self.config.cluster
        cta_layout = cute.make_layout((cluster_m, cluster_n, 1))
        mask_a = cute.make_layout_image_mask(cta_layout, cta, mode=1) if cluster_n > 1 else 0
        mask_b = cute.make_layout_image_mask(cta_layout, cta, mode=0) if cluster_m > 1 else 0
        if cutlass.const_expr(self.a_rows < self.tile_m):
            s_a = cute.local_tile(s_a, (self.a_rows, K_TILE), (0, 0, None))
        to_a, from_a = cpasync.tma_partition(
            atom_a, cta[1], cute.make_layout(cluster_n), cute.group_modes(s_a, 0, 2), cute.group_modes(g_a, 0, 2)
        )
        to_b, from_b = cpasync.tma_partition(
            atom_b, cta[0], cute.make_layout(cluster_m), cute.group_modes(s_b, 0, 2), cute.group_modes(g_b, 0, 2)
        )
        clusters_m, clusters_n = self.cluster_grid(m, n)
        items, item_of, _ = self.items(k_tiles, numbers, m, n)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.stages)
        visit = Int32(0)
        while visit < items:
            item = item_of(visit)
            tile_m, tile_n = self.tile_of(item.tile, clusters_m, clusters_n, cta)
            for k in cutlass.range(item.first, item.first + item.steps, unroll=1):
                ring.producer_acquire(state)
                barrier = ring.producer_get_barrier(state)
                cute.copy(
                    atom_a,
                    from_a[(None, tile_m, k)],
                    to_a[(None, state.index)],
                    tma_bar_ptr=barrier,
                    mcast_mask=mask_a,
                )
                cute.copy(
                    atom_b,
                    from_b[(None, tile_n, k)],
                    to_b[(None, state.index)],
                    tma_bar_ptr=barrier,
                    mcast_mask=mask_b,
                )
                state.advance()
            visit += 1
        ring.producer_tail(state)

    @cute.jit
    def consume(
        self,
        tiled_mma: cute.TiledMma,
        s_a: cute.Tensor,
        s_b: cute.Tensor,
        ring: Any,
        storage: Any,
        load_atoms: tuple,
        load_tensors: tuple,
        store_atoms: tuple,
        store_tensors: tuple,
        vectors: tuple,
        partials: tuple,
        shares: tuple,
        cta: Any,
        k_tiles: Int32,
        numbers: tuple,
        m: Int32,
        n: Int32,
    ) -> None:
        """Mainloop and epilogue of every tile of this warp's team."""
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
        group = warp // 4
        team = group if cutlass.const_expr(config.ping_pong) else Int32(0)
        member = 0 if cutlass.const_expr(config.ping_pong) else group  # warpgroup within the team
        thread_mma = tiled_mma.get_slice(member * 128)
        frag_a = tiled_mma.make_fragment_A(thread_mma.partition_A(s_a))
        frag_b = tiled_mma.make_fragment_B(thread_mma.partition_B(s_b))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C(config.tile), Float32)
        # two atoms: the first wgmma of a tile overwrites the accumulator, the others add to it.  Zeroing it instead
        # puts register writes between wgmmas in flight, for which the assembler would wait.
        first_mma = self._tiled_mma()
        first_mma.set(warpgroup.Field.ACCUMULATE, False)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        mmas, operands = (first_mma, tiled_mma), (acc, frag_a, frag_b)

        # bound methods: the DSL would take an object whose methods the loop calls for a value that the loop changes
        request, begin, finish = epilogue_of(
            self, storage, warp, team, member, load_atoms, load_tensors, store_atoms, store_tensors, vectors, m, n
        )
        clusters_m, clusters_n = self.cluster_grid(m, n)
        items, item_of, part_of = self.items(k_tiles, numbers, m, n)
        flags, thread = storage.flags.data_ptr().toint(), cute.arch.thread_idx()[0] % (self.team_warps * 32)
        if cutlass.const_expr(config.ping_pong):
            if team == 1:  # the first team starts
                cute.arch.barrier_arrive(barrier_id=TURN_BARRIER, number_of_threads=256)
        visit, finished = Int32(team), Int32(0)
        while visit < items:
            item = item_of(visit)
            tile_m, tile_n = self.tile_of(item.tile, clusters_m, clusters_n, cta)
            if cutlass.const_expr(config.split > 1):
                self.mainloop(mmas, operands, ring, item.passed, item.steps, team)
                index = cute.arch.block_idx()[2] + visit * cute.arch.grid_dim()[2]
                tile, part = self.tile_in_workspace(item.tile, cta), index % config.split
                if gather(self, acc, shares, flags, tile, part, config.split, config.split, team, thread):
                    request(tile_m, tile_n)
                    staged = begin(tile_m, tile_n)
                    finish(acc, staged, tile_m, tile_n, finished, partials)
                    finished += 1
            elif cutlass.const_expr(config.balanced):
                is_done = Boolean(item.is_whole)
                if is_done:
                    request(tile_m, tile_n)
                staged = begin(tile_m, tile_n)
                self.mainloop(mmas, operands, ring, item.passed, item.steps, team)
                if not_(item.is_whole):
                    part = part_of(visit)
                    tile = self.tile_in_workspace(part.tile, cta)
                    is_done = gather(
                        self, acc, shares, flags, tile, part.place, part.parts, slots(numbers[1]), team, thread
                    )
                    if is_done:
                        request(tile_m, tile_n)
                if is_done:
                    finish(acc, staged, tile_m, tile_n, finished, partials)
                    finished += 1
            else:
                request(tile_m, tile_n)
                staged = begin(tile_m, tile_n)
                self.mainloop(mmas, operands, ring, item.passed, item.steps, team)
                finish(acc, staged, tile_m, tile_n, finished, partials)
                finished += 1
            visit += self.teams
        if cutlass.const_expr(len(self.stores) > 0):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def tile_in_workspace(self, tile: Int32, cta: Any) -> Int32:
        """Index of this CTA's tile among the tiles of clusters that meet in the workspace."""
        cluster_m, cluster_n = self.config.cluster
        return tile * (cluster_m * cluster_n) + cta[1] * cluster_m + cta[0]

    @cute.jit
    def mainloop(self, mmas: tuple, operands: tuple, ring: Any, passed: Int32, k_tiles: Int32, team: Int32) -> None:
        """acc = A @ B^T over all of K, of a precise epilogue in runs of it that are added in f32; `operands` are acc, A
        and B as wgmma takes them."""
        if cutlass.const_expr(self.config.ping_pong):
            self.await_turn(team)
        if cutlass.const_expr(self.precise):
            acc = operands[0]
            first = cutlass.min(k_tiles, PRECISE_STEPS)
            self.accumulate(mmas, operands, ring, passed, first, None)
            total = cute.make_rmem_tensor_like(acc)
            total.store(acc.load())
            done = first
            while done < k_tiles:
                steps = cutlass.min(k_tiles - done, PRECISE_STEPS)
                self.accumulate(mmas, operands, ring, passed + done, steps, None)
                total.store(total.load() + acc.load())
                done += steps
            acc.store(total.load())
            if cutlass.const_expr(self.config.ping_pong):
                self.pass_turn(team)
        else:
            self.accumulate(mmas, operands, ring, passed, k_tiles, team)

    @cute.jit
    def accumulate(
        self, mmas: tuple, operands: tuple, ring: Any, passed: Int32, k_tiles: Int32, turn: Int32 | None
    ) -> None:
        """acc = A @ B^T over some steps of K.  One wgmma group stays in flight; the stage before it is released.

        `turn`: this team, where the other's turn is next as soon as the last wgmma is issued.
        """
        first_mma, next_mma = mmas
        stages = self.config.stages
        slot, phase = passed % stages, (passed // stages) % 2
        read = pipeline.PipelineState(stages, Int32(0), slot, phase)
        release = pipeline.PipelineState(stages, Int32(0), slot, phase)
        ring.consumer_wait(read)
        self.multiply((first_mma, next_mma), operands, read.index)
        read.advance()
        for _ in cutlass.range(1, k_tiles, unroll=1):
            ring.consumer_wait(read)
            self.multiply((next_mma, next_mma), operands, read.index)
            warpgroup.wait_group(1)
            ring.consumer_release(release)
            read.advance()
            release.advance()
        if cutlass.const_expr(self.config.ping_pong and turn is not None):
            self.pass_turn(turn)
        warpgroup.wait_group(0)
        ring.consumer_release(release)

    @cute.jit
    def multiply(self, mmas: tuple, operands: tuple, slot: Int32) -> None:
        """Issue and commit the wgmmas of one stage: the first of 16 columns of K by mmas[0], the others by mmas[1]."""
        acc, frag_a, frag_b = operands
        # right before the first wgmma: elsewhere the assembler adds its own, and may serialize the loop for it
        warpgroup.fence()
        for k in cutlass.range_constexpr(K_TILE // 16):
            cute.gemm(mmas[min(k, 1)], acc, frag_a[(None, None, k, slot)], frag_b[(None, None, k, slot)], acc)
        warpgroup.commit_group()

    def await_turn(self, team: Int32) -> None:
        """Wait until the other team has issued its mainloop."""
        cute.arch.barrier(barrier_id=TURN_BARRIER + team, number_of_threads=256)

    def pass_turn(self, team: Int32) -> None:
        """Let the other team's mainloop start."""
        # no branch on the team here: where wgmmas are in flight, the assembler would wait for them before it
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - team, number_of_threads=256)

    def sync_team(self, team: Int32) -> None:
        """A barrier among the warps of one team."""
        cute.arch.barrier(barrier_id=TEAM_BARRIER + team, number_of_threads=self.team_warps * 32)
