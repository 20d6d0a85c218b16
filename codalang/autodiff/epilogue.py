"""The derivative of an epilogue, which is again an epilogue: the duality of `rules`, end to end.

1. `flow`      cotangents go back from the outputs to the parameters, in one graph beside the forward's nodes
2. here        a tile's cotangent is stored, a row's, col's or scalar's is summed over what it was broadcast over
3. `save`      which forward values the backward loads; what lies between them and its outputs is recomputed
4. here        the graph from those loads to the outputs is the backward; the forward gets the missing stores
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

import attrs

from codalang.autodiff.cut import Kept
from codalang.autodiff.derivative import Derivative, Load
from codalang.autodiff.flow import flow_back
from codalang.autodiff.graph import Expr, Graph
from codalang.autodiff.names import Names
from codalang.autodiff.save import select
from codalang.errors import CodaCallError
from codalang.ir.build import canonical
from codalang.ir.epilogue import Epilogue, Node, Output, Param, Reduce, Store
from codalang.ir.infer import infer
from codalang.ir.types import Kind


def derive(
    epilogue: Epilogue,
    *,
    wrt: Collection[str] | None = None,
    cotangents: Collection[str] | None = None,
    share: bool = True,
    hosted: bool = False,
    kept: Collection[Load] | None = None,
) -> Derivative:
    """Derive an epilogue's backward.

    Args:
        epilogue: the forward.
        wrt: parameters whose gradient is wanted (default: all); nothing else is computed.
        cotangents: outputs whose cotangent is present (default: all); that of the others is zero.
        share: parameters whose gradients are equal, and of equal annotated dtype, share one output.
        hosted: the accumulator is a plain tensor that can be loaded again, not the result of a matmul.
        kept: what the backward may load beside cotangents, where the forward has run already ("param" and "output");
            nothing is saved then.  Default: whatever moves the fewest bytes, saving included.

    Raises:
        CodaCallError: `wrt` or `cotangents` has a name that the epilogue has not.
        CodaUnsupportedError: a cotangent arrives at a reduction without a rule, or `kept` is not enough.
    """
    wanted = _checked(epilogue, "wrt", wrt, [p.name for p in epilogue.params])
    present = _checked(epilogue, "cotangents", cotangents, [o.name for o in epilogue.outputs])
    names = Names(epilogue)
    graph = Graph(epilogue.dims)
    indices = graph.add_epilogue(epilogue)
    seeds = {o.name: graph.param(names.cotangents[o.name], o.type) for o in epilogue.outputs if o.name in present}
    found = flow_back(graph, epilogue, indices, wanted, seeds, names)
    outputs, gradients = _outputs(graph, epilogue, names, wanted, found, share)
    loaded, plan = select(graph, epilogue, indices, seeds.values(), [o.value for o in outputs], names, hosted, kept)
    inputs = _inputs(graph, epilogue, names, loaded)
    backward = _backward(graph, epilogue, outputs, inputs)
    loads = {i.param.name: i.load for i in inputs}
    return Derivative(
        forward=_forward(graph, epilogue, indices, loaded),
        backward=backward,
        saved=tuple(str(k.name) for k in loaded.values() if k.how == "saved"),
        gradients=gradients,
        cotangents={loads[p.name].name: p.name for p in backward.params if loads[p.name].source == "cotangent"},
        loads={p.name: loads[p.name] for p in backward.params},
        plan=plan,
    )


def _checked(epilogue: Epilogue, argument: str, names: Collection[str] | None, known: Sequence[str]) -> list[str]:
    """The chosen names in the epilogue's order.  Raises CodaCallError for one it does not have."""
    if names is None:
        return list(known)
    for name in [names] if isinstance(names, str) else names:
        if name not in known or isinstance(names, str):
            raise CodaCallError(
                f"`{argument}` of `{epilogue.name}` must be a collection of names out of {', '.join(known) or 'none'}; "
                f"got {names!r}",
                argument=argument,
            )
    return [name for name in known if name in names]


# ---- the gradients as outputs ---------------------------------------------------------------------------------------


def _outputs(
    graph: Graph, epilogue: Epilogue, names: Names, wanted: Sequence[str], found: Mapping[str, Expr], share: bool
) -> tuple[list[Output], dict[str, str | None]]:
    """The backward's outputs, with values in the graph, and which of them is each parameter's gradient."""
    outputs: list[Output] = []
    gradients: dict[str, str | None] = {}
    for name in wanted:
        if name not in found:
            gradients[name] = None
            continue
        output = _output(names.gradients[name], epilogue.param(name), found[name])
        same = [o for o in outputs if share and attrs.evolve(o, name=output.name) == output]
        gradients[name] = same[0].name if same else output.name
        outputs += [] if same else [output]
    return outputs, gradients


