"""Where cotangents begin: what the loaded cotangent of an output gives to the values that the output is made of.

| forward                                | cotangent of the value                                                 |
|----------------------------------------|------------------------------------------------------------------------|
| `store y: tile[M, N] = x`              | d_y                                                                    |
| `store v: col[M] = x`                  | where(col_index() == 0, d_v, 0): once per row, though summed over all  |
| `reduce s: col[M] = sum(x)`            | d_s, broadcast                                                         |
| `reduce m: col[M] = max(x)`, or min    | where(col_index() == index, d_m, 0): the first place, as torch.max has it |
| `state r: col[M] = f(x)`               | f's `vjp`, of the inputs, the finalized results and d_r                |
| `state m: col[M] = online_max(x)`      | as that of `reduce`                                                    |

A result that the backward needs, the index of a maximum above all, is loaded; the forward keeps those that it does not
store anyway.

exp(x - lse) is a softmax only where x is what lse was made of, to the last bit: a gradient `softmax - 1` of a confident
prediction is much smaller than the error that rounding x to bf16 makes.  Such an x is noted to be kept *exactly*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import reduce

import attrs

from codalang.autodiff.graph import Expr, Graph, apply, column_index, row_index
from codalang.errors import CodaUnsupportedError
from codalang.ir.builtin_states import ARGMAX, ARGMAX2, ONLINE_MAX, ONLINE_MIN
from codalang.ir.epilogue import Epilogue, Reduce, State, Store
from codalang.ir.states import Function, StateDef
from codalang.ir.types import Dtype, Kind, ValueType

# Storage dtypes in which a result is as exact as in registers (None is that of the registers).
EXACT = (None, "f32", "i32", "i64")

# A node of the forward, and a contribution to its cotangent.
Seed = tuple[int, Expr]


@attrs.frozen
class Transform:
    """A stateful transform of values of the graph; its results have this kind and width."""

    values: tuple[int, ...]
    definition: StateDef
    kind: Kind
    width: Fraction | None

    def type_of(self, result: int) -> ValueType:
        """The type of a result."""
        return ValueType(self.kind, self.width, self.definition.results[result][1])


@attrs.frozen
class Result:
    """A finalized result that the backward loads: where, and for which output it is kept if the forward lacks it."""

    node: int
    transform: Transform
    index: int
    keeper: str

    @property
    def type(self) -> ValueType:
        """Its type."""
        return self.transform.type_of(self.index)

    @property
    def wanted_name(self) -> str:
        """What to call it where the forward has to keep it."""
        return f"saved_{self.keeper}_{self.transform.definition.results[self.index][0]}"


class Results:
    """The finalized results that the backward asked for, each a leaf of the graph, and what is to be kept exactly."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.asked: dict[tuple[Transform, int], Result] = {}
        self.exact: set[int] = set()

    def node(self, transform: Transform, index: int, keeper: str) -> int:
        """The leaf that stands for a result of a transform, which is kept for the output `keeper`."""
        key = (transform, index)
        if key not in self.asked:
            leaf = self.graph.param(f"result {len(self.asked)}", transform.type_of(index))
            self.asked[key] = Result(leaf, transform, index, keeper)
        return self.asked[key].node


def transform_of(state: State, indices: Sequence[int]) -> Transform:
    """The transform that an output is a result of; `indices` gives the graph's nodes for the epilogue's."""
    values = tuple(indices[v] for v in state.values)
    return Transform(values, state.definition, state.type.kind, state.type.width)


def seeds(
    graph: Graph,
    epilogue: Epilogue,
    indices: Sequence[int],
    loaded: Mapping[str, int],
    active: Sequence[bool],
    results: Results,
) -> list[Seed]:
    """What the outputs' cotangents give to the values that they are made of, output by output.

    Args:
        graph: holds the forward's nodes, the node i of `epilogue` at `indices[i]`; gets new ones.
        loaded: output -> the node that loads its cotangent, where it has one.
        active: for each node of the forward, whether its cotangent is wanted.
        results: notes what the backward loads.

    Raises:
        CodaUnsupportedError: a cotangent arrives at a stateful transform without a `vjp`.
    """
    found: list[Seed] = []
    done: set[Transform] = set()
    for output in epilogue.outputs:
        if output.name not in loaded or not any(active[indices[v]] for v in output.values):
            continue
        if isinstance(output, State):
            transform = transform_of(output, indices)
            if transform not in done:
                done.add(transform)
                same = [s for s in epilogue.states if transform_of(s, indices) == transform and s.name in loaded]
                found += _through_state(graph, epilogue, transform, same, loaded, results)
            continue
        cotangent = Expr(graph, loaded[output.name], epilogue.domain_width(output))
        value = indices[output.value]
        if isinstance(output, Store):
            found.append((value, _once(cotangent, output.type.kind)))
        else:
            found.append((value, REDUCTION_RULES[output.how](cotangent, value, output, results)))
    return found


def _once(cotangent: Expr, kind: Kind) -> Expr:
    """The cotangent of a stored vector, at one place along each axis that it lacks, as those are summed over."""
    masks = []
    if not kind.has_rows:
        masks.append(apply("eq", row_index(cotangent.graph, _width(cotangent)), 0))
    if not kind.has_columns:
        masks.append(apply("eq", column_index(cotangent.graph, _width(cotangent)), 0))
    return _masked(cotangent, masks)


def _masked(cotangent: Expr, masks: Sequence[Expr]) -> Expr:
    """The cotangent where all masks hold, zero elsewhere."""
    if not masks:
        return cotangent
    mask = masks[0] if len(masks) == 1 else apply("and", *masks)
    return attrs.evolve(apply("where", mask, cotangent, 0.0), width=cotangent.width)


