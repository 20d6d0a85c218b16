"""What the backward reads of the forward, and what the forward must store for it.

The backward needs some forward values; `cut` decides which to load, so that the rest can be recomputed from them.
Here is what `cut` is told: which values are needed, how each could be loaded, and what the author and exactness demand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

import attrs

from codalang.autodiff.cut import Kept, choose, units
from codalang.autodiff.derivative import ALONE, Decision, Load, Surroundings
from codalang.autodiff.graph import Graph, is_number, is_tile
from codalang.autodiff.invert import Inversion, inversions
from codalang.autodiff.names import Names
from codalang.autodiff.seeds import Results
from codalang.errors import CodaUnsupportedError
from codalang.ir.epilogue import Epilogue, Keep, Node, Output, Param, Store
from codalang.ir.types import Kind

# What an author may ask of a value.
SAVE, RECOMPUTE = "save", "recompute"
# How a value is had that is computed from an output.
INVERTED = "inverted"


def select(
    graph: Graph,
    epilogue: Epilogue,
    indices: Sequence[int],
    seeds: Collection[int],
    results: Results,
    roots: Sequence[int],
    names: Names,
    hosted: bool,
    kept: Collection[Load] | None,
    around: Surroundings = ALONE,
) -> tuple[dict[int, Kept], tuple[Decision, ...]]:
    """The forward values that the backward loads, and the plan to show.

    Args:
        graph: the forward's nodes (node i of `epilogue` at `indices[i]`) and those of the cotangents.
        seeds: the nodes that load cotangents.
        results: the finalized results that are loaded besides, and what is to be had exactly.
        roots: the values of the backward's outputs.
        names: gives a name to what is saved.
        hosted, kept, around: as in `epilogue.derive`.

    Raises:
        CodaUnsupportedError: `kept` is not enough, or what must not be saved cannot be recomputed.
    """
    keeps = {indices[k.value]: k for k in epilogue.keeps if kept is None}
    exact, rounded = _exact(graph, epilogue, results.exact, hosted)
    undone = _inversions(graph, epilogue, indices, kept, exact, keeps, around)
    primal = _primal(graph, seeds)
    needed = _needed(graph, primal, roots)
    leaves = {r.node for r in results.asked.values()}
    reduced = _reachable(graph, leaves)
    local = [p and not r for p, r in zip(primal, reduced, strict=True)]
    ways = _ways(graph, epilogue, indices, local, hosted, kept, keeps, exact, around, undone)
    loaded = _named(graph, names, _chosen(graph, epilogue, needed, ways, kept, leaves, keeps, rounded))
    plan = _plan(graph, indices, needed, loaded)
    for index in [i for i, way in loaded.items() if way.how == INVERTED]:
        del loaded[index]
        inversion = undone[index]
        loaded.setdefault(indices[inversion.store.value], _loading("output", inversion.store, around))
        graph.nodes[index] = attrs.evolve(graph.nodes[inversion.root], hint=graph.nodes[index].hint)
    return loaded, plan


def _inversions(
    graph: Graph,
    epilogue: Epilogue,
    indices: Sequence[int],
    kept: Collection[Load] | None,
    exact: Collection[int],
    keeps: Mapping[int, Keep],
    around: Surroundings,
) -> dict[int, Inversion]:
    """The values that can be had from an output: none that must be exact, or that the author spoke about."""
    stores = [
        s
        for s in epilogue.stores
        if graph.nodes[indices[s.value]].type == s.type
        and (kept is None or Load("output", s.name) in kept)
        and indices[s.value] not in keeps
    ]
    found = inversions(graph, indices, stores, around.nonzero)
    return {
        index: inversion
        for index, inversion in found.items()
        if index not in exact
        and index not in keeps
        and (kept is None or _reads(graph, inversion, indices) <= set(kept))
    }


def _reads(graph: Graph, inversion: Inversion, indices: Sequence[int]) -> set[Load]:
    """The parameters that undoing reads."""
    seen = {inversion.root}
    pending = list(seen)
    while pending:
        index = pending.pop()
        new = set() if index == indices[inversion.store.value] else set(graph.nodes[index].args) - seen
        seen |= new
        pending += new
    stored = indices[inversion.store.value]
    return {Load("param", str(graph.nodes[i].attr)) for i in seen if graph.nodes[i].op == "param" and i != stored}


def _primal(graph: Graph, seeds: Collection[int]) -> list[bool]:
    """For each node: is it a forward value, i.e. does it not depend on a cotangent?"""
    primal: list[bool] = []
    for index, node in enumerate(graph.nodes):
        primal.append(index not in seeds and all(primal[a] for a in node.args))
    return primal


def _reachable(graph: Graph, leaves: Collection[int]) -> list[bool]:
    """For each node: does it depend on one of these leaves?"""
    reachable: list[bool] = []
    for index, node in enumerate(graph.nodes):
        reachable.append(index in leaves or any(reachable[a] for a in node.args))
    return reachable


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
    local: Sequence[bool],
    hosted: bool,
    kept: Collection[Load] | None,
    keeps: Mapping[int, Keep],
    exact: Collection[int],
    around: Surroundings,
    undone: Mapping[int, Inversion],
) -> dict[int, Kept]:
    """The cheapest way to load each value that the forward can compute and keep (`local`), where there is one.

    What is asked to be recomputed is loaded as a parameter at most; a vector is loaded where it is asked to be saved,
    but for one row per sample.
    What is to be kept exactly is kept as what it was cast to, or in f32.
    """
    stored: dict[int, list[Store]] = {}
    for store in epilogue.outputs:
        if isinstance(store, Store) and graph.nodes[indices[store.value]].type == store.type:
            stored.setdefault(indices[store.value], []).append(store)
    loadable = {p.name: p for p in epilogue.params if hosted or p is not epilogue.accumulator}
    ways: dict[int, Kept] = {}
    for index, node in enumerate(graph.nodes):
        how = keeps[index].how if index in keeps else None
        is_rows = node.type.kind is Kind.ROWS  # of which no output can be stored
        if not local[index] or not (is_tile(node) or (how == SAVE and not is_rows)):
            continue
        param = loadable.get(str(node.attr)) if node.op == "param" else None
        options = [] if param is None else [_loading("param", param, around)]
        dtype = None if index not in exact else str(node.attr) if node.op == "cast" else "f32"
        if how != RECOMPUTE:
            same = [s for s in stored.get(index, []) if dtype is None or s.dtype in (dtype, "f32")]
            options += [_loading("output", s, around) for s in same]
        if how != RECOMPUTE and param is None and is_number(node):
            options.append(_saving(node, dtype))
        if index in undone and how is None:
            options.append(attrs.evolve(_loading("output", undone[index].store, around), how=INVERTED))
        if kept is not None:
            options = [o for o in options if o.name is not None and _source(o) in kept]
        options = [attrs.evolve(o, price=around.price) for o in options]
        if options:
            ways[index] = min(options, key=lambda way: way.capacity)
    return ways


def _source(way: Kept) -> Load:
    return Load("output" if way.how == INVERTED else way.how, str(way.name))


def _loading(how: str, what: Param | Store, around: Surroundings) -> Kept:
    """To load a parameter or an output, which the forward may have to store, or to keep, for that."""
    traffic, load = _units(what), Load(how, what.name)
    store = traffic if load in around.unstored else Fraction(0)
    memory = traffic if load in around.dear or load in around.unstored else Fraction(0)
    return Kept(how, what.name, traffic, store, memory=memory)


def _saving(node: Node, dtype: str | None) -> Kept:
    """To save a value in a storage dtype; a vector is no traffic."""
    traffic = units(node.type.width, dtype) if is_tile(node) else Fraction(0)
    return Kept("saved", None, traffic, traffic, dtype)


def _exact(graph: Graph, epilogue: Epilogue, values: Collection[int], hosted: bool) -> tuple[set[int], set[int]]:
    """What is kept exactly where it is kept: some values and what they are computed from, up to where the program
    itself rounds; and those places, which are loaded, unless they can be made again without the accumulator.
    """
    accumulator = [] if hosted else [i for i, n in enumerate(graph.nodes) if _is_accumulator(n, epilogue)]
    accumulated = _reachable(graph, accumulator)
    exact: set[int] = set()
    rounded: set[int] = set()
    pending = list(values)
    while pending:
        index = pending.pop()
        if index in exact:
            continue
        exact.add(index)
        if graph.nodes[index].op == "cast" and accumulated[index]:
            rounded.add(index)
        else:
            pending += graph.nodes[index].args
    return exact, rounded


def _is_accumulator(node: Node, epilogue: Epilogue) -> bool:
    accumulator = epilogue.accumulator
    return node.op == "param" and accumulator is not None and node.attr == accumulator.name


def _units(what: Param | Output) -> Fraction:
    """Activation-sized traffic of loading a parameter or an output."""
    return units(what.type.width, what.dtype) if what.type.kind is Kind.TILE else Fraction(0)


def _chosen(
    graph: Graph,
    epilogue: Epilogue,
    needed: Sequence[int],
    ways: Mapping[int, Kept],
    kept: Collection[Load] | None,
    leaves: Collection[int],
    keeps: Mapping[int, Keep],
    rounded: Collection[int],
) -> dict[int, Kept]:
    """What to load beside `leaves`.  Raises CodaUnsupportedError where that cannot be had from what was kept."""
    free: list[bool] = []
    for index, node in enumerate(graph.nodes):
        if index in leaves:
            free.append(True)
        elif node.op == "param":
            free.append(not is_tile(node) and (kept is None or Load("param", str(node.attr)) in kept))
        else:
            free.append(not is_tile(node) and all(free[a] for a in node.args))
    forced = {*rounded, *(index for index, keep in keeps.items() if keep.how == SAVE)} & set(ways)
    chosen = choose(graph.nodes, needed, ways, free, forced)
    if chosen is None:
        raise _not_recomputed(epilogue, keeps) if kept is None else not_kept(epilogue, kept)
    return chosen


def _not_recomputed(epilogue: Epilogue, keeps: Mapping[int, Keep]) -> CodaUnsupportedError:
    loc = next((k.loc for k in keeps.values() if k.how == RECOMPUTE), epilogue.loc)
    return CodaUnsupportedError(
        f"the backward of `{epilogue.name}` needs a value that is to be recomputed, but what it is made of is not kept",
        loc,
        hint="`save` a value that it is computed from",
    )


def not_kept(epilogue: Epilogue, kept: Collection[Load]) -> CodaUnsupportedError:
    names = ", ".join(f"`{load.name}`" for load in kept) or "nothing"
    return CodaUnsupportedError(
        f"the backward of `{epilogue.name}` needs more of its forward than was kept, which is {names}",
        epilogue.loc,
        hint="derive the forward for these gradients, so that it keeps what they need",
    )


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
    wanted = {*kept, *(i for i in needed if i in own and is_number(graph.nodes[i]))}
    decisions = []
    for index in sorted(i for i in wanted if is_tile(graph.nodes[i])):
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
