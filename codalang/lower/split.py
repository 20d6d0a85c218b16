"""Choosing a GEMM configuration where there are few tiles: a short batch (decode, M from 1 to 256), or a small output.

Such a GEMM waits for memory, not for tensor cores: all multiprocessors are needed to read an operand at the speed of
HBM, so tiles are small, or K is split (see `gather`).  Among tilings and splits, the one of least estimated time:

    rounds * (K steps * the slower of tensor cores and loads, + start, + what a split costs)

and the time in which HBM gives the operands, of which the shorter is hidden by the longer in part.  Everything else is
`plan.choose`'s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import attrs

from codalang.lower import balance, plan
from codalang.lower.plan import SMEM_CAPACITY, SMS, Tiling, ring_stage_bytes, shared_bytes
from codalang.lower.spec import K_TILE, PLAIN, Config, KernelSpec

SHORT = 256  # rows, or columns, of an accumulator that is a matter of memory
TILINGS = (
    Tiling((64, 32), (1, 1), True, 4, 1.0),
    Tiling((64, 48), (1, 1), True, 4, 1.0),
    Tiling((64, 64), (1, 1), True, 4, 1.0),
    Tiling((64, 128), (1, 1), True, 4, 1.0),
    Tiling((64, 256), (1, 1), True, 3, 1.0),
    Tiling((128, 32), (1, 1), False, 4, 1.0),
    Tiling((128, 48), (1, 1), False, 4, 1.0),
    Tiling((128, 64), (1, 1), False, 4, 1.0),
    Tiling((128, 96), (1, 1), False, 4, 1.0),
    Tiling((128, 128), (1, 1), False, 4, 1.0),
    Tiling((128, 64), (2, 1), False, 4, 1.0),
    Tiling((128, 96), (2, 1), False, 4, 1.0),
    Tiling((128, 128), (2, 1), False, 4, 1.0),
    Tiling((128, 224), (2, 1), False, 3, 1.0),
    Tiling((128, 256), (2, 1), False, 3, 1.0),
)
SPLITS = (1, 2, 3, 4, 6, 8)
LEAST_ROW = 32  # elements of a row of the ring, where an operand's rows or columns are contiguous
MOST_STAGES = 16
LEAST_STEPS = 4  # of K, in one part
MOST_WORKSPACE = 2**26  # bytes that the parts of all tiles may take

# Rows of A that TMA loads, where that is fewer than the tile's: in wholes of the ring's swizzle, few so that a batch
# that grows by a row seldom needs a new kernel.
LOADED_ROWS = (16, 32, 96)

# Estimates, fitted to what benchmarks/few_tiles.py measured on an H200 (tests/few_tiles.json): cycles at 1.755 GHz and
# bytes per cycle.
LAUNCH = 12500.0
HBM_BYTES = 2000.0  # of the whole GPU
REREAD = 0.19  # part of B that comes from memory again for a further row of tiles
OUTSIDE = 7.0  # of TMA, for a row of a stage that lies outside of the matrix
LATENCY = 2600.0  # from the request of a stage to its arrival, while all of the GPU loads
START = 3600.0  # of a tile: until its first stages are there
SPLIT_START = 1200.0  # two fences and an atomic
L2_BYTES = 42.0  # of one multiprocessor, to and from the workspace
SHARPNESS = 3.8  # of the maximum of what multiprocessors and what memory takes: infinite were one hidden by the other


def choose(spec: KernelSpec, m: int, n: int, k: int) -> Config:
    """The configuration for an accumulator of m rows and n columns over k.

    Raises CodaUnsupportedError where the epilogue's slabs fit in no tiling.
    """
    usual = balance.choose(spec, m, n, k)
    if min(m, n) > SHORT and tiles(usual, m, n) >= SMS:
        return usual
    found = min(candidates(spec, m, n, k), key=lambda c: cycles(spec, c, m, n, k), default=usual)
    return min(found, usual, key=lambda c: cycles(spec, c, m, n, k))


def candidates(spec: KernelSpec, m: int, n: int, k: int) -> Iterator[Config]:
    """Every configuration that is considered."""
    steps = -(-k // K_TILE)
    for tiling in TILINGS:
        for config in configurations(spec, tiling, m):
            deep = _deepened(spec, config)
            for split in SPLITS:
                parts = attrs.evolve(deep, split=split)
                if split == 1 or (steps >= LEAST_STEPS * split and 4 * workspace(parts, m, n) <= MOST_WORKSPACE):
                    yield parts


def configurations(spec: KernelSpec, tiling: Tiling, m: int) -> Iterator[Config]:
    """The best division of shared memory for a tiling and m rows, if any; K is whole."""
    operand = spec.operand
    if operand is not None and operand.b_major != "k" and tiling.tile[1] % LEAST_ROW:
        return
    for config in plan._configurations(spec, tiling):
        yield attrs.evolve(config, a_rows=_loaded_rows(spec, config, m))


def _loaded_rows(spec: KernelSpec, config: Config, m: int) -> int:
    """The fewest rows of A that hold all that there are, 0 where those are a tile's."""
    operand = spec.operand
    if operand is None or operand.a_major != "k" or operand.a_folding != PLAIN or config.cluster != (1, 1):
        return 0
    return next((rows for rows in LOADED_ROWS if m <= rows < config.tile[0]), 0)


@functools.lru_cache(maxsize=4096)
def _deepened(spec: KernelSpec, config: Config) -> Config:
    """All of shared memory for the ring."""
    stage = ring_stage_bytes(config.tile)
    left = SMEM_CAPACITY - (shared_bytes(spec, config) - config.stages * stage)
    return attrs.evolve(config, stages=min(MOST_STAGES, left // stage))


def tiles(config: Config, m: int, n: int) -> int:
    """Tiles of the grid, those outside that complete a cluster among them."""
    extents = zip((m, n), config.tile, config.cluster, strict=True)
    return math.prod(-(-extent // (tile * cluster)) * cluster for extent, tile, cluster in extents)


def workspace(config: Config, m: int, n: int) -> int:
    """f32 words in which the parts of all tiles meet; none where K is not split."""
    return tiles(config, m, n) * config.split * math.prod(config.tile) if config.split > 1 else 0


def cycles(spec: KernelSpec, config: Config, m: int, n: int, k: int) -> float:
    """Estimated cycles of the whole GEMM.

    A step of K takes what its wgmmas take, or a share of the latency of memory, or what TMA takes for rows outside.
    """
    area, size = math.prod(config.tile), math.prod(config.cluster)
    outside = max(0, (config.a_rows or config.tile[0]) - m)
    step = max(area * K_TILE / plan.MULTIPLIES_PER_CYCLE, LATENCY / config.stages, OUTSIDE * outside)
    steps = -(-max(k, 1) // (K_TILE * config.split))
    rounds = -(-tiles(config, m, n) * config.split // (SMS // size * size))
    gathering = SPLIT_START + (config.split + 1) * area * 4 / L2_BYTES if config.split > 1 else 0.0
    critical = rounds * (START + steps * step + gathering)
    reread = REREAD * (-(-m // (config.tile[0] * config.cluster[0])) - 1)
    memory = (m + n * (1 + reread)) * k * 2 / HBM_BYTES + gathering
    epilogue = plan._epilogue_cycles(spec) * area / (128 * 256)
    return LAUNCH + (critical**SHARPNESS + memory**SHARPNESS) ** (1 / SHARPNESS) + epilogue
