"""A layered layout of a directed graph without cycles: every edge points down.

    1. layers       the longest path from above; a box that nothing points at moves down to just above its first use
    2. order        each layer's boxes by the mean position of their neighbours, swept down and up; the order with the
                    fewest crossings is kept
    3. coordinates  each box under the mean of its neighbours, as near as its neighbours in the layer let it come

An edge across several layers has a point, a box without a size, in each of them, so it never runs through a box.
Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical system structures", 1981.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Box = tuple[float, float]  # width and height
_POINT: Box = (1.0, 0.0)
_SWEEPS = 24
_PORT = 26.0  # between two edges that meet a box
_STRAIGHT = 8  # how much more a long edge's points pull each other than boxes do


class Point(NamedTuple):
    """A place; y grows downwards."""

    x: float
    y: float


class Layout(NamedTuple):
    """Centres of the boxes, the points of each edge from top to bottom, and the extent of all."""

    centres: dict[str, Point]
    routes: dict[tuple[str, str], list[Point]]
    width: float
    height: float


def arrange(boxes: Mapping[str, Box], edges: Sequence[tuple[str, str]], *, gap: float = 24, drop: float = 36) -> Layout:
    """Lay out boxes of these sizes, `gap` apart in a layer and `drop` between layers.

    `edges` lead from boxes to others that stand after them in `boxes`.
    """
    edges = list(dict.fromkeys(edges))
    level = _levels(boxes, edges)
    sizes, links, chains = _with_points(boxes, edges, level)
    layers = _ordered(level, sizes, links)
    middles = _columns(layers, sizes, links, gap)
    tops, height = _rows(layers, sizes, drop)
    centres = {
        name: Point(middles[name], top + tall / 2)
        for layer, (top, tall) in zip(layers, tops, strict=True)
        for name in layer
    }
    starts = _ports(chains, centres, sizes, 0, 1)
    ends = _ports(chains, centres, sizes, -1, -2)
    routes = {}
    for edge, chain in chains.items():
        inner = [p for name in chain[1:-1] for p in _through(centres[name], tops[level[name]])]
        start = Point(starts[edge], centres[chain[0]].y + sizes[chain[0]][1] / 2)
        end = Point(ends[edge], centres[chain[-1]].y - sizes[chain[-1]][1] / 2)
        routes[edge] = [start, *inner, end]
    width = max((middles[n] + sizes[n][0] / 2 for n in middles), default=0.0)
    return Layout({name: centres[name] for name in boxes}, routes, width, height)


def _through(centre: Point, band: tuple[float, float]) -> tuple[Point, Point]:
    """Straight down through a layer, so that a bend lies between layers."""
    return Point(centre.x, band[0]), Point(centre.x, band[0] + band[1])


def _ports(
    chains: Mapping[tuple[str, str], Sequence[str]],
    centres: Mapping[str, Point],
    sizes: Mapping[str, Box],
    at: int,
    beside: int,
) -> dict[tuple[str, str], float]:
    """Where each edge meets the box chain[at]: those of one box are spread over its middle, in the order in which they
    come from chain[beside]."""
    meeting: dict[str, list[tuple[str, str]]] = {}
    for edge, chain in chains.items():
        meeting.setdefault(chain[at], []).append(edge)
    places = {}
    for name, met in meeting.items():
        met.sort(key=lambda edge: centres[chains[edge][beside]].x)
        step = min(_PORT, sizes[name][0] * 0.7 / len(met))
        for i, edge in enumerate(met):
            places[edge] = centres[name].x + step * (i - (len(met) - 1) / 2)
    return places


def _levels(boxes: Mapping[str, Box], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The number of each box's layer."""
    above: dict[str, list[str]] = {name: [] for name in boxes}
    below: dict[str, list[str]] = {name: [] for name in boxes}
    for tail, head in edges:
        above[head].append(tail)
        below[tail].append(head)
    level: dict[str, int] = {}
    for name in boxes:
        level[name] = max((level[tail] + 1 for tail in above[name]), default=0)
    for name in boxes:
        if not above[name] and below[name]:
            level[name] = min(level[head] for head in below[name]) - 1
    return level


def _with_points(
    boxes: Mapping[str, Box], edges: Sequence[tuple[str, str]], level: dict[str, int]
) -> tuple[dict[str, Box], list[tuple[str, str]], dict[tuple[str, str], list[str]]]:
    """Boxes and points, the links between adjacent layers, and the chain of each edge.  `level` learns the points."""
    sizes, links, chains = dict(boxes), [], {}
    for tail, head in edges:
        chain = [tail]
        for number in range(level[tail] + 1, level[head]):
            name = f"{tail}\0{head}\0{number}"
            sizes[name], level[name] = _POINT, number
            chain.append(name)
        chain.append(head)
        chains[tail, head] = chain
        links += list(zip(chain, chain[1:], strict=False))
    return sizes, links, chains


