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

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

import attrs
import networkx

from codalang.ir.epilogue import Node

# A unit of traffic outweighs whatever memory can be kept; capacities are integers so that the flow is exact.
_TRAFFIC = 1 << 40
_SCALE = 4
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


def _cheapest(network: networkx.DiGraph, ways: Mapping[int, Kept]) -> dict[int, Kept] | None:
    """The minimum cut as the values to load; None where there is no finite one."""
    if "source" not in network or "sink" not in network:
        return {}
    try:
        # networkx gives the cut nearest its sink; the flow runs from what is needed to the parameters.
        _, (above, below) = networkx.minimum_cut(
            network, "source", "sink", flow_func=networkx.algorithms.flow.shortest_augmenting_path
        )
    except networkx.NetworkXUnbounded:
        return None
    return {index: ways[index] for index in sorted(ways) if (index, "use") in above and (index, "make") in below}


def _network(
    nodes: Sequence[Node],
    needed: Collection[int],
    ways: Mapping[int, Kept],
    free: Sequence[bool],
    forced: Collection[int],
) -> networkx.DiGraph:
    """The flow network: needed values -> `use` of a value -> `make` of it -> use of its operands -> parameters.

    An edge without a capacity is infinite.
    """
    network = networkx.DiGraph()
    pending = [i for i in needed if not free[i] and i not in forced]
    for index in pending:
        network.add_edge("source", (index, "use"))
    seen = set(pending)
    while pending:
        index = pending.pop()
        if index in ways:
            network.add_edge((index, "use"), (index, "make"), capacity=ways[index].capacity)
        else:
            network.add_edge((index, "use"), (index, "make"))
        if nodes[index].op == "param":
            network.add_edge((index, "make"), "sink")
        for arg in nodes[index].args:
            if not free[arg] and arg not in forced:
                network.add_edge((index, "make"), (arg, "use"))
                if arg not in seen:
                    seen.add(arg)
                    pending.append(arg)
    return network
