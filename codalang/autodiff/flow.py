"""Cotangents on their way from the outputs of an epilogue to its parameters.

A cotangent is a function on a whole [M, w*N] domain and stays so, whatever the kind of the value it belongs to: what
a broadcast repeats is summed once, at the parameter.  The domain is part of a cotangent because a col or a scalar has
no columns of its own: one that meets half-width and full-width values gets a cotangent on either domain, and the
wider is folded (its even columns plus its odd ones) before the two add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from functools import reduce

from codalang.autodiff.graph import Expr, Graph, apply, even, expr, join, odd
from codalang.autodiff.names import Names
from codalang.autodiff.rules import RULES, Halves
from codalang.errors import CodaUnsupportedError
from codalang.ir.epilogue import Epilogue, Output, Reduce
from codalang.ir.types import Kind

# The cotangent of the reduced value, from the loaded cotangent of the result.
REDUCTION_RULES: dict[str, Callable[[Expr], Expr]] = {"sum": lambda loaded: loaded}

# Where a contribution comes from, for their order in a sum: stored outputs first, then the users in program order.
_FROM_OUTPUT = -1
_Arrivals = dict[int, list[tuple[int, Expr | Halves]]]


def flow_back(
    graph: Graph,
    epilogue: Epilogue,
    indices: Sequence[int],
    wanted: Collection[str],
    seeds: Mapping[str, int],
    names: Names,
) -> dict[str, Expr]:
    """The cotangent of each wanted parameter that has one, unreduced.

    Args:
        graph: holds the forward's nodes, the node i of `epilogue` at `indices[i]`; gets the cotangents' nodes.
        wanted: names of parameters.
        seeds: output -> the node that loads its cotangent.
        names: of the cotangents.

    Raises:
        CodaUnsupportedError: a cotangent arrives at a reduction without a rule.
    """
    count = max(indices, default=-1) + 1
    active = _active(graph, wanted, count)
    arrivals: _Arrivals = {}
    for output in epilogue.outputs:
        if output.name in seeds:
            seed = _seed(graph, epilogue, output, seeds[output.name])
            arrivals.setdefault(indices[output.value], []).append((_FROM_OUTPUT, seed))
    donors = [graph.param(p.name, p.type) for p in epilogue.params if p.type.kind is Kind.ROW]
    result: dict[str, Expr] = {}
    for index in reversed(range(count)):
        if not active[index] or index not in arrivals:
            continue
        arrived = sorted(arrivals.pop(index), key=lambda pair: pair[0])
        cotangent = _total(graph, index, [contribution for _, contribution in arrived], donors)
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
    """For each forward node: does it depend on a wanted parameter?"""
    active: list[bool] = []
    for node in graph.nodes[:count]:
        active.append(node.attr in wanted if node.op == "param" else any(active[a] for a in node.args))
    return active


def _seed(graph: Graph, epilogue: Epilogue, output: Output, node: int) -> Expr:
    loaded = Expr(graph, node, epilogue.domain_width(output))
    if not isinstance(output, Reduce):
        return loaded
    if output.how not in REDUCTION_RULES:
        raise CodaUnsupportedError(
            f"`{output.name}` of `{epilogue.name}` is a `{output.how}`, which has no derivative rule",
            output.loc,
            hint="wrap the reduced expression in stop_gradient, or ask for gradients without its cotangent",
        )
    return REDUCTION_RULES[output.how](loaded)


def _total(graph: Graph, index: int, contributions: Sequence[Expr | Halves], donors: Sequence[int]) -> Expr:
    """The sum of what arrives at a node, on the narrowest of the domains."""
    terms: list[Expr] = []
    halves = [c for c in contributions if isinstance(c, Halves)]
    for contribution in contributions:
        if isinstance(contribution, Expr):
            terms.append(contribution)
        elif contribution is halves[0]:
            terms.append(_joined(graph, index, halves, donors))
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


def _joined(graph: Graph, index: int, halves: Sequence[Halves], donors: Sequence[int]) -> Expr:
    """The cotangent of a value of which even and odd columns were taken."""
    evens = [h.even for h in halves if h.even is not None]
    odds = [h.odd for h in halves if h.odd is not None]
    left = _sum(evens) if evens else 0.0
    right = _sum(odds) if odds else 0.0
    if isinstance(left, Expr) and isinstance(right, Expr) and left.node == right.node and not left.has_columns:
        return Expr(graph, left.node, _width(left) * 2)
    if any(isinstance(side, Expr) and side.has_columns for side in (left, right)):
        return join(left, right)
    if isinstance(left, Expr):
        return join(_spread(graph, index, left, donors), right)
    assert isinstance(right, Expr)  # a Halves has at least one side
    return join(left, _spread(graph, index, right, donors))


def _spread(graph: Graph, index: int, value: Expr, donors: Sequence[int]) -> Expr:
    """A value without columns, given some: `where(d == d, value, value)` for any `d` that has them.

    Only what has columns can be joined.  A row parameter serves, else the value at hand, whose columns are cut.
    """
    donor = expr(graph, donors[0] if donors else index)
    while _width(donor) > _width(value):
        # Not `even` of an expression, which may find that this half has no columns.
        donor = expr(graph, graph.op("even", donor.node))
    while _width(donor) < _width(value):
        donor = join(donor, donor)
    return apply("where", apply("eq", donor, donor), value, value)
