"""Choosing a GEMM configuration: a heuristic from shapes, dtypes and what the epilogue moves.  No tuning.

Shared memory is the budget: the A/B ring wants enough stages of (tile_m + tile_n) * 128 bytes to cover the latency of
memory, tile inputs and outputs want slabs beside it.  Among the tilings that fit, `choose` takes the one whose
estimated time is least:

    waves * (cycles of a tile's mainloop + cycles of its epilogue that nothing hides)

Wave quantization and the exposed epilogue decide nearly everything (measured with benchmarks/search_config.py on an
H200): a cooperative tile of 128x256 is best where K is long, ping-pong tiles of 192x128 where the epilogue is a
visible part of the tile's time, smaller tiles where there are too few large ones to fill the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from fractions import Fraction

import attrs

from codalang.errors import CodaUnsupportedError
from codalang.ir.epilogue import Epilogue, Reduce, State
from codalang.ir.types import Kind
from codalang.lower.blocks import takes_whole_tiles, waiting
from codalang.lower.codegen import unit
from codalang.lower.spec import DTYPE_BYTES, SLAB_ROWS, Config, KernelSpec, foldings_fit, folds, relative_width

SMEM_CAPACITY = 232_448  # bytes of shared memory that one CTA of SM90 can have
SMEM_RESERVE = 4 * 1024  # barriers, and the alignment of each buffer to 1024 bytes
MAX_STAGES = 8
CONSUMER_WARPS = 8
SMS = 132  # of an H100 or H200 SXM
CONSUMER_REGISTERS = 244  # estimated, per thread of a consumer warpgroup: above it kernels were seen to spill
MOST_REGISTERS = 512  # estimated: where all tilings spill, more than that is not tried
TEMPORARY_REGISTERS = 20
EXTRA_TEMPORARIES = {"tanh": 8, "exp": 8}  # of ops, in the epilogue or in what a state folds by
MULTIPLIES_PER_CYCLE = 2048  # of one SM: dense bf16 or f16 wgmma


@attrs.frozen
class Tiling:
    """A candidate tile, cluster and schedule.

    Attributes:
        least_stages: A/B stages that keep the tensor cores fed.
        efficiency: fraction of the tensor cores' peak that its mainloop reaches: small tiles wait for L2.
    """

    tile: tuple[int, int]
    cluster: tuple[int, int]
    ping_pong: bool
    least_stages: int
    efficiency: float


TILINGS = (
    Tiling((128, 256), (2, 1), False, 3, 1.0),
    Tiling((256, 128), (1, 2), False, 3, 1.0),
    Tiling((192, 128), (1, 2), True, 4, 0.995),
    Tiling((128, 192), (2, 1), True, 4, 0.99),
    Tiling((128, 128), (2, 1), True, 4, 0.92),
    Tiling((128, 128), (1, 1), False, 4, 0.85),
    Tiling((64, 128), (1, 1), True, 4, 0.6),
    Tiling((64, 64), (1, 1), True, 4, 0.4),
)

# Estimated cycles of a cooperative 128x256 tile's epilogue per byte and accumulator column, and per op.
CYCLES_PER_STORED_BYTE = 400.0
CYCLES_PER_LOADED_BYTE = 800.0
CYCLES_PER_OP = 60.0
TILE_START_CYCLES = 800.0  # from the last wgmma of a tile to the first of the next
HIDDEN = 0.9  # part of an epilogue that ping-pong hides under the other team's mainloop


def choose(spec: KernelSpec, m: int, n: int, k: int) -> Config:
    """The configuration for an accumulator of m rows and n columns over k; `spec.config` is ignored.

    Raises CodaUnsupportedError where the epilogue's slabs fit in no tiling.
    """
    fitting = [(tiling, config) for tiling in TILINGS for config in _configurations(spec, tiling)]
    if not fitting:  # then one that spills, of which the user is told, rather than none
        spilling = [c for tiling in TILINGS for c in _configurations(spec, tiling, most_registers=MOST_REGISTERS)]
        if not spilling:
            raise _too_large(spec.epilogue)
        return min(spilling, key=lambda config: registers(spec, config))
    return min(fitting, key=lambda pair: _cycles(spec, pair[0], pair[1], m, n, k))[1]


def _too_large(epilogue: Epilogue) -> CodaUnsupportedError:
    """Why no configuration fits: its groups are evaluated whole, or it moves too much at once."""
    columns = unit(epilogue)
    if columns > SLABS[0][0]:
        return CodaUnsupportedError(
            f"`{epilogue.name}` combines groups of {columns} columns, which a thread block must hold at once with all "
            "tiles that it loads and stores; that is more than the registers and shared memory of one SM",
            epilogue.loc,
            hint="groups of up to 128 columns leave room for two or three tiles; reduce over wider ones with `reduce`",
        )
    return CodaUnsupportedError(
        f"`{epilogue.name}` loads and stores too many tiles at once for the shared memory of one SM",
        epilogue.loc,
        hint="store fewer tiles, or narrower ones, per epilogue",
    )


def _cycles(spec: KernelSpec, tiling: Tiling, config: Config, m: int, n: int, k: int) -> float:
    """Estimated cycles of the whole GEMM."""
    area = tiling.tile[0] * tiling.tile[1]
    mainloop = area * max(k, 64) / (MULTIPLIES_PER_CYCLE * tiling.efficiency)
    mainloop /= min(1.0, config.stages / tiling.least_stages)
    epilogue = _epilogue_cycles(spec) * area / (128 * 256)
    # two teams share the SM: a tile costs what the tensor cores or, if longer, one of two epilogues takes
    exposed = max((1 - HIDDEN) * epilogue, epilogue / 2 - mainloop) if tiling.ping_pong else epilogue
    clusters = -(-m // (tiling.tile[0] * tiling.cluster[0])) * -(-n // (tiling.tile[1] * tiling.cluster[1]))
    waves = -(-clusters // (SMS // (tiling.cluster[0] * tiling.cluster[1])))
    start = TILE_START_CYCLES * (0.25 if tiling.ping_pong else 1.0)
    return waves * (mainloop + exposed + start)


@functools.lru_cache(maxsize=1024)
def _epilogue_cycles(spec: KernelSpec) -> float:
    """Cycles of the epilogue of a 128x256 tile, were nothing else running."""
    loads, stores = _slab_widths(spec)
    return (
        CYCLES_PER_LOADED_BYTE * float(sum(loads))
        + CYCLES_PER_STORED_BYTE * float(sum(stores))
        + CYCLES_PER_OP * len(spec.epilogue.nodes)
    )


# Sub-tile columns, load stages and store stages, best first: a deeper ring is worth more than deeper slabs.
SLABS = ((32, 2, 2), (32, 2, 1), (32, 1, 1), (16, 2, 2), (16, 1, 1))


@functools.lru_cache(maxsize=4096)  # a new shape asks again
def _configurations(spec: KernelSpec, tiling: Tiling, most_registers: int = CONSUMER_REGISTERS) -> tuple[Config, ...]:
    """The best division of shared memory for a tiling, if any: stages of the ring come first, then slabs."""
    return tuple(_divisions(spec, tiling, most_registers))


def _divisions(spec: KernelSpec, tiling: Tiling, most_registers: int) -> Iterator[Config]:
    has_loads = any(p.type.kind is Kind.TILE for p, _ in spec.inputs)
    has_stores = bool(spec.stores)
    narrow = unit(spec.epilogue)
    if not foldings_fit(spec, tiling.tile, tiling.cluster):
        return
    for subtile, loads, stores in SLABS:
        subtile = max(subtile, narrow)
        if tiling.tile[1] % subtile:
            continue
        loads, stores = loads * has_loads, stores * has_stores
        config = _in_step(Config(tiling.tile, tiling.cluster, tiling.ping_pong, 0, subtile, loads, stores))
        left = SMEM_CAPACITY - shared_bytes(spec, config)
        stages = min(MAX_STAGES, left // ring_stage_bytes(tiling.tile))
        if registers(spec, config) > most_registers:
            continue
        is_last = (subtile, loads, stores) == (max(16, narrow), has_loads, has_stores)
        if stages >= tiling.least_stages or (stages >= 2 and is_last):
            yield attrs.evolve(config, stages=stages)
            return


def _in_step(config: Config) -> Config:
    """The same with the most slabs, no more than there are, that divide a tile's steps; see `Config.is_in_step`."""

    def most(stages: int) -> int:
        return max((s for s in range(1, stages + 1) if config.steps % s == 0), default=0)

    return attrs.evolve(config, load_stages=most(config.load_stages), store_stages=most(config.store_stages))


