"""A balanced last wave: the tiles that would leave multiprocessors idle are divided along K among all clusters.

Tiles are handed out to persistent clusters, a wave at a time, and the last wave is not full: with 512 clusters of tiles
on 66, 50 are busy in the eighth wave and 16 are not, which is 3% of the time.  Here all waves but that one are as ever,
and the `rest` tiles of the last are cut, in steps of K_TILE (an example: rest 5, clusters 7, one main part):

    main parts   [0, head), [head, 2 head) ..: of one cluster each.  They all start at the same time and go in step, so
                 that those of one row or column of tiles read the same piece of A or B, which comes from L2
    the ends     what is left of each tile, as one line that the other clusters divide in equal shares

       tile     0        1        2        3        4
                0000000| 1111111| 2222222| 3333333| 4444444|      main parts, and who multiplies them
                     55|      55|      56|      66|      66|      ends

A cluster thus has one main part or a share of the ends, and all are done at the same time.  The parts of a tile meet in
a workspace, and the last to arrive adds them in the order of K and runs the epilogue: see `gather`.

The arithmetic is shared: the host decides the numbers, the kernel finds its items from them (`walk`), both as one
function of integers, which are Python's in the tests and registers on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

from codalang.lower import plan
from codalang.lower.spec import K_TILE, Config, KernelSpec

MOST_MAINS = 4  # main parts of a tile
LEAST_STEPS = 8  # of K, in a part
MOST_ENDS = 8  # in a share
PARTS_OF_ENDS = 2  # that one end is cut into at most: a share is longer than an end

# Estimates, cycles, fitted to what six GEMMs take with and without it on an H200 (tests/test_balance.py has them).
PART = 6000.0  # to start a part of a tile, and leave it in the workspace
FIX_UP = 8000.0  # to read and add the others, and the epilogue's inputs, which nothing hides then
LOST = 0.5  # part of the time in which a multiprocessor waits: power that it leaves raises the clock of the others
TILE = (128, 256)  # of which kernels do not spill: others come nearer to the registers that there are
WORTH = 6000.0  # that must be saved: about what the estimate is wrong by


@attrs.frozen
class Balance:
    """The numbers that the kernel is launched with.

    Attributes:
        whole: tiles, of clusters, that are not cut: those of all full waves.
        mains: main parts of each of the others.
        head: steps of K in a main part.
        share: steps of K that each of the other clusters has of the ends, 0 where there are no ends.
    """

    whole: int
    mains: int
    head: int
    share: int


def cluster_tiles(config: Config, m: int, n: int) -> int:
    """Tiles of the grid, as many as a cluster has counted as one."""
    extents = zip((m, n), config.tile, config.cluster, strict=True)
    return math.prod(-(-extent // (tile * cluster)) for extent, tile, cluster in extents)


def steps_of(k: int) -> int:
    """Steps of K_TILE."""
    return max(1, -(-k // K_TILE))


def balance(config: Config, m: int, n: int, k: int, clusters: int) -> Balance:
    """How the tiles are divided among so many clusters.  Where nothing can be cut, all are whole."""
    return divided(cluster_tiles(config, m, n), steps_of(k), clusters, step_cycles(config))


def divided(tiles: int, steps: int, clusters: int, cycles: float) -> Balance:
    """The same of so many tiles of so many steps, each of which takes so many cycles."""
    rest = tiles % clusters
    mains = min(MOST_MAINS, clusters // max(rest, 1), steps // LEAST_STEPS)
    others = clusters - mains * rest
    if rest == 0 or mains == 0:
        return Balance(tiles, 0, steps, 0)
    head = -(-steps // mains)
    if 0 < others < rest <= MOST_ENDS * others:
        # as long as a share, of which there are `others` for rest * (steps - mains * head) steps, and which is of
        # rest / others more parts
        longer = math.ceil((rest * steps + rest * PART / cycles) / clusters)
        if steps - mains * longer >= LEAST_STEPS:
            head = longer
    if head >= steps:
        return Balance(tiles, 0, steps, 0)
    mains = min(mains, -(-steps // head))
    ends = max(0, steps - mains * head)
    return Balance(tiles - rest, mains, head, -(-rest * ends // others) if ends else 0)


def step_cycles(config: Config) -> float:
    """Cycles of one step of a tile."""
    return math.prod(config.tile) * K_TILE / plan.MULTIPLIES_PER_CYCLE


def saved(config: Config, m: int, n: int, k: int) -> float:
    """Estimated cycles that a balanced last wave saves; negative where it costs more than it saves."""
    clusters = plan.SMS // math.prod(config.cluster)
    tiles, steps, cycles = cluster_tiles(config, m, n), steps_of(k), step_cycles(config)
    numbers = divided(tiles, steps, clusters, cycles)
    rest = tiles - numbers.whole
    if rest <= 0:
        return 0.0
    others = clusters - numbers.mains * rest
    shared = numbers.share * cycles + (1 + rest / max(others, 1)) * PART if numbers.share else 0.0
    return LOST * (steps * cycles - max(numbers.head * cycles + PART, shared)) - FIX_UP


def choose(spec: KernelSpec, m: int, n: int, k: int) -> Config:
    """What `plan.choose` chooses, or a configuration with a balanced last wave where that is estimated to be faster.

    Raises CodaUnsupportedError where the epilogue's slabs fit in no tiling.
    """
    usual = plan.choose(spec, m, n, k)
    found = [
        (_cycles(spec, tiling, config, m, n, k) - gain, attrs.evolve(config, balanced=True))
        for tiling in plan.TILINGS
        if tiling.tile == TILE and not tiling.ping_pong
        for config in plan._configurations(spec, tiling)
        if (gain := saved(config, m, n, k)) > WORTH
    ]
    if not found:
        return usual
    schedule = (usual.tile, usual.cluster, usual.ping_pong)
    tiling = next(t for t in plan.TILINGS if (t.tile, t.cluster, t.ping_pong) == schedule)
    least, balanced = min(found, key=lambda pair: pair[0])
    return balanced if least < _cycles(spec, tiling, usual, m, n, k) else usual


def _cycles(spec: KernelSpec, tiling: plan.Tiling, config: Config, m: int, n: int, k: int) -> float:
    """Estimated cycles of the whole GEMM, its last wave as it is: of idle time, only what is lost."""
    waves = cluster_tiles(config, m, n) / (plan.SMS // math.prod(config.cluster))
    idle = 1 - waves / math.ceil(waves)
    return plan._cycles(spec, tiling, config, m, n, k) * (1 - (1 - LOST) * idle)


def workspace(config: Config, m: int, n: int, numbers: Balance) -> tuple[int, int]:
    """f32 words in which the parts of cut tiles meet, and counters of such tiles; at least one of each."""
    tiles = (cluster_tiles(config, m, n) - numbers.whole) * math.prod(config.cluster)
    return max(1, tiles * slots(numbers.mains) * math.prod(config.tile)), max(1, tiles)


def slots(mains: Any) -> Any:
    """Parts of a tile that the workspace has room for."""
    return mains + PARTS_OF_ENDS


# ---------------------------------------------------------------- what a cluster does: on the host and on the device


@attrs.frozen
class Item:
    """Something that a cluster multiplies.

    Attributes:
        is_whole: a whole tile.
        tile: its index.
        first, steps: of K.
        passed: steps of this cluster's items before it.
    """

    is_whole: Any
    tile: Any
    first: Any
    steps: Any
    passed: Any


@attrs.frozen
class Part:
    """Which part of its tile an item is: its place in the order of K, of how many; the tile's index among cut ones."""

    tile: Any
    place: Any
    parts: Any


