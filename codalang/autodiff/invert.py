"""Values that can be had from a stored output: what was computed of them, undone.

    y = -x                                          x = -y
    y = x * s, s not zero                           x = y * (1/s)
    y = join(a, b)                                  (a, b) = split(y)
    (a, b) = split(x)                               x = join(a, b)
    (u, v) = rotate(a, b, t)                        (a, b) = rotate(u, v, -t)

Each is as accurate as what was stored, relative to the pair that is rotated.  Sums are not undone: they may cancel.  A
factor is a constant, or a row, col or scalar that the program around the epilogue knows not to be zero.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs

from codalang.autodiff.graph import Graph, is_number, is_tile
from codalang.ir.epilogue import Store


@attrs.frozen
class Inversion:
    """The node of a value, computed from that of a stored output."""

    root: int
    store: Store


def inversions(
    graph: Graph, indices: Sequence[int], stores: Sequence[Store], nonzero: Collection[str]
) -> dict[int, Inversion]:
    """The tiles of the forward that can be had from an output, by node.  Adds nodes to the graph.

    Args:
        indices: the graph's node of each of the epilogue's.
        stores: the outputs that may be loaded, each as wide as its value.
        nonzero: parameters that are not zero.
    """
    small = _small(graph, max(indices, default=-1) + 1)
    users = _users(graph, len(small))
    found: dict[int, Inversion] = {}
    start = len(graph.nodes)
    leaves: dict[int, int] = {}
    for store in stores:
        # A leaf stands for the stored value, or the graph would simplify what is undone to what it was made of.
        value = indices[store.value]
        leaf = graph.param(f"stored {store.name}", store.type)
        leaves[leaf] = value
        known: dict[int, int] = {value: leaf}
        pending = list(known)
        while pending:
            index = pending.pop()
            for value, root in _undone(graph, index, known, users, small, nonzero):
                if value not in known:
                    known[value] = root
                    pending.append(value)
        for value, root in known.items():
            if root != leaf and is_tile(graph.nodes[value]) and graph.nodes[root].type == graph.nodes[value].type:
                found.setdefault(value, Inversion(root, store))
    for index in range(start, len(graph.nodes)):
        node = graph.nodes[index]
        graph.nodes[index] = attrs.evolve(node, args=tuple(leaves.get(a, a) for a in node.args))
    return found


def _small(graph: Graph, count: int) -> list[bool]:
    """For each node of the forward: is it computed from nothing but rows, cols and scalars?"""
    small: list[bool] = []
    for node in graph.nodes[:count]:
        small.append(not is_tile(node) if node.op == "param" else all(small[a] for a in node.args))
    return small


def _users(graph: Graph, count: int) -> dict[int, list[int]]:
    """The nodes that take the even or odd columns of each node."""
    users: dict[int, list[int]] = {}
    for index, node in enumerate(graph.nodes[:count]):
        if node.op in ("even", "odd"):
            for arg in node.args:
                users.setdefault(arg, []).append(index)
    return users


def _undone(
    graph: Graph,
    index: int,
    known: dict[int, int],
    users: dict[int, list[int]],
    small: Sequence[bool],
    nonzero: Collection[str],
) -> list[tuple[int, int]]:
    """The values that follow from a value that is known, and how."""
    node, root = graph.nodes[index], known[index]
    if not is_number(node):
        return []
    if node.op == "neg":
        return [(node.args[0], graph.op("neg", root))]
    if node.op == "mul":
        found = []
        for value, factor in (node.args, node.args[::-1]):
            if is_tile(graph.nodes[value]) and small[factor] and _is_nonzero(graph, factor, nonzero):
                reciprocal = graph.op("div", graph.const(1.0), factor)
                found.append((value, graph.op("mul", root, reciprocal)))
        return found
    if node.op == "join":
        halves = zip(("even", "odd"), node.args, strict=True)
        return [(arg, graph.op(op, root)) for op, arg in halves if graph.nodes[arg].type.width is not None]
    if node.op in ("even", "odd"):
        whole = node.args[0]
        other = [u for u in users[whole] if u in known and u != index]
        if not other:
            return []
        even, odd = (root, known[other[0]]) if node.op == "even" else (known[other[0]], root)
        return [(whole, graph.op("join", even, odd))]
    if node.op in ("sub", "add"):
        return _unrotated(graph, index, known, small)
    return []


def _unrotated(graph: Graph, index: int, known: dict[int, int], small: Sequence[bool]) -> list[tuple[int, int]]:
    """Both operands of a rotation of which this, and the other result, is known."""
    candidates = [index] if graph.nodes[index].op == "sub" else [i for i in known if graph.nodes[i].op == "sub"]
    for first in candidates:
        left, right = (_product(graph, arg) for arg in graph.nodes[first].args)
        if left is None or right is None:
            continue
        for (a, cos), (b, sin) in ((x, y) for x in left for y in right):
            turned = graph.nodes[cos].op == "cos" and graph.nodes[sin].op == "sin"
            if not turned or graph.nodes[cos].args != graph.nodes[sin].args or not small[cos]:
                continue
            for second in (i for i in known if graph.nodes[i].op == "add"):
                one, two = (_product(graph, arg) for arg in graph.nodes[second].args)
                if one is not None and two is not None and {(a, sin), (b, cos)} in ({x, y} for x in one for y in two):
                    u, v = known[first], known[second]
                    back = graph.op("add", graph.op("mul", u, cos), graph.op("mul", v, sin))
                    other = graph.op("sub", graph.op("mul", v, cos), graph.op("mul", u, sin))
                    return [(a, back), (b, other)]
    return []


def _product(graph: Graph, index: int) -> list[tuple[int, int]] | None:
    """A product's operands in either order."""
    node = graph.nodes[index]
    if node.op != "mul":
        return None
    a, b = node.args
    return [(a, b), (b, a)]


def _is_nonzero(graph: Graph, index: int, nonzero: Collection[str]) -> bool:
    node = graph.nodes[index]
    if node.op == "param":
        return node.attr in nonzero
    number = graph.number(index)
    return number is not None and number != 0.0