def hosted_rows(epilogue: Epilogue) -> int:
    """Rows of a hosted kernel's tile: more where each tile leaves a partial of its columns, as long as what a thread
    carries leaves registers for it."""
    kinds = [None if isinstance(group[0], State) else group[0].type.kind for group in folds(epilogue)]
    small = None not in kinds and Kind.ROWS not in kinds
    return 128 if small and {Kind.ROW, Kind.SCALAR}.intersection(kinds) else 64


def hosted_run(aligned: bool) -> int:
    """Adjacent accumulator columns of one lane of a hosted kernel; a tile of it has 32 times as many."""
    return 8 if aligned else 2


def shared_bytes(spec: KernelSpec, config: Config) -> int:
    """Shared memory of a GEMM kernel, bytes: ring, slabs, staged rows, scratch of reductions over rows, reserve."""
    loads, stores = _slab_widths(spec)
    slabs = config.load_stages * sum(loads) + config.store_stages * sum(stores)
    teams = 2 if config.ping_pong else 1
    rows = sum(relative_width(spec.epilogue, p) for p, _ in spec.inputs if p.type.kind is Kind.ROW)
    groups = [(g[0], _carried_words(g[0])) for g in folds(spec.epilogue)]
    sums = sum(words * relative_width(spec.epilogue, r) for r, words in groups if r.type.kind is Kind.ROW)
    scalars = sum(words for r, words in groups if r.type.kind is Kind.SCALAR)
    return (
        config.stages * ring_stage_bytes(config.tile)
        + int(slabs * config.subtile * SLAB_ROWS * CONSUMER_WARPS)
        + int(4 * config.tile[1] * (2 * teams * rows + CONSUMER_WARPS * sums))
        + 4 * CONSUMER_WARPS * scalars
        + SMEM_RESERVE
    )


