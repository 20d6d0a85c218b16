"""Row scales of cotangents, applied behind the next matmul instead of before their store.

The derived epilogue of `z = (h @ W.T) * r` stores d_acc = d_z * r.  Where r is small, as in rows with outliers, that
leaves the range of f16, though d_z does not.  A row scale commutes with the matmuls that read it:

    before                        after
    d_acc = d_z * r               d_acc = d_z              nothing to store where d_z is a tensor already
    d_h   = d_acc @ W             d_h   = d_acc @ W        to be scaled: by the epilogue on it, or by those that load it
    d_W   = d_acc.T @ h           d_W   = d_acc.T @ (h * r)

Statements are rewritten from the first to the last; a sum of values that wait for the same scale waits for it, too.
h * r is one kernel, shared by all that read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs

from codalang.autodiff.graph import Graph
from codalang.autodiff.program_fuse import is_float_tile, passed_through, with_outputs
from codalang.autodiff.program_replay import replay, replayed
from codalang.ir.build import EpilogueBuilder, canonical
from codalang.ir.epilogue import Epilogue, Node, Output, Param, Store, with_values
from codalang.ir.names import Namer
from codalang.ir.program import Apply, Matmul, Product, Program, Statement, Value, Vector
from codalang.ir.types import COL, Kind, tile

LINEAR = ("add", "sub", "neg", "join")  # a factor of every operand is a factor of the result


def with_scales_delayed(program: Program, forward: Collection[str], fixed: Collection[str]) -> Program:
    """The backward with its row scales delayed.

    Args:
        program: the backward.
        forward: its parameters that are values of the forward: the scales.
        fixed: its values that are stored as they are, besides its results.
    """
    delay = _Delay(program, frozenset(forward), frozenset(fixed) | frozenset(program.results))
    for statement in program.statements:
        delay.add(statement)
    return delay.builder.finish(program.results)


class _Delay:
    """The program in the making.

    Attributes:
        waiting: value -> the scale that its rows wait for.
        instead: value that is not stored -> the value that it would be a copy of.
        multiplied: (matrix, scale) -> their product.
    """

    def __init__(self, program: Program, scales: frozenset[str], fixed: frozenset[str]) -> None:
        self.types = replayed(program).types
        self.builder = replayed(attrs.evolve(program, statements=()))
        self.scales = scales
        self.may_wait = {name for name in self.types if name not in fixed}
        self.waiting: dict[str, str] = {}
        self.instead: dict[str, str] = {}
        self.multiplied: dict[tuple[str, str], str] = {}
        self.namer = Namer([*self.types, *program.dims])
        for statement in program.statements:
            self.may_wait.difference_update(_read_scaled(statement))

    def add(self, statement: Statement) -> None:
        """Rewrite the next statement."""
        if isinstance(statement, Vector):
            replay(self.builder, statement)
        elif isinstance(statement, Product):
            self._product(statement)
        else:
            self._apply(statement)

    def _product(self, statement: Product) -> None:
        matmul, scale = self._matmul(statement.matmul)
        if scale is None or statement.result in self.may_wait:
            replay(self.builder, attrs.evolve(statement, matmul=matmul))
            if scale is not None:
                self.waiting[statement.result] = scale
            return
        extents = self.types[statement.result].matrix
        assert extents is not None
        replay(self.builder, Apply((statement.result,), _SCALE_ROWS, matmul, (("r", scale),), extents, statement.loc))

    def _matmul(self, matmul: Matmul) -> tuple[Matmul, str | None]:
        """The matmul as it is now, and the scale that the rows of its result wait for.

        Where it sums over the rows of both operands, the scale of one is applied to the other.
        """
        left, right = self.waiting.get(matmul.a), self.waiting.get(matmul.b)
        a, b = self.instead.get(matmul.a, matmul.a), self.instead.get(matmul.b, matmul.b)
        if not matmul.a_transposed:
            return attrs.evolve(matmul, a=a), left
        if left is not None:
            b = self._times(b if right is None else self._times(b, right), left)
        elif right is not None:
            a = self._times(a, right)
        return attrs.evolve(matmul, a=a, b=b), None

    def _times(self, matrix: str, scale: str) -> str:
        """The matrix with its rows scaled."""
        key = (matrix, scale)
        if key not in self.multiplied:
            extents = self.builder.types[matrix].matrix
            assert extents is not None
            name = self.multiplied[key] = self.namer.fresh(f"{matrix}_scaled")
            replay(self.builder, Apply((name,), _SCALE_ROWS, matrix, (("r", scale),), extents))
        return self.multiplied[key]

    def _apply(self, statement: Apply) -> None:
        read = dict(statement.inputs)
        if isinstance(statement.host, str):
            read[statement.epilogue.params[0].name] = statement.host
        waiting = {p: self.waiting[v] for p, v in read.items() if isinstance(v, str) and v in self.waiting}
        now = {p: self.instead.get(v, v) if isinstance(v, str) else v for p, v in read.items()}
        host: Matmul | str | None = None
        if isinstance(statement.host, Matmul):
            host, scale = self._matmul(statement.host)
            if scale is not None:
                waiting[statement.epilogue.params[0].name] = scale
        elif statement.host is not None:
            host = self.instead.get(statement.host, statement.host)
        body = _Body(statement, waiting, self.scales)
        late: dict[str, str] = {}  # output that waits -> the value that it is
        for result, output in zip(statement.results, statement.epilogue.outputs, strict=True):
            scale = body.factor(output)
            if result in self.may_wait and scale is not None:
                assert result is not None
                late[output.name], self.waiting[result] = result, body.given[scale]
        if waiting or late:
            self._rewritten(statement, host, now | body.given, body.finish(late), late)
        else:
            inputs = tuple((p, now[p]) for p, _ in statement.inputs)
            replay(self.builder, attrs.evolve(statement, host=host, inputs=inputs))

    def _rewritten(
        self,
        statement: Apply,
        host: Matmul | str | None,
        given: Mapping[str, Value],
        epilogue: Epilogue,
        late: Mapping[str, str],
    ) -> None:
        """The application of another epilogue; what would be a copy of a tensor is not stored."""
        annotated = {output.name for output in epilogue.outputs if output.dtype is not None}
        for name, param in passed_through(epilogue).items():
            copied = given.get(param)
            if name in late and name not in annotated and isinstance(copied, str):
                self.instead[late[name]] = copied
        pairs = zip(statement.results, epilogue.outputs, strict=True)
        kept = [(result, output) for result, output in pairs if result not in self.instead]
        if all(result is None for result, _ in kept):
            return
        first = None if host is None else statement.epilogue.params[0].name
        epilogue = with_outputs(epilogue, [output for _, output in kept], first)
        inputs = tuple((p.name, given[p.name]) for p in epilogue.params if p.name != first)
        results = tuple(result for result, _ in kept)
        replay(self.builder, attrs.evolve(statement, results=results, epilogue=epilogue, host=host, inputs=inputs))


class _Body:
    """The epilogue of a statement, where parameters wait for scales, with the scales of its nodes kept apart.

    Attributes:
        given: parameter that is a scale -> its value.
    """

    def __init__(self, statement: Apply, waiting: Mapping[str, str], scales: frozenset[str]) -> None:
        self.epilogue = statement.epilogue
        self.graph = Graph(self.epilogue.dims)
        columns = {p.name for p in self.epilogue.params if p.type == COL}
        inputs = {p: v for p, v in statement.inputs if isinstance(v, str) and p in columns}
        own = {p: v for p, v in inputs.items() if v in scales}
        names = [*self.epilogue.dims, *(p.name for p in self.epilogue.params)]
        namer = Namer([*names, *(o.name for o in self.epilogue.outputs)])
        params = {value: p for p, value in inputs.items()}
        for value in waiting.values():
            if value not in params:
                params[value] = namer.fresh("r")
        self.given = own | {params[value]: value for value in waiting.values()}
        self.waiting = {p: params[value] for p, value in waiting.items()}
        self.places: list[tuple[int, str | None]] = []  # of each node: without its scale, and that
        for node in self.epilogue.nodes:
            self.places.append(self._place(node))

    def _place(self, node: Node) -> tuple[int, str | None]:
        """A node without its scale, and that scale."""
        graph, args = self.graph, [self.places[a] for a in node.args]
        factors = {factor for _, factor in args}
        plain = attrs.evolve(node, args=tuple(index for index, _ in args))
        if node.op == "param":
            return graph.add(node), self.waiting.get(str(node.attr))
        if node.op == "mul" and factors == {None}:
            for x, r in ((0, 1), (1, 0)):
                column, other = (graph.nodes[args[i][0]] for i in (r, x))
                if column.op == "param" and column.attr in self.given and other.type.kind is Kind.TILE:
                    return args[x][0], str(column.attr)
        if node.op in LINEAR and len(factors) == 1:
            (factor,) = factors
            return graph.add(plain), factor
        if node.op == "mul" and graph.number(args[0][0]) is not None:
            return graph.add(plain), args[1][1]
        return graph.add(attrs.evolve(node, args=tuple(self._whole(*place) for place in args))), None

    def _whole(self, index: int, factor: str | None) -> int:
        """The node with its scale."""
        return index if factor is None else self.graph.plain("mul", index, self.graph.param(factor, COL))

    def factor(self, output: Output) -> str | None:
        """The scale of a stored tile."""
        place, factor = self.places[output.values[0]]
        return factor if isinstance(output, Store) and self.graph.nodes[place].type == output.type else None

    def finish(self, late: Collection[str]) -> Epilogue:
        """The epilogue, with these outputs without their scales; scales that it has not yet come last."""
        outputs = []
        for output in self.epilogue.outputs:
            places = [self.places[v] for v in output.values]
            values = [index if output.name in late else self._whole(index, factor) for index, factor in places]
            outputs.append(with_values(output, tuple(values)))
        known = {p.name for p in self.epilogue.params}
        params = (*self.epilogue.params, *(Param(name, COL) for name in self.given if name not in known))
        nodes = tuple(self.graph.nodes)
        return canonical(attrs.evolve(self.epilogue, params=params, nodes=nodes, outputs=tuple(outputs), keeps=()))


def _scale_rows() -> Epilogue:
    """A tile with its rows scaled."""
    builder = EpilogueBuilder("scale_rows", ("M", "N"))
    builder.store("y", builder.op("mul", builder.param("x", tile()), builder.param("r", COL)), tile())
    return builder.finish()


_SCALE_ROWS = _scale_rows()


def _read_scaled(statement: Statement) -> set[str]:
    """The values whose rows must be scaled where a statement reads them: all but tiles, left operands of matmuls, and
    operands of matmuls that sum over the rows of both."""
    if isinstance(statement, Vector):
        return set(statement.reads)
    found: set[str] = set()
    matmul = statement.matmul if isinstance(statement, Product) else statement.host
    if isinstance(matmul, Matmul):
        over_rows = matmul.a_transposed and not matmul.b_transposed
        found |= set() if over_rows else {matmul.b} | ({matmul.a} if matmul.a_transposed else set())
    if isinstance(statement, Apply):
        params = {p.name: p for p in statement.epilogue.params}
        found |= {v for name, v in statement.inputs if isinstance(v, str) and not is_float_tile(params[name])}
    return found
