"""The configurations that a search tries: `codalang tune`, and the search that the heuristic is written from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import attrs

from codalang.ir.types import Kind
from codalang.lower import balance, plan, split
from codalang.lower.spec import Config, KernelSpec

# (tile, cluster, ping-pong)
SHAPES = (
    ((128, 256), (2, 1), False),
    ((256, 128), (1, 2), False),
    ((128, 192), (2, 1), False),
    ((128, 192), (2, 1), True),
    ((128, 160), (2, 1), True),
    ((128, 128), (2, 1), True),
    ((192, 128), (1, 2), True),
    ((192, 128), (2, 1), True),
    ((256, 128), (2, 1), False),
)
# subtile, load and store stages
SLABS = (
    ((32, 1, 1), (32, 2, 1), (32, 4, 1), (32, 8, 1), (32, 1, 2), (32, 2, 2), (32, 4, 2))
    + ((64, 1, 1), (64, 2, 1), (64, 4, 1), (64, 1, 2), (64, 2, 2))
    + ((16, 2, 2), (16, 4, 2), (16, 8, 2), (16, 4, 4))
)
RASTERS = (8,)
LEAST_STAGES = 3


def large(spec: KernelSpec) -> list[Config]:
    """Every configuration for many tiles that fits in shared memory, with as many stages of the ring as fit."""
    has_loads = any(p.type.kind is Kind.TILE for p, _ in spec.inputs)
    found: dict[Config, None] = {}
    for (tile, cluster, ping_pong), (subtile, loads, stores), raster in itertools.product(SHAPES, SLABS, RASTERS):
        config = Config(tile, cluster, ping_pong, 0, subtile, loads * has_loads, stores, raster)
        if tile[1] % subtile or not config.is_in_step:
            continue
        left = plan.SMEM_CAPACITY - plan.shared_bytes(spec, config)
        stages = min(plan.MAX_STAGES, left // plan.ring_stage_bytes(tile))
        if stages >= LEAST_STAGES:
            found[attrs.evolve(config, stages=stages)] = None
    return list(found)


def all_for(spec: KernelSpec, m: int, n: int, k: int) -> list[Config]:
    """Every configuration worth compiling for these extents, the heuristic's first: none that would likely spill."""
    heuristic = split.choose(spec, m, n, k)
    few_tiles = min(m, n) <= split.SHORT or split.tiles(heuristic, m, n) < plan.SMS
    others: Iterable[Config] = itertools.chain(split.candidates(spec, m, n, k) if few_tiles else (), large(spec))
    kept = [c for c in others if plan.registers(spec, c) <= plan.CONSUMER_REGISTERS]
    kept.insert(0, attrs.evolve(heuristic, balanced=False))
    saving = (c for c in kept if c.tile == balance.TILE and not c.ping_pong and c.split == 1)
    balanced = [attrs.evolve(c, balanced=True) for c in saving if balance.saved(c, m, n, k) > 0]
    return list(dict.fromkeys([heuristic, *kept, *balanced]))


def short(config: Config) -> str:
    """A configuration in a few words."""
    schedule = "pp" if config.ping_pong else "co"
    parts = f" split {config.split}" if config.split > 1 else " balanced" if config.balanced else ""
    return (
        f"{config.tile[0]}x{config.tile[1]} {schedule} cluster {config.cluster} stages {config.stages} "
        f"sub {config.subtile} load {config.load_stages} store {config.store_stages}{parts}"
    )