def registers(spec: KernelSpec, config: Config) -> int:
    """Estimated registers of a consumer thread in the epilogue, for a kernel that shall not spill.

    The accumulator; what each reduction carries (a row of the thread's columns per sub-tile, or a number per row that
    it has); cols, a number per row; for rows per sample, the sample of each row, and of each input an address and eight
    columns; the columns of one unit; and some for addresses and temporaries.  The mainloop of a precise epilogue has
    a second accumulator.
    """
    rows = config.tile[0] // (64 if config.ping_pong else 128) * 2
    columns = config.subtile // 4
    accumulator = rows * config.tile[1] // 4
    carried = 0
    for group in folds(spec.epilogue):
        words = _carried_words(group[0])
        width = relative_width(spec.epilogue, group[0])
        carried += words * int(columns * width if group[0].type.kind in (Kind.ROW, Kind.ROWS) else rows)
    cols = rows * sum(p.type.kind is Kind.COL for p, _ in spec.inputs)
    per_sample = [(relative_width(spec.epilogue, p), dtype) for p, dtype in spec.inputs if p.type.kind is Kind.ROWS]
    cols += rows * bool(per_sample)
    cols += sum(2 + int(width * (8 if DTYPE_BYTES[dtype] == 2 else 16)) for width, dtype in per_sample)
    waits = 0 if takes_whole_tiles(spec.epilogue) else len(waiting(spec.epilogue)) * columns * 2
    epilogue = carried + waits + unit(spec.epilogue) // 4 + _temporaries(spec.epilogue)
    mainloop = accumulator * spec.epilogue.precise + TEMPORARY_REGISTERS
    return accumulator + cols + max(epilogue, mainloop)


def _temporaries(epilogue: Epilogue) -> int:
    nodes = [*epilogue.nodes, *(node for state in epilogue.states for node in state.definition.update.nodes)]
    return TEMPORARY_REGISTERS + sum(EXTRA_TEMPORARIES[op] for op in {n.op for n in nodes} & EXTRA_TEMPORARIES.keys())


def _carried_words(output: Reduce | State) -> int:
    return len(output.definition.carried) if isinstance(output, State) else 1


def ring_stage_bytes(tile: tuple[int, int]) -> int:
    """Bytes of one stage of A and B: 64 elements of K, two bytes each."""
    return (tile[0] + tile[1]) * 128


def _slab_widths(spec: KernelSpec) -> tuple[list[Fraction], list[Fraction]]:
    """Bytes per accumulator column of each tile input, and of each tile output."""
    loads = [
        relative_width(spec.epilogue, p) * DTYPE_BYTES[dtype] for p, dtype in spec.inputs if p.type.kind is Kind.TILE
    ]
    stores = [relative_width(spec.epilogue, s) * DTYPE_BYTES[dtype] for s, dtype in spec.stores]
    return loads, stores