def _output(name: str, param: Param, cotangent: Expr) -> Output:
    """Store a tile's cotangent; sum that of a row, col or scalar over the axes it was broadcast over."""
    if param.type.kind is Kind.TILE:
        return Store(name, cotangent.node, param.type, param.dtype)
    # A sum of a value without columns runs over the columns of the result, or N; its cotangent may have others.
    summed = param.type.width or cotangent.type.width or Fraction(1)
    assert cotangent.width is not None
    value = float(cotangent.width / summed) * cotangent
    return Reduce(name, value.node, param.type, "sum", param.dtype)


# ---- the two epilogues ----------------------------------------------------------------------------------------------


@attrs.frozen
class _Input:
    """A parameter that the backward may have: the node that it replaces in the graph, and what it is loaded with."""

    node: int
    param: Param
    load: Load


def _inputs(graph: Graph, epilogue: Epilogue, names: Names, kept: Mapping[int, Kept]) -> list[_Input]:
    """Cotangents, forward outputs, saved values and forward parameters, each in the forward's order."""

    def leaf(name: str, param: Param | Output) -> int:
        return graph.param(name, param.type)

    cotangents = [
        _Input(leaf(name, o), Param(name, o.type, o.dtype), Load("cotangent", o.name))
        for o in epilogue.outputs
        for name in [names.cotangents[o.name]]
    ]
    loaded = {way.name: index for index, way in kept.items() if way.how == "output"}
    outputs = []
    for o in epilogue.stores:
        if o.name in loaded:
            # A parameter may have an output's name without being what is stored under it.
            other = epilogue.has_param(o.name) and leaf(o.name, epilogue.param(o.name)) != loaded[o.name]
            name = names.fresh(o.name) if other else o.name
            outputs.append(_Input(loaded[o.name], Param(name, o.type, o.dtype), Load("output", o.name)))
    saved = [
        _Input(index, Param(str(way.name), graph.nodes[index].type), Load("saved", str(way.name)))
        for index, way in kept.items()
        if way.how == "saved"
    ]
    replaced = {i.node for i in outputs + saved}
    params = [_Input(leaf(p.name, p), p, Load("param", p.name)) for p in epilogue.params]
    return cotangents + outputs + saved + [i for i in params if i.node not in replaced]


def _backward(graph: Graph, epilogue: Epilogue, outputs: Sequence[Output], inputs: Sequence[_Input]) -> Epilogue:
    """The graph from the inputs to the outputs."""
    nodes = list(graph.nodes)
    for i in inputs:
        nodes[i.node] = Node("param", (), i.param.type, i.param.name)
    live = canonical(Epilogue(f"{epilogue.name}_backward", epilogue.dims, (), tuple(nodes), tuple(outputs)))
    used = {node.attr for node in live.nodes if node.op == "param"}
    params = [i.param for i in inputs if i.param.name in used]
    # The first tile is what a hosting matmul computes.
    accumulator = next((p for p in params if p.type.kind is Kind.TILE), None)
    params.sort(key=lambda p: p is not accumulator)
    return canonical(attrs.evolve(live, params=tuple(params), nodes=_constants_first(live)))


def _constants_first(epilogue: Epilogue) -> tuple[Node, ...]:
    """Write 2 * (a * b), where the product has no other use, as 2 * a * b: a factor goes to the first operand."""
    nodes, uses = list(epilogue.nodes), epilogue.uses()
    for index in range(len(nodes)):
        while True:
            node = nodes[index]
            if node.op != "mul" or nodes[node.args[0]].op != "const":
                break
            constant, product = node.args
            inner = nodes[product]
            if inner.op != "mul" or inner.hint is not None or uses[product] > 1 or nodes[inner.args[0]].op == "const":
                break
            first, second = inner.args
            type_ = infer("mul", [nodes[constant].type, nodes[first].type], epilogue.dims)
            nodes[product] = Node("mul", (constant, first), type_)
            nodes[index] = attrs.evolve(node, args=(product, second))
            index = product
    return tuple(nodes)


def _forward(graph: Graph, epilogue: Epilogue, indices: Sequence[int], kept: Mapping[int, Kept]) -> Epilogue:
    """The epilogue with a store of each saved value."""
    saved = {index: way for index, way in kept.items() if way.how == "saved"}
    if not saved:
        return epilogue
    nodes = list(epilogue.nodes)
    place: dict[int, int] = {}
    for own, index in enumerate(indices):
        place.setdefault(index, own)
    # A saved value may be one that only a derivative rule computes.
    missing = set(saved) - set(place)
    pending = list(missing)
    while pending:
        new = set(graph.nodes[pending.pop()].args) - set(place) - missing
        missing |= new
        pending += new
    for index in sorted(missing):
        node = graph.nodes[index]
        place[index] = len(nodes)
        nodes.append(attrs.evolve(node, args=tuple(place[a] for a in node.args)))
    stores = tuple(Store(str(way.name), place[index], graph.nodes[index].type) for index, way in saved.items())
    return canonical(attrs.evolve(epilogue, nodes=tuple(nodes), outputs=epilogue.outputs + stores))
