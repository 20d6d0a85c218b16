"""The derivative of an epilogue, which is again an epilogue: the duality of `rules`, end to end.

1. `flow`      cotangents go back from the outputs to the parameters, in one graph beside the forward's nodes, from
               where `seeds` has them begin
2. here        a tile's cotangent is stored, a row's, col's or scalar's is summed over what it was broadcast over
3. `save`      which forward values the backward loads; what lies between them and its outputs is recomputed
4. here        the graph from those loads to the outputs is the backward; the forward gets the missing stores, and the
               missing results of stateful transforms
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

import attrs

from codalang.autodiff.cut import Kept
from codalang.autodiff.derivative import ALONE, Derivative, Load, Surroundings
from codalang.autodiff.flow import flow_back
from codalang.autodiff.graph import Expr, Graph
from codalang.autodiff.names import Names, chosen
from codalang.autodiff.save import not_kept, select
from codalang.autodiff.seeds import EXACT, Result, Results, transform_of
from codalang.errors import CodaUnsupportedError
from codalang.ir.build import canonical
from codalang.ir.epilogue import Epilogue, Node, Output, Param, Reduce, State, Store
from codalang.ir.infer import infer
from codalang.ir.types import Dtype, Kind


def derive(
    epilogue: Epilogue,
    *,
    wrt: Collection[str] | None = None,
    cotangents: Collection[str] | None = None,
    share: bool = True,
    hosted: bool = False,
    kept: Collection[Load] | None = None,
    around: Surroundings = ALONE,
    budget: float | None = None,
) -> Derivative:
    """Derive an epilogue's backward.

    Args:
        epilogue: the forward.
        wrt: parameters whose gradient is wanted (default: all); nothing else is computed.
        cotangents: outputs whose cotangent is present (default: all); others are zero, and indices have none.
        share: parameters whose gradients are equal, and of equal annotated dtype, share one output.
        hosted: the accumulator is a plain tensor that can be loaded again, not the result of a matmul.
        kept: what the backward may load beside cotangents, where the forward has run already ("param" and "output");
            nothing is saved then.  Default: whatever moves the fewest bytes, saving included.
        around: what the program around it does with its values.
        budget: bytes per element of [M, N] that the forward may keep beyond its outputs.  What moves the fewest bytes
            is then traded for what keeps fewer, at the least price of a byte kept, in bytes moved, that does it.

    Raises:
        CodaCallError: `wrt` or `cotangents` has a name that the epilogue has not.
        CodaUnsupportedError: a cotangent arrives at a stateful transform without a `vjp`, or `kept` or the budget is
            not enough.
    """
    if budget is None:
        return _derived(epilogue, wrt, cotangents, share, hosted, kept, around)
    found = []
    for price in PRICES:
        dearer = attrs.evolve(around, price=price)
        derivative = _derived(epilogue, wrt, cotangents, share, hosted, kept, dearer)
        found.append(2 * sum((d.store for d in derivative.plan), Fraction(0)))
        if found[-1] <= budget:
            return derivative
    raise CodaUnsupportedError(
        f"the backward of `{epilogue.name}` keeps {float(min(found)):g} bytes per element at the least, which is more "
        f"than the budget of {budget:g}",
        epilogue.loc,
        hint="a matmul's result is not computed again: keep it, or host the epilogue on a tensor that is kept anyway",
    )


# What a byte kept may cost, in bytes moved, before a budget is given up.
PRICES = (0, 1, 2, 4, 8, 16, 1024)


def _derived(
    epilogue: Epilogue,
    wrt: Collection[str] | None,
    cotangents: Collection[str] | None,
    share: bool,
    hosted: bool,
    kept: Collection[Load] | None,
    around: Surroundings,
) -> Derivative:
    """See `derive`."""
    wanted = chosen(epilogue.name, "wrt", wrt, [p.name for p in epilogue.params])
    present = chosen(epilogue.name, "cotangents", cotangents, [o.name for o in epilogue.outputs])
    names = Names(epilogue)
    graph = Graph(epilogue.dims)
    indices = graph.add_epilogue(epilogue)
    floats = [o for o in epilogue.outputs if o.name in present and o.type.dtype is Dtype.F32]
    seeds = {o.name: graph.param(names.cotangents[o.name], o.type) for o in floats}
    results = Results(graph)
    found = flow_back(graph, epilogue, indices, wanted, seeds, results, names)
    outputs, gradients = _outputs(graph, epilogue, names, wanted, found, share)
    again = _again(epilogue, indices, names, around)
    outputs += again.values()
    roots = [o.value for o in outputs]
    loaded, plan = select(graph, epilogue, indices, seeds.values(), results, roots, names, hosted, kept, around)
    finals = _finals(graph, epilogue, indices, names, results, _live(graph, outputs, loaded), kept)
    inputs = _inputs(graph, epilogue, names, loaded, finals)
    backward = _backward(graph, epilogue, outputs, inputs)
    loads = {i.param.name: i.load for i in inputs}
    forward = _forward(graph, epilogue, indices, loaded, finals)
    return Derivative(
        forward=forward,
        backward=backward,
        saved=tuple(o.name for o in forward.outputs[len(epilogue.outputs) :]),
        gradients=gradients,
        cotangents={loads[p.name].name: p.name for p in backward.params if loads[p.name].source == "cotangent"},
        loads={p.name: loads[p.name] for p in backward.params},
        plan=plan,
        again={name: store.name for name, store in again.items()},
    )


def _again(epilogue: Epilogue, indices: Sequence[int], names: Names, around: Surroundings) -> dict[str, Store]:
    """The stores of outputs that the backward makes again."""
    found = {}
    for store in epilogue.stores:
        if store.name in around.again:
            name = names.fresh(store.name) if epilogue.has_param(store.name) else store.name
            found[store.name] = attrs.evolve(store, name=name, value=indices[store.value])
    return found


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
class _Final:
    """A finalized result that the backward loads: from an output of the forward, or from one that is added."""

    result: Result
    load: Load
    dtype: str | None


def _finals(
    graph: Graph,
    epilogue: Epilogue,
    indices: Sequence[int],
    names: Names,
    results: Results,
    live: Collection[int],
    kept: Collection[Load] | None,
) -> list[_Final]:
    """Where the backward gets the results that it uses.  Raises CodaUnsupportedError for one that was not kept."""
    finals: list[_Final] = []
    for (transform, index), result in results.asked.items():
        if result.node not in live:
            continue
        stored = [o for o in epilogue.states if (transform_of(o, indices), o.result) == (transform, index)]
        stored = [o for o in stored if kept is None or Load("output", o.name) in kept]
        exact = [o for o in stored if o.dtype in EXACT] or (stored if kept is not None else [])
        dtype = "i32" if result.type.dtype is Dtype.I32 else None
        if exact:
            finals.append(_Final(result, Load("output", exact[0].name), exact[0].dtype or dtype))
        elif kept is None:
            finals.append(_Final(result, Load("saved", names.fresh(result.wanted_name)), dtype))
        else:
            raise not_kept(epilogue, kept)
    return finals


def _live(graph: Graph, outputs: Sequence[Output], cut: Collection[int]) -> set[int]:
    """The nodes that the outputs are computed from, where those of `cut` are loaded."""
    live = {o.value for o in outputs}
    pending = list(live)
    while pending:
        index = pending.pop()
        new = set() if index in cut else set(graph.nodes[index].args) - live
        live |= new
        pending += new
    return live


@attrs.frozen
class _Input:
    """A parameter that the backward may have: the node that it replaces in the graph, and what it is loaded with."""

    node: int
    param: Param
    load: Load


def _inputs(
    graph: Graph, epilogue: Epilogue, names: Names, kept: Mapping[int, Kept], finals: Sequence[_Final]
) -> list[_Input]:
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
    for o in epilogue.outputs:
        if o.name in loaded:
            # A parameter may have an output's name without being what is stored under it.
            other = epilogue.has_param(o.name) and leaf(o.name, epilogue.param(o.name)) != loaded[o.name]
            name = names.fresh(o.name) if other else o.name
            outputs.append(_Input(loaded[o.name], Param(name, o.type, o.dtype), Load("output", o.name)))
    saved = [
        _Input(index, Param(str(way.name), graph.nodes[index].type, way.dtype), Load("saved", str(way.name)))
        for index, way in kept.items()
        if way.how == "saved"
    ]
    for final in finals:
        group = outputs if final.load.source == "output" else saved
        taken = final.load.source == "output" and epilogue.has_param(final.load.name)
        name = names.fresh(final.load.name) if taken else final.load.name
        group.append(_Input(final.result.node, Param(name, final.result.type, final.dtype), final.load))
    replaced = {i.node for i in outputs + saved}
    params = [_Input(leaf(p.name, p), p, Load("param", p.name)) for p in epilogue.params]
    # One that is computed from an output is no parameter any more.
    params = [i for i in params if i.node not in replaced and graph.nodes[i.node].op == "param"]
    return cotangents + outputs + saved + params


def _backward(graph: Graph, epilogue: Epilogue, outputs: Sequence[Output], inputs: Sequence[_Input]) -> Epilogue:
    """The graph from the inputs to the outputs."""
    nodes = list(graph.nodes)
    for i in inputs:
        nodes[i.node] = Node("param", (), i.param.type, i.param.name)
    name, precise = f"{epilogue.name}_backward", epilogue.precise
    live = canonical(Epilogue(name, epilogue.dims, (), tuple(nodes), tuple(outputs), precise=precise))
    used = {node.attr for node in live.nodes if node.op == "param"}
    params = [i.param for i in inputs if i.param.name in used]
    # The first tile of floats is what a hosting matmul computes.
    accumulator = next((p for p in params if p.type.kind is Kind.TILE and p.type.dtype is Dtype.F32), None)
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


def _forward(
    graph: Graph,
    epilogue: Epilogue,
    indices: Sequence[int],
    kept: Mapping[int, Kept],
    finals: Sequence[_Final],
) -> Epilogue:
    """The epilogue with a store of each saved value, and with the results of transforms that it lacks."""
    saved = {index: way for index, way in kept.items() if way.how == "saved"}
    missing = [f for f in finals if f.load.source == "saved"]
    if not saved and not missing:
        return epilogue
    wanted = {*saved, *(value for final in missing for value in final.result.transform.values)}
    nodes, place = _extended(graph, epilogue, indices, wanted)
    outputs: list[Output] = [Store(str(way.name), place[i], graph.nodes[i].type, way.dtype) for i, way in saved.items()]
    for final in missing:
        transform = final.result.transform
        values = tuple(place[v] for v in transform.values)
        outputs.append(State(final.load.name, values, final.result.type, transform.definition, final.result.index))
    return canonical(attrs.evolve(epilogue, nodes=nodes, outputs=epilogue.outputs + tuple(outputs)))


def _extended(
    graph: Graph, epilogue: Epilogue, indices: Sequence[int], wanted: Collection[int]
) -> tuple[tuple[Node, ...], dict[int, int]]:
    """The epilogue's nodes and those that make the wanted values of the graph, and the place of each in them.

    A value that is kept may be one that only a derivative rule computes.
    """
    nodes = list(epilogue.nodes)
    place: dict[int, int] = {}
    for own, index in enumerate(indices):
        place.setdefault(index, own)
    missing = set(wanted) - set(place)
    pending = list(missing)
    while pending:
        new = set(graph.nodes[pending.pop()].args) - set(place) - missing
        missing |= new
        pending += new
    for index in sorted(missing):
        node = graph.nodes[index]
        place[index] = len(nodes)
        nodes.append(attrs.evolve(node, args=tuple(place[a] for a in node.args)))
    return tuple(nodes), place
