"""Random well-typed programs, and inputs for them.

`programs()` draws a chain of statements: matmuls of values and new parameters, either operand transposed, with random
epilogues (`strategies.epilogues`) on a matmul, on a plain tensor or on nothing; plain matmuls; auxiliary steps.  Values
are shared at will, some results are discarded, some of nobody's use.  It shrinks towards few statements.

What an epilogue or an auxiliary step reads goes through 2*tanh(x/4) first, so that it is in the domain that random
epilogues are tame on, however deep the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch
from hypothesis import strategies as st
from strategies import INDEX_INPUTS, INPUT_BOUND, epilogues
from torch import Tensor

from codalang.autodiff.program_replay import replay
from codalang.ir.bind import granularity
from codalang.ir.build import canonical
from codalang.ir.build_program import ExpressionBuilder, ProgramBuilder
from codalang.ir.dims import ONE, Dim
from codalang.ir.epilogue import Epilogue, Node, Param, with_values
from codalang.ir.program import Apply, Matmul, Program, TensorType, Value
from codalang.ir.types import COL, SCALAR, Dtype, Kind

# Extents are these, and their halves and doubles: every width of every random epilogue is a whole number.
SIZES = {"P": 16, "Q": 32, "B": 2}
# Where a cast makes several elements the greatest, autograd of a fold shares what the derivative gives to the first.
TIED = ("online_max", "online_min")
_STORAGE = {Dtype.F32: None, Dtype.I32: "i32", Dtype.BOOL: "bool"}
Draw = Callable[..., object]


def tamed(epilogue: Epilogue) -> Epilogue:
    """The epilogue of 2*tanh(p/4) for each of its parameters p that are floats."""
    nodes: list[Node] = []
    places: list[int] = []

    constants: dict[tuple[str, Dtype], int] = {}  # each is one node

    def put(node: Node) -> int:
        nodes.append(node)
        place = len(nodes) - 1
        return constants.setdefault((repr(node.attr), node.type.dtype), place) if node.op == "const" else place

    def add(op: str, args: tuple[int, ...], like: Node, attr: float | None = None) -> int:
        return put(Node(op, args, like.type if args else SCALAR, attr))

    for node in epilogue.nodes:
        place = put(attrs.evolve(node, args=tuple(places[a] for a in node.args)))
        if node.op == "param" and node.type.dtype is Dtype.F32:
            scaled = add("mul", (add("const", (), node, 0.25), place), node)
            place = add("mul", (add("const", (), node, 2.0), add("tanh", (scaled,), node)), node)
        places.append(place)
    outputs = tuple(with_values(o, tuple(places[v] for v in o.values)) for o in epilogue.outputs)
    keeps = tuple(attrs.evolve(k, value=places[k.value]) for k in epilogue.keeps)
    return canonical(attrs.evolve(epilogue, nodes=tuple(nodes), outputs=outputs, keeps=keeps))


class _Draft:
    """A program in the making."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.builder = ProgramBuilder("random")
        self.count = 0
        self.new((Dim.of("P"), Dim.of("Q")))
        self.has_samples = False

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def new(self, shape: tuple[Dim, ...], dtype: Dtype = Dtype.F32) -> str:
        """A new parameter."""
        return self.builder.param(self.fresh("p"), shape, _STORAGE[dtype])

    def chance(self, one_in: int) -> bool:
        return self.draw(st.integers(0, one_in - 1)) == one_in - 1

    def pick(self, options: list[str]) -> str:
        """One of the values, the latest first."""
        return options[-1 - self.draw(st.integers(0, len(options) - 1))]

    def matrices(self) -> list[str]:
        return [n for n, t in self.builder.types.items() if t.dtype is Dtype.F32 and t.matrix is not None]

    def matmul(self) -> Matmul:
        """A value times a value, or a new parameter, that fits."""
        made = [n for n in self.matrices() if n.startswith("v")]
        a, a_transposed = self.pick(made if made and not self.chance(4) else self.matrices()), self.chance(3)
        inner = self._matrix(a)[0 if a_transposed else 1]
        fitting = [
            (b, transposed)
            for b in self.matrices()
            for transposed in (True, False)
            if self._matrix(b)[1 if transposed else 0] == inner
        ]
        if fitting and self.chance(2):
            b, b_transposed = fitting[-1 - self.draw(st.integers(0, len(fitting) - 1))]
        else:
            other = Dim.of(self.draw(st.sampled_from(["P", "Q"])))
            b_transposed = not self.chance(3)
            b = self.new((other, inner) if b_transposed else (inner, other))
        return Matmul(a, b, a_transposed, b_transposed)

    def _matrix(self, name: str) -> tuple[Dim, Dim]:
        matrix = self.builder.types[name].matrix
        assert matrix is not None
        return matrix

    def value(self, param: Param, extents: tuple[Dim, ...]) -> Value:
        """What a parameter of an epilogue is given: a value that fits, or a new parameter."""
        m, n, samples = extents
        rows = {Kind.TILE: (m,), Kind.COL: (m,), Kind.ROWS: (samples,)}.get(param.type.kind, ())
        shape = rows + ((n * param.type.width,) if param.type.width is not None else ())
        wanted = TensorType(shape, param.type.dtype)
        options = [name for name, have in self.builder.types.items() if have == wanted]
        if not shape and param.type.dtype is Dtype.F32 and self.chance(3):
            return self.draw(st.sampled_from([0.5, Dim.of("P") / 16, -1.0]))
        if options and not self.chance(3):
            return self.pick(options)
        return self.new(shape, param.type.dtype)

    def apply(self, epilogue: Epilogue) -> None:
        """An application of an epilogue."""
        first = epilogue.accumulator
        host: Matmul | str | None = None
        if first is not None and first.type.dtype is Dtype.F32:
            host = self.matmul() if not self.chance(3) else self.pick(self.matrices())
            rows, columns = self.builder.product(host) if isinstance(host, Matmul) else self._matrix(host)
            assert first.type.width is not None
            extents = (rows, columns / first.type.width)
        else:
            extents = (Dim.of("P"), Dim.of("Q"))
        number = extents[1].evaluate(SIZES)
        rows_number = extents[0].evaluate(SIZES)
        step = granularity(epilogue)
        if number % step or rows_number.denominator != 1 or number > 64 or rows_number > 64:
            return
        samples = Dim.of("B")
        if epilogue.has_samples and rows_number % SIZES["B"]:
            return
        if epilogue.has_samples and not self.has_samples:
            self.has_samples = True
            self.new((samples,))
        hosted = epilogue.params[host is not None :]
        inputs = {p.name: self.value(p, (*extents, samples)) for p in hosted}
        results = [None if self.chance(6) else self.fresh("v") for _ in epilogue.outputs]
        if not any(results):
            results[0] = self.fresh("v")
        known = (*extents, samples) if epilogue.has_samples else extents
        self.builder.apply(epilogue, host, inputs, results, None, known)

    def vector(self) -> None:
        """An auxiliary step on some vectors of one length, scalars and an extent."""
        types = self.builder.types
        vectors = [n for n, t in types.items() if t.dtype is Dtype.F32 and len(t.shape) == 1]
        scalars = [n for n, t in types.items() if t.dtype is Dtype.F32 and not t.shape]
        first = self.pick(vectors) if vectors and not self.chance(4) else self.new((Dim.of("Q"),))
        same = [n for n in vectors if types[n] == types[first]] or [first]
        builder = ExpressionBuilder()

        def read(name: str) -> int:
            value = builder.value(name, types[name])
            small = builder.op("tanh", builder.op("mul", builder.const(0.25), value))
            return builder.op("mul", builder.const(2.0), small)

        total = read(first)
        for _ in range(self.draw(st.integers(0, 3))):
            options = [self.pick(same), *([self.pick(scalars)] if scalars else [])]
            other = read(options[self.draw(st.integers(0, len(options) - 1))])
            op = self.draw(st.sampled_from(["mul", "add", "sub", "rsqrt", "extent", "where", "max", "sigmoid", "stop"]))
            if op == "where":
                mask = builder.op("lt", total, other)
                total = builder.op("where", mask, builder.op("mul", total, other), builder.op("abs", other))
                continue
            if op in ("sigmoid", "stop"):
                other = builder.op("sigmoid" if op == "sigmoid" else "stop_gradient", other)
            if op == "rsqrt":
                other = builder.op("rsqrt", builder.op("add", builder.op("mul", other, other), builder.const(0.5)))
            if op == "extent":
                other = builder.op("div", other, builder.extent(Dim.of("P")))
            total = builder.op(op if op in ("mul", "add", "sub", "max") else "mul", total, other)
        name = self.fresh("v")
        how = self.draw(st.sampled_from([None, None, "sum", "max", "min"]))
        if how in ("max", "min"):  # ties are met with probability zero
            total = builder.op("add", total, builder.value(self.new((types[first].vector,)), TensorType((ONE,))))
        expression = builder.result(name, total) if how is None else builder.total(name, total, how)
        self.builder.vector(name, expression)


