"""Fewer operations for the same maths: what a kernel computes of an epilogue, before it is written as Python.

    t*h*(1 - s) + t*s  ->  t*(h*(1 - s) + s)

Sums of products that share factors, which derivatives are full of, take their common factors out.  Values may differ
from the epilogue's in the last bits of f32, and where a product overflows.  The text and the reference of the epilogue
stay as they are.
"""

from __future__ import annotations

import itertools
from collections import Counter

import attrs

from codalang.ir.build import canonical
from codalang.ir.epilogue import Epilogue, Node, with_values
from codalang.ir.infer import infer
from codalang.ir.types import Dtype


def factored(epilogue: Epilogue) -> Epilogue:
    """The epilogue with common factors taken out of its sums, where that saves operations."""
    return _Factoring(epilogue).result()


class _Factoring:
    def __init__(self, epilogue: Epilogue) -> None:
        self.epilogue = epilogue
        self.old = epilogue.nodes
        self.uses = Counter(a for node in self.old for a in node.args)
        self.uses.update(v for output in epilogue.outputs for v in output.values)
        self.changed = False
        self.nodes: list[Node] = []
        self.place: dict[int, int] = {}
        self.products: dict[tuple[int, int], int] = {}  # of old nodes, sorted -> the node that is it

    def result(self) -> Epilogue:
        """Rewrite all sums."""
        for index, node in enumerate(self.old):
            if node.op == "mul":
                self.products.setdefault((min(node.args), max(node.args)), index)
        for index, node in enumerate(self.old):
            if index in self.place:
                continue
            found = self._factor(node) if node.op == "add" and node.type.dtype is Dtype.F32 else None
            if found is None:
                found = self._copy(node)
            else:
                self.changed = True
            self.place[index] = found
        if not self.changed:
            return self.epilogue
        outputs = tuple(with_values(o, tuple(self.place[v] for v in o.values)) for o in self.epilogue.outputs)
        return canonical(attrs.evolve(self.epilogue, nodes=tuple(self.nodes), outputs=outputs, keeps=()))

    def _factors(self, index: int) -> tuple[list[int], set[int]]:
        """The factors of a term, through products that nothing else uses, and these products."""
        factors, products, stack = [], set(), [index]
        while stack:
            index = stack.pop()
            node = self.old[index]
            if node.op == "mul" and self.uses[index] == 1 and node.type.dtype is Dtype.F32:
                products.add(index)
                stack.extend(reversed(node.args))
            else:
                factors.append(index)
        return factors, products

    def _factor(self, node: Node) -> int | None:
        """The node for a sum, common factors taken out; None where that saves nothing."""
        terms, products = zip(*(self._factors(a) for a in node.args), strict=True)
        if node.args[0] == node.args[1]:
            return None
        common = Counter(terms[0]) & Counter(terms[1])
        rests = [list((Counter(term) - common).elements()) for term in terms]
        outside = list(common.elements())
        if not outside:
            return None
        if not all(rests):
            inner = self._with_one(node, outside, rests[0] or rests[1], products[0] | products[1])
        elif len(outside) > 1 or max(len(r) for r in rests) > 1:
            inner = self._sum(node, *rests)
        else:
            return None
        return None if inner is None else self._named(node, self._times(node, inner, outside))

    def _with_one(self, node: Node, outside: list[int], rest: list[int], own: set[int]) -> int | None:
        """The sum of a term that is only common factors and of one with more: one of them, `a`, stays in it, b*a + a.

        Best one whose product with another factor is needed anyway.
        """
        for a, b in itertools.product(outside, rest):
            known = self.products.get((min(a, b), max(a, b)))
            if known is not None and known not in own:
                if known not in self.place:  # its factors are there
                    self.place[known] = self._copy(self.old[known])
                outside.remove(a)
                rest.remove(b)
                return self._sum(node, [known, *rest], [a])
        if len(outside) < 2 or not rest:
            return None
        a = outside.pop()
        return self._sum(node, [*rest, a], [a])

    def _copy(self, node: Node) -> int:
        self.nodes.append(attrs.evolve(node, args=tuple(self.place[a] for a in node.args)))
        return len(self.nodes) - 1

    def _named(self, like: Node, index: int) -> int:
        self.nodes[index] = attrs.evolve(self.nodes[index], hint=like.hint)
        return index

    def _sum(self, like: Node, first: list[int], second: list[int]) -> int:
        parts = [self._times(like, self.place[term[0]], term[1:]) for term in (first, second)]
        return self._make(like, "add", parts[0], parts[1])

    def _times(self, like: Node, value: int, factors: list[int]) -> int:
        for factor in factors:
            value = self._make(like, "mul", value, self.place[factor])
        return value

    def _make(self, like: Node, op: str, a: int, b: int) -> int:
        type_ = infer(op, [self.nodes[a].type, self.nodes[b].type], self.epilogue.dims, like.loc, None)
        self.nodes.append(Node(op, (a, b), type_, None, like.loc))
        return len(self.nodes) - 1
