"""Fusing: a derived epilogue whose cotangents are sums of what has arrived.

A cotangent that a backward matmul makes is the accumulator of the fused epilogue; everything else that arrives at the
same place is a parameter of its own, added to it:

    d_x  ->  d_x + d_x_2 + d_x_3        d_x: the accumulator, or a tile; d_x_2, d_x_3: tiles, or scalars

What is the same number everywhere, as the cotangent of a sum is, is a scalar parameter: it is never spread out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import reduce

import attrs

from codalang.autodiff.graph import Expr, Graph, apply, column_index
from codalang.ir.build import canonical
from codalang.ir.epilogue import Epilogue, Node, Output, Param, Reduce, with_values
from codalang.ir.types import Dtype, Kind, ValueType


@attrs.frozen
class Term:
    """Something that arrived at a cotangent, as a parameter of the fused epilogue, and how often it is to be added."""

    name: str
    type: ValueType
    times: int = 1


def fused(epilogue: Epilogue, sums: Mapping[str, Sequence[Term]], at_zero: frozenset[str] = frozenset()) -> Epilogue:
    """The epilogue with these parameters replaced by sums of others.

    `at_zero`: ops, `row_index` or `col_index`, whose value is known to be zero.
    """
    graph = Graph(epilogue.dims)
    places: list[int] = []
    for node in epilogue.nodes:
        places.append(_made(graph, epilogue, node, places, sums, at_zero))
    outputs = tuple(_output(graph, epilogue, output, places) for output in epilogue.outputs)
    params: list[Param] = []
    for param in epilogue.params:
        new = [Param(t.name, t.type) for t in sums[param.name]] if param.name in sums else [param]
        params += new
    return canonical(attrs.evolve(epilogue, params=tuple(params), nodes=tuple(graph.nodes), outputs=outputs, keeps=()))


def _made(
    graph: Graph,
    epilogue: Epilogue,
    node: Node,
    places: Sequence[int],
    sums: Mapping[str, Sequence[Term]],
    at_zero: frozenset[str],
) -> int:
    """A node of the epilogue in the new graph, where its operands may have fewer axes."""
    if node.op == "param" and node.attr in sums:
        return _sum(graph, sums[str(node.attr)])
    if node.op in ("param", "const"):
        return graph.add(node)
    if node.op in at_zero:
        return graph.integer(0)
    args = [places[a] for a in node.args]
    widths = [graph.nodes[a].type.width for a in args]
    if node.op in ("even", "odd") and widths == [None]:
        return args[0]
    if node.op == "group_sum" and widths == [None]:
        assert isinstance(node.attr, int)
        return graph.op("mul", graph.const(float(node.attr)), args[0])
    if node.op == "join" and widths == [None, None]:
        if args[0] == args[1]:
            return args[0]
        width = next(epilogue.nodes[a].type.width for a in node.args if epilogue.nodes[a].type.width is not None)
        assert width is not None
        args[0] = _spread(graph, args[0], width)
    index = graph.plain(node.op, *args, attr=node.attr)
    if node.hint is not None:
        graph.hint(index, node.hint)
    return index


def _sum(graph: Graph, terms: Sequence[Term]) -> int:
    params = [graph.param(t.name, t.type) for t in terms]
    scaled = [
        p if t.times == 1 else graph.op("mul", graph.const(float(t.times)), p)
        for p, t in zip(params, terms, strict=True)
    ]
    return reduce(lambda a, b: graph.plain("add", a, b), scaled)


def _spread(graph: Graph, value: int, width: Fraction) -> int:
    """A value without columns, given some."""
    return apply(
        "where", apply("ge", column_index(graph, width), 0), Expr(graph, value, width), Expr(graph, value, width)
    ).node


def _output(graph: Graph, epilogue: Epilogue, output: Output, places: Sequence[int]) -> Output:
    """The output of the new nodes.  A sum keeps its domain, though its value may have lost its columns."""
    new = with_values(output, tuple(places[v] for v in output.values))
    if isinstance(new, Reduce) and new.how == "sum":
        before = epilogue.domain_width(output)
        after = new.type.width or graph.nodes[new.value].type.width or Fraction(1)
        if before != after:
            return attrs.evolve(new, value=graph.op("mul", graph.const(float(before / after)), new.value))
    return new


def with_outputs(epilogue: Epilogue, outputs: Sequence[Output], host: str | None = None) -> Epilogue:
    """The epilogue with some of its outputs, and the parameters that they need; `host` stays in any case."""
    kept = canonical(attrs.evolve(epilogue, outputs=tuple(outputs)))
    used = {node.attr for node in kept.nodes if node.op == "param"}
    return canonical(attrs.evolve(kept, params=tuple(p for p in kept.params if p.name in used or p.name == host)))


def hosted_on(epilogue: Epilogue, name: str | None) -> Epilogue:
    """The epilogue with this parameter first."""
    return attrs.evolve(epilogue, params=tuple(sorted(epilogue.params, key=lambda p: p.name != name)))


def renamed(epilogue: Epilogue, names: Mapping[str, str], output: str | None = None) -> Epilogue:
    """The epilogue with other names of parameters and, where given, of its one output."""
    params = tuple(attrs.evolve(p, name=names.get(p.name, p.name)) for p in epilogue.params)
    nodes = tuple(
        attrs.evolve(n, attr=names.get(str(n.attr), n.attr), hint=names.get(str(n.attr), n.hint))
        if n.op == "param"
        else n
        for n in epilogue.nodes
    )
    outputs = epilogue.outputs if output is None else (attrs.evolve(epilogue.outputs[0], name=output),)
    return attrs.evolve(epilogue, params=params, nodes=nodes, outputs=outputs)


def passed_through(epilogue: Epilogue) -> dict[str, str]:
    """Outputs that are nothing but a parameter, stored as it is -> that parameter."""
    found = {}
    for output in epilogue.outputs:
        node = epilogue.nodes[output.values[0]]
        if not isinstance(output, Reduce) and node.op == "param" and node.type == output.type:
            found[output.name] = str(node.attr)
    return found


def is_float_tile(param: Param) -> bool:
    """Can a matmul compute it, or a plain tensor host it?"""
    return param.type.kind is Kind.TILE and param.type.dtype is Dtype.F32