@st.composite
def programs(draw: Draw, *, max_steps: int = 5, without: tuple[str, ...] = (), steps: int = 6) -> Program:
    """A random program of at most `max_steps` statements, and as many for each epilogue as `steps` says."""
    draft = _Draft(draw)
    for index in range(draw(st.integers(1, max_steps))):
        sort = draw(st.sampled_from(["apply", "apply", "apply", "vector", "product", "residual"]))
        if sort == "vector":
            draft.vector()
        elif sort == "product":
            matmul = draft.matmul()
            if all(extent.evaluate(SIZES) <= 64 for extent in draft.builder.product(matmul)):
                draft.builder.matmul(draft.fresh("v"), matmul)
        else:
            epilogue = draw(epilogues(max_steps=steps, annotated=False, without=without))
            draft.apply(tamed(attrs.evolve(epilogue, name=f"epilogue_{index}")))
    types = draft.builder.types
    names = [n for n in reversed(list(types)) if types[n].dtype is Dtype.F32]
    # Most often what was made last is a result, seldom a parameter.
    results = [n for n in names if draft.chance(8 if n.startswith("p") else 2)] or names[:1]
    return draft.builder.finish(results)


def with_row_scales(program: Program) -> Program:
    """The program with the rows of what its matmuls under epilogues compute scaled: by one vector for each extent."""
    builder = ProgramBuilder(program.name)
    for param in program.params:
        builder.param(param.name, param.type.shape, param.dtype, param.default)
    scales: dict[Dim, str] = {}
    for statement in program.statements:
        if isinstance(statement, Apply) and isinstance(statement.host, Matmul):
            rows = statement.extents[0]
            if rows not in scales:
                scales[rows] = builder.param(f"s{len(scales) + 1}", (rows,))
            inputs = (*statement.inputs, ("scale", scales[rows]))
            statement = attrs.evolve(statement, epilogue=_with_row_scale(statement.epilogue), inputs=inputs)
        replay(builder, statement)
    return builder.finish(program.results)


