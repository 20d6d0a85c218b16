"""Choosing a GEMM configuration where there are few tiles: a short batch (decode, M from 1 to 256), or a small output.

Such a GEMM waits for memory, not for tensor cores: all multiprocessors are needed to read an operand at the speed of
HBM, so tiles are small, or K is split (see `gather`).  Among tilings and splits, the one of least estimated time:

    rounds * (K steps * the slower of tensor cores and L2, + start and epilogue, + what a split costs)

but no less than the time in which HBM gives the operands.  Everything else is `plan.choose`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs

from codalang.lower import plan
from codalang.lower.plan import SMEM_CAPACITY, SMS, Tiling, ring_stage_bytes, shared_bytes
from codalang.lower.spec import K_TILE, Config, KernelSpec

SHORT = 256  # rows, or columns, of an accumulator that is a matter of memory
TILINGS = (
    Tiling((64, 32), (1, 1), True, 4, 1.0),
    Tiling((64, 64), (1, 1), True, 4, 1.0),
    Tiling((64, 128), (1, 1), True, 4, 1.0),
    Tiling((64, 256), (1, 1), True, 3, 1.0),
    Tiling((128, 32), (1, 1), False, 4, 1.0),
    Tiling((128, 64), (1, 1), False, 4, 1.0),
    Tiling((128, 128), (1, 1), False, 4, 1.0),
    Tiling((128, 64), (2, 1), False, 4, 1.0),
    Tiling((128, 128), (2, 1), False, 4, 1.0),
    Tiling((128, 256), (2, 1), False, 3, 1.0),
)
SPLITS = (1, 2, 3, 4, 6, 8)
MOST_STAGES = 16
LEAST_STEPS = 4  # of K, in one part
MOST_WORKSPACE = 2**26  # bytes that the parts of all tiles may take

# Estimates, cycles and bytes per cycle at 1.755 GHz.
HBM_BYTES = 2450.0  # of the whole GPU
L2_BYTES = 48.0  # that one multiprocessor takes from L2
START = 1500.0  # from a tile's first load to its first wgmma
SPLIT_START = 2000.0  # two fences and an atomic
EPILOGUE_START = 1000.0


def choose(spec: KernelSpec, m: int, n: int, k: int) -> Config:
    """The configuration for an accumulator of m rows and n columns over k.

    Raises CodaUnsupportedError where the epilogue's slabs fit in no tiling.
    """
    usual = plan.choose(spec, m, n, k)
    if min(m, n) > SHORT and tiles(usual, m, n) >= SMS:
        return usual
    found = min(candidates(spec, m, n, k), key=lambda c: cycles(spec, c, m, n, k), default=usual)
    return min(found, usual, key=lambda c: cycles(spec, c, m, n, k))


def candidates(spec: KernelSpec, m: int, n: int, k: int) -> Iterator[Config]:
    """Every configuration that is considered."""
    steps = -(-k // K_TILE)
    for tiling in TILINGS:
        for config in plan._configurations(spec, tiling):
            deep = _deepened(spec, config)
            for split in SPLITS:
                parts = attrs.evolve(deep, split=split)
                if split == 1 or (steps >= LEAST_STEPS * split and 4 * workspace(parts, m, n) <= MOST_WORKSPACE):
                    yield parts


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
    """Estimated cycles of the whole GEMM."""
    area, size = math.prod(config.tile), math.prod(config.cluster)
    rows, columns = (min(tile, extent) for tile, extent in zip(config.tile, (m, n), strict=True))
    loaded = (rows / config.cluster[1] + columns / config.cluster[0]) * K_TILE * 2
    step = max(area * K_TILE / plan.MULTIPLIES_PER_CYCLE, loaded / L2_BYTES)
    steps = -(-max(k, 1) // (K_TILE * config.split))
    rounds = -(-tiles(config, m, n) * config.split // (SMS // size * size))
    epilogue = EPILOGUE_START + plan._epilogue_cycles(spec) * area / (128 * 256)
    gathering = SPLIT_START + (config.split + 1) * area * 4 / L2_BYTES if config.split > 1 else 0.0
    critical = rounds * (START + steps * step + gathering) + epilogue
    return max(critical, START + (m + n) * k * 2 / HBM_BYTES + epilogue + gathering)