Choose = Callable[[Any, Any, Any], Any]  # (condition, where it holds, where not)


def walk(
    cluster: Any, clusters: Any, tiles: Any, steps: Any, numbers: tuple[Any, Any, Any, Any], choose: Choose
) -> tuple[Any, Callable[[Any], Item], Callable[[Any], Part]]:
    """The items of a cluster in order: how many; the one of an index; which part the one of an index is."""

    def least(a: Any, b: Any) -> Any:
        return choose(a < b, a, b)

    def most(a: Any, b: Any) -> Any:
        return choose(a < b, b, a)

    whole, mains, head, share = numbers
    rest = tiles - whole
    wholes = (whole - cluster + clusters - 1) // clusters
    # a main part, as a line of its own: `extent` steps of each tile
    part = cluster // most(rest, 1)
    other = cluster - mains * rest
    is_main = other < 0
    length = least(head, steps - part * head)
    end = most(steps - mains * head, 0)
    extent = most(choose(is_main, length, end), 1)
    base = choose(is_main, part * head, mains * head)
    start = choose(is_main, (cluster - part * rest) * length, least(other * share, rest * end))
    stop = choose(is_main, start + length, least((other + 1) * share, rest * end))
    first_tile = start // extent
    items = wholes + choose(start < stop, (stop - 1) // extent - first_tile + 1, 0)

    def item(index: Any) -> Item:
        is_whole = index < wholes
        tile = first_tile + index - wholes
        low, high = most(start, tile * extent), least(stop, (tile + 1) * extent)
        return Item(
            is_whole,
            choose(is_whole, cluster + index * clusters, whole + tile),
            choose(is_whole, 0, base + low - tile * extent),
            choose(is_whole, steps, high - low),
            choose(is_whole, index * steps, wholes * steps + low - start),
        )

    def part_of(index: Any) -> Part:
        tile = first_tile + index - wholes
        cut = tile * end // most(share, 1) != ((tile + 1) * end - 1) // most(share, 1)
        place = choose(is_main, part, mains + choose(tile * extent < start, 1, 0))
        return Part(tile, place, mains + choose(end > 0, choose(cut, 2, 1), 0))

    return items, item, part_of
