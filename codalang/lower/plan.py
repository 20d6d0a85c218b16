"""Choosing a GEMM configuration: a heuristic from shapes, dtypes and what the epilogue moves.  No tuning.

Shared memory is the budget: the A/B ring wants three stages or more of (tile_m + tile_n) * 128 bytes, tile inputs and
outputs want slabs beside it.  `choose` walks a short list of tilings, best for large problems first, and takes the
first that gives enough tiles to fill the GPU and fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import attrs

from codalang.errors import CodaUnsupportedError
from codalang.ir.types import Kind
from codalang.lower.spec import DTYPE_BYTES, Config, KernelSpec, relative_width

SMEM_CAPACITY = 232_448  # bytes of shared memory that one CTA of SM90 can have
SMEM_RESERVE = 5 * 1024  # barriers, and the alignment of each buffer to 1024 bytes
MAX_STAGES = 8
CONSUMER_WARPS = 8
SLAB_ROWS = 16

# An H200 has 132 SMs; a grid of fewer tiles leaves SMs idle, and smaller tiles serve better.
SMS = 132


@attrs.frozen
class Tiling:
    """A candidate: tile, cluster, ping-pong, and how many A/B stages it needs to keep the tensor cores fed."""

    tile: tuple[int, int]
    cluster: tuple[int, int]
    ping_pong: bool
    least_stages: int


# Largest first: the fewest bytes from L2 per multiplication.
TILINGS = (
    Tiling((128, 256), (2, 1), False, 3),
    Tiling((128, 192), (2, 1), False, 3),
    Tiling((128, 128), (2, 1), True, 4),
    Tiling((128, 128), (1, 1), False, 4),
    Tiling((64, 128), (1, 1), True, 4),
    Tiling((64, 64), (1, 1), True, 4),
)


def choose(spec: KernelSpec, m: int, n: int) -> Config:
    """The configuration for an accumulator of m rows and n columns; `spec.config` is ignored.

    Raises CodaUnsupportedError where the epilogue's slabs fit in no tiling.
    """
    fitting = [(tiling, config) for tiling in TILINGS for config in _configurations(spec, tiling)]
    if not fitting:
        raise CodaUnsupportedError(
            f"`{spec.epilogue.name}` loads and stores too many tiles at once for the shared memory of one SM",
            spec.epilogue.loc,
            hint="store fewer tiles, or narrower ones, per epilogue",
        )
    for tiling, config in fitting:
        if _tiles(tiling, m, n) >= SMS and config.stages >= tiling.least_stages:
            return config
    return fitting[-1][1]


def _tiles(tiling: Tiling, m: int, n: int) -> int:
    return -(-m // tiling.tile[0]) * -(-n // tiling.tile[1])


def _configurations(spec: KernelSpec, tiling: Tiling) -> Iterator[Config]:
    """The best division of shared memory for a tiling, if any: stages of the ring come first, then slabs."""
    widths = _slab_widths(spec)
    loads, stores = widths
    for subtile in (32, 16):
        for slab_stages in (2, 1):
            slabs = slab_stages * subtile * SLAB_ROWS * CONSUMER_WARPS * (sum(loads) + sum(stores))
            left = SMEM_CAPACITY - SMEM_RESERVE - int(slabs) - vector_bytes(spec, tiling)
            stages = min(MAX_STAGES, left // ring_stage_bytes(tiling.tile))
            if stages >= tiling.least_stages or (stages >= 2 and subtile == 16 and slab_stages == 1):
                yield Config(
                    tiling.tile,
                    tiling.cluster,
                    tiling.ping_pong,
                    stages,
                    subtile,
                    slab_stages if loads else 0,
                    slab_stages if stores else 0,
                )
                return


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


def vector_bytes(spec: KernelSpec, tiling: Tiling) -> int:
    """Staged rows (two buffers per team) and the scratch of reductions over rows."""
    teams = 2 if tiling.ping_pong else 1
    rows = sum(relative_width(spec.epilogue, p) for p, _ in spec.inputs if p.type.kind is Kind.ROW)
    sums = sum(relative_width(spec.epilogue, r) for r in spec.epilogue.reductions if r.type.kind is Kind.ROW)
    scalars = sum(r.type.kind is Kind.SCALAR for r in spec.epilogue.reductions)
    return int(4 * tiling.tile[1] * (2 * teams * rows + CONSUMER_WARPS * sums)) + 4 * CONSUMER_WARPS * scalars