def _with_row_scale(epilogue: Epilogue) -> Epilogue:
    """The epilogue on an accumulator whose rows are scaled by a last parameter."""
    accumulator = epilogue.params[0]
    nodes = [Node("param", (), COL, "scale")]
    places: list[int] = []
    for node in epilogue.nodes:
        nodes.append(attrs.evolve(node, args=tuple(places[a] for a in node.args)))
        if node.op == "param" and node.attr == accumulator.name:
            nodes.append(Node("mul", (len(nodes) - 1, 0), accumulator.type))
        places.append(len(nodes) - 1)
    outputs = tuple(with_values(o, tuple(places[v] for v in o.values)) for o in epilogue.outputs)
    keeps = tuple(attrs.evolve(k, value=places[k.value]) for k in epilogue.keeps)
    params = (*epilogue.params, Param("scale", COL))
    return canonical(attrs.evolve(epilogue, params=params, nodes=tuple(nodes), outputs=outputs, keeps=keeps))


def shape_of(type_: TensorType, sizes: Mapping[str, int] = SIZES) -> tuple[int, ...]:
    """The shape of a tensor of some type."""
    return tuple(int(extent.evaluate(sizes)) for extent in type_.shape)


def inputs_for(program: Program, seed: int, sizes: Mapping[str, int] = SIZES) -> dict[str, Tensor]:
    """Fresh inputs: float64 in [-2, 2], small integers, masks; defaults where there are."""
    generator = torch.Generator().manual_seed(seed)
    return {
        p.name: _random(p.type, generator, sizes) if p.default is None else torch.tensor(p.default, dtype=torch.float64)
        for p in program.params
    }


def _random(type_: TensorType, generator: torch.Generator, sizes: Mapping[str, int]) -> Tensor:
    shape = shape_of(type_, sizes)
    if type_.dtype is Dtype.I32:
        return torch.randint(INDEX_INPUTS[0], INDEX_INPUTS[1] + 1, shape, generator=generator).int()
    uniform = 2 * torch.rand(shape, dtype=torch.float64, generator=generator) - 1
    return uniform > 0 if type_.dtype is Dtype.BOOL else INPUT_BOUND * uniform


def cotangents_for(results: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Fresh float64 cotangents in [-1, 1] for every result of floats."""
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    return {
        name: 2 * torch.rand(value.shape, dtype=torch.float64, generator=generator) - 1
        for name, value in results.items()
        if value.is_floating_point()
    }