def _ordered(level: Mapping[str, int], sizes: Mapping[str, Box], links: Sequence[tuple[str, str]]) -> list[list[str]]:
    """The boxes of each layer from left to right."""
    layers: list[list[str]] = [[] for _ in range(max(level.values(), default=-1) + 1)]
    for name in sizes:
        layers[level[name]].append(name)
    above, below = _neighbours(sizes, links)
    best, fewest = [list(layer) for layer in layers], _crossings(layers, below)
    for sweep in range(_SWEEPS):
        downward = sweep % 2 == 0
        near = above if downward else below
        place = {name: float(i) for layer in layers for i, name in enumerate(layer)}
        for layer in layers if downward else reversed(layers):
            wanted = {n: sum(place[m] for m in near[n]) / len(near[n]) if near[n] else place[n] for n in layer}
            layer.sort(key=wanted.__getitem__)
            place |= {name: float(i) for i, name in enumerate(layer)}
        count = _crossings(layers, below)
        if count < fewest:
            best, fewest = [list(layer) for layer in layers], count
    return best


def _neighbours(
    sizes: Mapping[str, Box], links: Sequence[tuple[str, str]]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    above: dict[str, list[str]] = {name: [] for name in sizes}
    below: dict[str, list[str]] = {name: [] for name in sizes}
    for tail, head in links:
        above[head].append(tail)
        below[tail].append(head)
    return above, below


def _crossings(layers: Sequence[Sequence[str]], below: Mapping[str, list[str]]) -> int:
    """Pairs of links that cross."""
    count = 0
    for upper, lower in zip(layers, layers[1:], strict=False):
        place = {name: i for i, name in enumerate(lower)}
        heads = [place[head] for tail in upper for head in sorted(below[tail], key=place.__getitem__)]
        count += sum(heads[i] > later for i in range(len(heads)) for later in heads[i + 1 :])
    return count


def _columns(
    layers: Sequence[Sequence[str]], sizes: Mapping[str, Box], links: Sequence[tuple[str, str]], gap: float
) -> dict[str, float]:
    """The middle of each box: moved under its neighbours again and again, never across another box."""
    above, below = _neighbours(sizes, links)
    middles: dict[str, float] = {}
    for layer in layers:
        x = 0.0
        for name in layer:
            middles[name] = x + sizes[name][0] / 2
            x += sizes[name][0] + gap
    near = {n: [m for m in above[n] + below[n] for _ in range(_pull(n, m, sizes))] for n in sizes}
    for sweep in range(_SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wanted = [sum(middles[m] for m in near[n]) / len(near[n]) if near[n] else middles[n] for n in layer]
            middles |= dict(zip(layer, _apart(wanted, [sizes[n][0] for n in layer], gap), strict=True))
    left = min((middles[name] - sizes[name][0] / 2 for name in middles), default=0.0)
    return {name: x - left for name, x in middles.items()}


def _pull(name: str, other: str, sizes: Mapping[str, Box]) -> int:
    return _STRAIGHT if sizes[name] == sizes[other] == _POINT else 1


def _apart(wanted: Sequence[float], widths: Sequence[float], gap: float) -> list[float]:
    """The middles nearest to the wanted ones, by squares, of boxes that keep their order and stand `gap` apart.

    Less what stands to the left, middles must not decrease: isotonic regression by pooling what does.
    """
    offsets, x = [], 0.0
    for i, width in enumerate(widths):
        x += (widths[i - 1] + width) / 2 + gap if i else 0.0
        offsets.append(x)
    pools: list[tuple[float, int]] = []  # sum and number of what shares one place
    for value, offset in zip(wanted, offsets, strict=True):
        total, count = value - offset, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before = pools.pop()
            total, count = total + before[0], count + before[1]
        pools.append((total, count))
    places = [total / count for total, count in pools for _ in range(count)]
    return [place + offset for place, offset in zip(places, offsets, strict=True)]


def _rows(
    layers: Sequence[Sequence[str]], sizes: Mapping[str, Box], drop: float
) -> tuple[list[tuple[float, float]], float]:
    """Top and height of each layer, and the height of all."""
    tops, y = [], 0.0
    for layer in layers:
        tall = max((sizes[name][1] for name in layer), default=0.0)
        tops.append((y, tall))
        y += tall + drop
    return tops, max(0.0, y - drop)
