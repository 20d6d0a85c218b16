"""Auxiliary steps that follow each other as one: their expressions in one epilogue, for one launch.

    ss -> r = rsqrt(ss / D + eps) -> t = r * s          t = rsqrt(ss / D + eps) * s, and r where somebody else reads it

A vector that a reduction left in parts is merged by the step that first reads it, which then also stores it where
others need it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs

from codalang.ir.build import canonical
from codalang.ir.epilogue import Epilogue, Node, Param, Store
from codalang.ir.program import Statement, Vector
from codalang.ir.simplify import simplify
from codalang.ir.types import Kind


def is_elementwise(statement: Statement) -> bool:
    """Is a statement an auxiliary step that reduces nothing?"""
    return isinstance(statement, Vector) and isinstance(statement.expression.outputs[0], Store)


def merged(group: Sequence[Vector], needed: Collection[str], stored: Collection[str]) -> Epilogue:
    """One expression for steps of one length, of which each may read those before it.

    Args:
        needed: the results that are outputs of it; the others are only read in here.
        stored: inputs that are outputs, too.
    """
    nodes: list[Node] = []
    made: dict[str, int] = {}  # by name of a value: read, or computed in here
    params: dict[str, Param] = {}
    outputs: list[Store] = []
    for statement in group:
        expression = statement.expression
        index: list[int] = []
        for node in expression.nodes:
            name = str(node.attr) if node.op == "param" else None
            if name is not None and name in made:
                index.append(made[name])
                continue
            nodes.append(attrs.evolve(node, args=tuple(index[a] for a in node.args)))
            index.append(len(nodes) - 1)
            if name is not None:
                made[name] = index[-1]
                params[name] = expression.param(name)
        (output,) = expression.outputs
        made[statement.result] = index[output.values[0]]
        if statement.result in needed:
            outputs.append(Store(statement.result, made[statement.result], output.type, output.dtype))
    outputs += [Store(name, made[name], nodes[made[name]].type) for name in stored]
    first = group[0].expression
    whole = canonical(attrs.evolve(first, params=(), nodes=tuple(nodes), outputs=tuple(outputs), keeps=()))
    read = [str(node.attr) for node in whole.nodes if node.op == "param"]
    return simplify(attrs.evolve(whole, params=tuple(params[name] for name in read)))


def rows_of(expression: Epilogue) -> tuple[str, ...]:
    """The vectors among its parameters."""
    return tuple(p.name for p in expression.params if p.type.kind is Kind.ROW)


def anonymous(expression: Epilogue) -> Epilogue:
    """The same with names by position: what differs in names only is one kernel, and one object."""
    called = {param.name: f"x{index}" for index, param in enumerate(expression.params)}
    renamed = attrs.evolve(
        expression,
        params=tuple(attrs.evolve(p, name=called[p.name]) for p in expression.params),
        nodes=tuple(
            attrs.evolve(n, hint=None, attr=called[str(n.attr)] if n.op == "param" else n.attr)
            for n in expression.nodes
        ),
        outputs=tuple(attrs.evolve(o, name=f"y{index}") for index, o in enumerate(expression.outputs)),
    )
    return _anonymous.setdefault(renamed, renamed)


_anonymous: dict[Epilogue, Epilogue] = {}