def _width(cotangent: Expr) -> Fraction:
    assert cotangent.width is not None  # it has its output's domain
    return cotangent.width


# ---- reductions ------------------------------------------------------------------------------------------------------


def _at_the_first(cotangent: Expr, value: int, output: Reduce | State, results: Results) -> Expr:
    """The cotangent of a maximum, at the first place that it is at."""
    graph, width, kind = cotangent.graph, _width(cotangent), output.type.kind
    indices = [] if kind.has_rows and not kind.has_columns else [row_index(graph, width)]
    indices += [] if kind.has_columns else [column_index(graph, width)]
    definition = ARGMAX if len(indices) == 1 else ARGMAX2
    transform = Transform((value, *(i.node for i in indices)), definition, kind, output.type.width)
    masks = []
    for position, index in enumerate(indices, start=1):
        first = results.node(transform, position, output.name)
        masks.append(apply("eq", index, Expr(graph, first, width)))
    return _masked(cotangent, masks)


def _at_the_first_least(cotangent: Expr, value: int, output: Reduce | State, results: Results) -> Expr:
    """The cotangent of a minimum, which is the maximum of the negated value."""
    return _at_the_first(cotangent, cotangent.graph.op("neg", value), output, results)


REDUCTION_RULES: dict[str, Callable[[Expr, int, Reduce, Results], Expr]] = {
    "sum": lambda cotangent, value, output, results: cotangent,
    "max": _at_the_first,
    "min": _at_the_first_least,
}


# ---- stateful transforms ---------------------------------------------------------------------------------------------

# The transforms that are a `reduce` by another name.
EXTREMA: dict[StateDef, Callable[[Expr, int, State, Results], Expr]] = {
    ONLINE_MAX: _at_the_first,
    ONLINE_MIN: _at_the_first_least,
}


def _through_state(
    graph: Graph,
    epilogue: Epilogue,
    transform: Transform,
    outputs: Sequence[State],
    loaded: Mapping[str, int],
    results: Results,
) -> list[Seed]:
    """The `vjp` of a transform, on its inputs' whole domain.  `outputs` are its results that have cotangents."""
    definition = transform.definition
    if definition in EXTREMA:
        arrived = reduce(lambda a, b: graph.op("add", a, b), [loaded[o.name] for o in outputs])
        cotangent = Expr(graph, arrived, epilogue.domain_width(outputs[0]))
        (value,) = transform.values
        return [(value, EXTREMA[definition](cotangent, value, outputs[0], results))]
    if definition.vjp is None:
        raise CodaUnsupportedError(
            f"`{outputs[0].name}` of `{epilogue.name}` is a `{definition.name}`, which has no `vjp`",
            outputs[0].loc,
            hint="give the state a `vjp` clause, wrap its inputs in stop_gradient, or ask for gradients without "
            "its cotangent",
        )
    arguments: dict[str, int | None] = {
        name: value for (name, _), value in zip(definition.inputs, transform.values, strict=True)
    }
    used = {str(n.attr) for n in definition.vjp.nodes if n.op == "param"}
    for position, (name, _) in enumerate(definition.results):
        if name in used:
            arguments[name] = results.node(transform, position, outputs[0].name)
        cotangents = [loaded[o.name] for o in outputs if o.result == position]
        arguments[f"d_{name}"] = reduce(lambda a, b: graph.op("add", a, b), cotangents) if cotangents else None
    width = epilogue.domain_width(outputs[0])
    floats = [
        value for value, (_, dtype) in zip(transform.values, definition.inputs, strict=True) if dtype is Dtype.F32
    ]
    if _amplifies(definition, definition.vjp):
        results.exact.update(floats)
    found = zip(floats, inlined(graph, definition.vjp, arguments), strict=True)
    return [(value, Expr(graph, node, width)) for value, node in found if node is not None]


def _amplifies(definition: StateDef, vjp: Function) -> bool:
    """Does a `vjp` take the exponential of an input and a result together?"""
    inputs, finalized = {name for name, _ in definition.inputs}, {name for name, _ in definition.results}
    origins: list[set[str]] = []
    for node in vjp.nodes:
        origins.append({str(node.attr)} if node.op == "param" else set().union(*(origins[a] for a in node.args)))
        if node.op in ("exp", "exp2") and origins[-1] & inputs and origins[-1] & finalized:
            return True
    return False


def inlined(graph: Graph, function: Function, arguments: Mapping[str, int | None]) -> list[int | None]:
    """The results of a function as nodes of the graph.  None is zero, and what vanishes with it is left out."""
    nodes: list[int | None] = []
    for node in function.nodes:
        if node.op == "param":
            nodes.append(arguments[str(node.attr)])
        elif node.op == "const":
            nodes.append(graph.add(node))
        else:
            nodes.append(_without_zeros(graph, node.op, [nodes[a] for a in node.args], node.attr))
    return [nodes[r] for r in function.results]


def _without_zeros(graph: Graph, op: str, args: Sequence[int | None], attr: str | float | int | None) -> int | None:
    """An op on nodes of which some are zero (None), or None where the result is zero."""
    if None not in args:
        return graph.op(op, *(a for a in args if a is not None), attr=attr)
    if op in ("mul", "neg") or (op == "div" and args[0] is None) or (op == "where" and args[1] is args[2]):
        return None
    if op in ("add", "sub"):
        left, right = args
        if left is not None or right is None:
            return left
        return right if op == "add" else graph.op("neg", right)
    return graph.op(op, *(graph.const(0.0) if a is None else a for a in args), attr=attr)
