"""What the backward reads of the forward, and what the forward must store for it.

The backward needs some forward values; `cut` decides which to load, so that the rest can be recomputed from them.
Here is what `cut` is told: which values are needed, and how each could be loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs

from codalang.autodiff.cut import Kept, choose, units
from codalang.autodiff.derivative import Decision, Load
from codalang.autodiff.graph import Graph, is_number, is_tile
from codalang.autodiff.names import Names
from codalang.errors import CodaUnsupportedError
from codalang.ir.epilogue import Epilogue, Store
from codalang.ir.types import WIDTHS


def select(
    graph: Graph,
    epilogue: Epilogue,
    indices: Sequence[int],
    seeds: Collection[int],
    roots: Sequence[int],
    names: Names,
    hosted: bool,
    kept: Collection[Load] | None,
) -> tuple[dict[int, Kept], tuple[Decision, ...]]:
    """The activation-sized forward values that the backward loads, and the plan to show.

    Args:
        graph: the forward's nodes (node i of `epilogue` at `indices[i]`) and those of the cotangents.
        seeds: the nodes that load cotangents.
        roots: the values of the backward's outputs.
        names: gives a name to what is saved.
        hosted, kept: as in `epilogue.derive`.

    Raises:
        CodaUnsupportedError: `kept` is not enough.
    """
    primal = _primal(graph, seeds)
    needed = _needed(graph, primal, roots)
    ways = _ways(graph, epilogue, indices, primal, hosted, kept)
    loaded = _named(graph, names, _chosen(graph, epilogue, needed, ways, kept))
    return loaded, _plan(graph, indices, needed, loaded)


def _primal(graph: Graph, seeds: Collection[int]) -> list[bool]:
    """For each node: is it a forward value, i.e. does it not depend on a cotangent?"""
    primal: list[bool] = []
    for index, node in enumerate(graph.nodes):
        primal.append(index not in seeds and all(primal[a] for a in node.args))
    return primal


def _needed(graph: Graph, primal: Sequence[bool], roots: Sequence[int]) -> list[int]:
    """The forward values that the cotangents' part of the graph reads, in order."""
    needed = {r for r in roots if primal[r]}
    pending = [r for r in roots if not primal[r]]
    seen = set(pending)
    while pending:
        for arg in graph.nodes[pending.pop()].args:
            if primal[arg]:
                needed.add(arg)
            elif arg not in seen:
                seen.add(arg)
                pending.append(arg)
    return sorted(needed)


def _ways(
    graph: Graph,
    epilogue: Epilogue,
    indices: Sequence[int],
    primal: Sequence[bool],
    hosted: bool,
    kept: Collection[Load] | None,
) -> dict[int, Kept]:
    """The cheapest way to load each forward value that can be loaded."""
    stored: dict[int, list[Store]] = {}
    for store in epilogue.stores:
        stored.setdefault(indices[store.value], []).append(store)
    loadable = {p.name: p for p in epilogue.params if hosted or p is not epilogue.accumulator}
    saving = {width: Kept("saved", None, units(width, None), units(width, None)) for width in WIDTHS}
    ways: dict[int, Kept] = {}
    for index, node in enumerate(graph.nodes):
        if not (primal[index] and is_tile(node) and is_number(node)):
            continue
        options = [Kept("output", s.name, units(s.type.width, s.dtype)) for s in stored.get(index, [])]
        if node.op == "param" and node.attr in loadable:
            param = loadable[node.attr]
            options.insert(0, Kept("param", param.name, units(param.type.width, param.dtype)))
        elif node.type.width is not None:
            options.append(saving[node.type.width])
        if kept is not None:
            options = [o for o in options if o.name is not None and Load(o.how, o.name) in kept]
        if options:
            ways[index] = min(options, key=lambda way: way.capacity)
    return ways


def _chosen(
    graph: Graph,
    epilogue: Epilogue,
    needed: Sequence[int],
    ways: Mapping[int, Kept],
    kept: Collection[Load] | None,
) -> dict[int, Kept]:
    """What to load.  Raises CodaUnsupportedError where that cannot be had from what was kept."""
    free: list[bool] = []
    for node in graph.nodes:
        if node.op == "param":
            free.append(not is_tile(node) and (kept is None or Load("param", str(node.attr)) in kept))
        else:
            free.append(not is_tile(node) and all(free[a] for a in node.args))
    chosen = choose(graph.nodes, needed, ways, free)
    if chosen is None:
        names = ", ".join(f"`{load.name}`" for load in kept or ()) or "nothing"
        raise CodaUnsupportedError(
            f"the backward of `{epilogue.name}` needs more of its forward than was kept, which is {names}",
            epilogue.loc,
            hint="derive the forward for these gradients, so that it keeps what they need",
        )
    return chosen


def _named(graph: Graph, names: Names, kept: Mapping[int, Kept]) -> dict[int, Kept]:
    """The same, with a name for each value that is saved."""
    return {
        index: attrs.evolve(k, name=names.fresh(f"saved_{graph.nodes[index].hint or graph.nodes[index].op}"))
        if k.how == "saved"
        else k
        for index, k in kept.items()
    }


def _plan(
    graph: Graph, indices: Sequence[int], needed: Sequence[int], kept: Mapping[int, Kept]
) -> tuple[Decision, ...]:
    """What is loaded, and those of the forward's own values that are recomputed from it."""
    own = set(indices)
    tiles = {i for i in needed if is_tile(graph.nodes[i]) and i in own} | set(kept)
    decisions = []
    for index in sorted(tiles):
        way = kept.get(index, Kept("recomputed", None))
        decisions.append(Decision(_described(graph, index), way.how, way.load, way.store))
    return tuple(decisions)


def _described(graph: Graph, index: int) -> str:
    """A value's name, or its op and the names of its operands."""
    node = graph.nodes[index]
    if node.hint is not None:
        return node.hint
    operands = [graph.nodes[a] for a in node.args]
    return f"{node.op}({', '.join(str(o.hint or (o.op if o.args else o.attr)) for o in operands)})"
