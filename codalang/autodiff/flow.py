"""Cotangents on their way from the outputs of an epilogue to its parameters.

A cotangent is a function on a whole [M, w*N] domain and stays so, whatever the kind of the value it belongs to: what
a broadcast repeats is summed once, at the parameter.  The domain is part of a cotangent because a col or a scalar has
no columns of its own: one that meets half-width and full-width values gets a cotangent on either domain, and the
wider is folded (its even columns plus its odd ones) before the two add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from functools import reduce

from codalang.autodiff.graph import Expr, Graph, apply, column_index, even, expr, join, odd
from codalang.autodiff.names import Names
from codalang.autodiff.rules import RULES, Halves
from codalang.autodiff.seeds import Results, seeds
from codalang.ir.epilogue import Epilogue
from codalang.ir.types import Dtype

# Where a contribution comes from, for their order in a sum: stored outputs first, then the users in program order.
_FROM_OUTPUT = -1
_Arrivals = dict[int, list[tuple[int, Expr | Halves]]]


def flow_back(
    graph: Graph,
    epilogue: Epilogue,
    indices: Sequence[int],
    wanted: Collection[str],
    loaded: Mapping[str, int],
    results: Results,
    names: Names,
) -> dict[str, Expr]:
    """The cotangent of each wanted parameter that has one, unreduced.

    Args:
        graph: holds the forward's nodes, the node i of `epilogue` at `indices[i]`; gets the cotangents' nodes.
        wanted: names of parameters.
        loaded: output -> the node that loads its cotangent.
        results: notes the results of stateful transforms that the backward loads.
        names: of the cotangents.

    Raises:
        CodaUnsupportedError: a cotangent arrives at a stateful transform without a `vjp`.
    """
    count = max(indices, default=-1) + 1
    active = _active(graph, wanted, count)
    arrivals: _Arrivals = {}
    for index, seed in seeds(graph, epilogue, indices, loaded, active, results):
        arrivals.setdefault(index, []).append((_FROM_OUTPUT, seed))
    result: dict[str, Expr] = {}
    for index in reversed(range(count)):
        if not active[index] or index not in arrivals:
            continue
        arrived = sorted(arrivals.pop(index), key=lambda pair: pair[0])
        cotangent = _total([contribution for _, contribution in arrived])
        node = graph.nodes[index]
        if node.op == "param":
            result[str(node.attr)] = cotangent
            continue
        if node.hint is not None:
            graph.hint(cotangent.node, names.cotangent_hint(node.hint))
        operands = [expr(graph, a) for a in node.args]
        for arg, contribution in zip(node.args, RULES[node.op](cotangent, expr(graph, index), *operands), strict=True):
            if active[arg] and contribution is not None and not contribution.is_zero:
                arrivals.setdefault(arg, []).append((index, contribution))
    return result


def _active(graph: Graph, wanted: Collection[str], count: int) -> list[bool]:
    """For each forward node: does it depend on a wanted parameter?  Indices do not vary, hence have no cotangents."""
    active: list[bool] = []
    for node in graph.nodes[:count]:
        depends = node.attr in wanted if node.op == "param" else any(active[a] for a in node.args)
        active.append(depends and node.type.dtype is not Dtype.I32)
    return active


def _total(contributions: Sequence[Expr | Halves]) -> Expr:
    """The sum of what arrives at a node, on the narrowest of the domains."""
    terms: list[Expr] = []
    halves = [c for c in contributions if isinstance(c, Halves)]
    for contribution in contributions:
        if isinstance(contribution, Expr):
            terms.append(contribution)
        elif contribution is halves[0]:
            terms.append(_joined(halves))
    width = min(_width(t) for t in terms)
    return _sum([narrowed(t, width) for t in terms])


def _sum(terms: Sequence[Expr]) -> Expr:
    """The sum of cotangents on one domain; equal ones (of both operands of x * x) are counted and scaled."""
    counts = Counter(t.node for t in terms)
    distinct = {t.node: t for t in terms}
    return reduce(Expr.__add__, [float(counts[node]) * term for node, term in distinct.items()])


def _width(cotangent: Expr) -> Fraction:
    assert cotangent.width is not None  # every cotangent descends from a seed, which has a domain
    return cotangent.width


def narrowed(cotangent: Expr, width: Fraction) -> Expr:
    """The same cotangent of a value without columns, on a narrower domain."""
    while _width(cotangent) > width:
        cotangent = even(cotangent) + odd(cotangent)
    return cotangent


def _joined(halves: Sequence[Halves]) -> Expr:
    """The cotangent of a value of which even and odd columns were taken."""
    evens = [h.even for h in halves if h.even is not None]
    odds = [h.odd for h in halves if h.odd is not None]
    left = _sum(evens) if evens else 0.0
    right = _sum(odds) if odds else 0.0
    if isinstance(left, Expr) and isinstance(right, Expr) and left.node == right.node and not left.has_columns:
        return Expr(left.graph, left.node, _width(left) * 2)
    if any(isinstance(side, Expr) and side.has_columns for side in (left, right)):
        return join(left, right)
    if isinstance(left, Expr):
        return join(_spread(left), right)
    assert isinstance(right, Expr)  # a Halves has at least one side
    return join(left, _spread(right))


def _spread(value: Expr) -> Expr:
    """A value without columns, given some, as only what has columns can be joined: `where(i >= 0, value, value)`."""
    columns = column_index(value.graph, _width(value))
    return apply("where", apply("ge", columns, 0), value, value)
