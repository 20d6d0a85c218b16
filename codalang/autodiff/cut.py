"""The cheapest set of forward values to load, by bytes moved: a minimum cut.

Each value of activation size can be had in one of these ways:

| way                                | moves                        |
|------------------------------------|------------------------------|
| load a forward tile parameter      | a load                       |
| load an output the forward stores  | a load (the rounded value)   |
| save it: the forward stores it     | a store and a load           |
| recompute it from its operands     | what its operands cost       |

Rows, cols and scalars are small and recomputed from their parameters at no cost.  A choice of values to load is
enough when every path from the parameters to a needed value passes through one of them: a vertex cut of the forward
graph, whose capacities are the costs above.  The minimum cut is found by maximum flow.  Among cuts that move equally
much the one that keeps the least extra memory wins, then the one nearest the parameters (an accumulator is saved
before its row scale, not after it).

A unit is one value of two bytes per element of [M, N].
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import inf

import attrs

from codalang.ir.epilogue import Node

# A unit of traffic outweighs whatever memory can be kept; capacities are integers so that the flow is exact.
_TRAFFIC = 1 << 40
_SCALE = 4
# vertex -> vertex -> how much more can flow between them; an edge back has what flows forward
_Network = dict[Hashable, dict[Hashable, float]]

_BYTES: dict[str | None, int] = {"f32": 4, "i32": 4, "i64": 8, "bool": 1}


@attrs.frozen
class Kept:
    """Where the backward gets a value from: `how` is "param", "output", "saved" or "recomputed".

    `name` is the forward's for the parameter or output; `load` and `store` are the units moved for it, `memory` those
    that would not be kept otherwise, and `capacity` is what all that costs.  `dtype` is the storage dtype of what is
    saved, None for that of A.
    """

    how: str
    name: str | None
    load: Fraction = Fraction(0)
    store: Fraction = Fraction(0)
    dtype: str | None = None
    memory: Fraction | None = None  # None: what it stores
    price: int = 0  # of a unit kept, in units moved

    capacity: int = attrs.field(init=False, repr=False)

    @capacity.default
    def _cost(self) -> int:
        """The cost as one integer: bytes moved, and the price of those kept, then extra memory kept."""
        memory = self.store if self.memory is None else self.memory
        return int(_SCALE * (self.load + self.store + self.price * memory)) * _TRAFFIC + int(_SCALE * memory)


def units(width: Fraction | None, dtype: str | None) -> Fraction:
    """Traffic of one load or store of an activation; an unknown dtype counts as two bytes."""
    return (width or Fraction(1)) * Fraction(_BYTES.get(dtype, 2), 2)


def choose(
    nodes: Sequence[Node],
    needed: Collection[int],
    ways: Mapping[int, Kept],
    free: Sequence[bool],
    forced: Collection[int] = (),
) -> dict[int, Kept] | None:
    """The values to load, and how; None where they cannot be had from what may be loaded.

    Args:
        nodes: the graph that the others index; operands before users.
        needed: values that the backward uses.
        ways: the cheapest way to get a value by a load: of tile parameters, of stored values and of values that can be
            saved.  A value without a way can only be recomputed.
        free: which values cost nothing, because they depend on nothing but rows, cols and scalars.
        forced: values to load wherever they are needed, whatever it costs.
    """
    cut = _cheapest(_network(nodes, needed, ways, free, forced), ways)
    if cut is None or not forced:
        return cut
    return {index: ways[index] for index in sorted({*cut, *_met(nodes, needed, cut, forced)})}


def _met(nodes: Sequence[Node], needed: Collection[int], cut: Collection[int], forced: Collection[int]) -> set[int]:
    """The forced values that are needed, directly or to compute others, beside those that are loaded anyway."""
    seen = set(needed)
    pending = list(seen)
    while pending:
        index = pending.pop()
        new = set() if index in cut or index in forced else set(nodes[index].args) - seen
        seen |= new
        pending += new
    return seen & set(forced)


def _cheapest(network: _Network, ways: Mapping[int, Kept]) -> dict[int, Kept] | None:
    """The minimum cut as the values to load; None where there is no finite one.  It takes the network's room."""
    below = _below(network)
    if below is None:
        return None
    crossed = {i for i in ways if (i, "use") in network and (i, "use") not in below and (i, "make") in below}
    return {index: ways[index] for index in sorted(crossed)}


def _below(network: _Network) -> Collection[Hashable] | None:
    """The sink's side of the minimum cut that is nearest to it; None where the flow has no bound.

    Dinic's algorithm: a flow as large as can be along the shortest paths, while there are any.  Nothing recurses.
    """
    while "source" in (distance := _distances(network)):
        untried = {vertex: list(network[vertex]) for vertex in distance}
        path: list[Hashable] = ["source"]
        while path:
            tail = path[-1]
            if tail == "sink":
                room = min(network[a][b] for a, b in pairwise(path))
                if room == inf:
                    return None
                for a, b in pairwise(path):
                    network[a][b] -= room
                    network[b][a] += room
                path = ["source"]
            elif not untried[tail]:
                path.pop()
                if path:
                    untried[path[-1]].pop()
            elif network[tail][head := untried[tail][-1]] and distance.get(head, inf) < distance[tail]:
                path.append(head)
            else:
                untried[tail].pop()
    return distance


def _distances(network: _Network) -> dict[Hashable, int]:
    """How many edges with room it takes to the sink, from each vertex that reaches it."""
    distance: dict[Hashable, int] = {"sink": 0}
    for vertex in (queue := list(distance)):
        for before in network.get(vertex, ()):
            if before not in distance and network[before][vertex]:
                distance[before] = distance[vertex] + 1
                queue.append(before)
    return distance


def _network(
    nodes: Sequence[Node],
    needed: Collection[int],
    ways: Mapping[int, Kept],
    free: Sequence[bool],
    forced: Collection[int],
) -> _Network:
    """The flow network: needed values -> `use` of a value -> `make` of it -> use of its operands -> parameters."""
    network: _Network = {}

    def edge(tail: Hashable, head: Hashable, capacity: float = inf) -> None:
        network.setdefault(tail, {})[head] = capacity
        network.setdefault(head, {}).setdefault(tail, 0)

    pending = [i for i in needed if not free[i] and i not in forced]
    for index in pending:
        edge("source", (index, "use"))
    seen = set(pending)
    while pending:
        index = pending.pop()
        edge((index, "use"), (index, "make"), ways[index].capacity if index in ways else inf)
        if nodes[index].op == "param":
            edge((index, "make"), "sink")
        for arg in nodes[index].args:
            if not free[arg] and arg not in forced:
                edge((index, "make"), (arg, "use"))
                if arg not in seen:
                    seen.add(arg)
                    pending.append(arg)
    return network
