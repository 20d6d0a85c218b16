"""The verifier finds whatever is wrong with an epilogue made by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import attrs
import pytest
from hypothesis import given
from strategies import epilogues

from codalang.errors import CodaError
from codalang.ir.build import EpilogueBuilder
from codalang.ir.builtin_states import ARGMAX, BUILTIN_STATES
from codalang.ir.epilogue import Epilogue, Keep, Node, Reduce, Store
from codalang.ir.types import COL, SCALAR, Dtype, Kind, ValueType, row, tile
from codalang.ir.verify import verify
from codalang.ir.verify_state import verify_state


def sample() -> Epilogue:
    """Nodes: 0 acc, 1 r, 2 acc * r, 3 the constant 1, 4 the sum."""
    b = EpilogueBuilder("e", ("M", "N"))
    acc, r = b.param("acc", tile()), b.param("r", COL, "f32")
    x = b.op("mul", acc, r)
    b.store("y", b.op("add", x, b.const(1.0)), tile())
    b.reduce("s", x, COL)
    return b.finish()


def node(e: Epilogue, index: int, **changes: object) -> Epilogue:
    """The epilogue with one node changed."""
    nodes = list(e.nodes)
    nodes[index] = attrs.evolve(nodes[index], **changes)
    return attrs.evolve(e, nodes=tuple(nodes))


def output(e: Epilogue, index: int, **changes: object) -> Epilogue:
    """The epilogue with one output changed."""
    outputs = list(e.outputs)
    outputs[index] = attrs.evolve(outputs[index], **changes)
    return attrs.evolve(e, outputs=tuple(outputs))


def param(e: Epilogue, index: int, **changes: object) -> Epilogue:
    """The epilogue with one parameter changed."""
    params = list(e.params)
    params[index] = attrs.evolve(params[index], **changes)
    return attrs.evolve(e, params=tuple(params))


S = sample()
INDEX = ValueType(Kind.SCALAR, None, Dtype.I32)
INDICES = ValueType(Kind.COL, None, Dtype.I32)
MASK = ValueType(Kind.TILE, Fraction(1), Dtype.BOOL)

BROKEN = {
    "name is a keyword": (attrs.evolve(S, name="let"), "cannot name an epilogue"),
    "name has a space": (attrs.evolve(S, name="a b"), "cannot name an epilogue"),
    "one dimension": (attrs.evolve(S, dims=("M",)), "names of rows and columns"),
    "equal dimensions": (attrs.evolve(S, dims=("M", "M")), "both called `M`"),
    "dimension is no name": (attrs.evolve(S, dims=("M", "2")), "name of a dimension"),
    "parameter is no name": (param(S, 1, name="é"), "name of a parameter"),
    "two parameters": (param(S, 1, name="acc"), "defined twice"),
    "parameter of masks without a dtype": (param(S, 0, type=MASK), "declared without a dtype"),
    "parameter of masks declared as floats": (param(S, 0, type=MASK, dtype="bf16"), "declared bf16"),
    "parameter of floats declared as integers": (param(S, 1, dtype="i64"), "declared i64"),
    "parameter of quarter width": (param(S, 0, type=tile(Fraction(1, 4))), "width"),
    "parameter dtype": (param(S, 1, dtype="f64"), "unknown dtype 'f64'"),
    "parameter type differs from its node's": (param(S, 0, type=tile(2)), "parameter `acc` is"),
    "param node of nothing": (node(S, 0, attr="b"), "names no parameter"),
    "param node with operands": (node(S, 1, args=(0,)), "names no parameter"),
    "constant of an int that is a float": (node(S, 3, attr=1), "wrong type"),
    "constant of a text": (node(S, 3, attr="1"), "float, an int or a bool"),
    "constant of nothing": (node(S, 3, attr=None), "float, an int or a bool"),
    "constant of 33 bits": (node(S, 3, attr=2**31, type=INDEX), "32 bits"),
    "constant of a wrong type": (node(S, 3, attr=True), "wrong type"),
    "constant that is a tile": (node(S, 3, type=tile()), "wrong type"),
    "unknown op": (node(S, 2, op="matmul"), "is no op"),
    "op with an attribute": (node(S, 2, attr=1.0), "needs no attribute"),
    "operand of itself": (node(S, 2, args=(0, 2)), "no earlier node"),
    "operand of a later node": (node(S, 2, args=(0, 4)), "no earlier node"),
    "negative operand": (node(S, 2, args=(0, -1)), "no earlier node"),
    "operand is no index": (node(S, 2, args=(0, "r")), "no earlier node"),
    "too few operands": (node(S, 2, args=(0,)), "takes 2 operands"),
    "wrong type of an op": (node(S, 2, type=COL), "but its operands make it"),
    "no outputs": (attrs.evolve(S, outputs=()), "no output"),
    "two outputs of one name": (output(S, 1, name="y"), "defined twice"),
    "output is no name": (output(S, 1, name="store"), "name of a output"),
    "output of no node": (output(S, 0, value=9), "no node"),
    "output of a negative node": (output(S, 0, value=-1), "no node"),
    "store of another width": (output(S, 0, type=tile(2)), "declared tile"),
    "store of a tile to a col": (attrs.evolve(S, outputs=(Store("y", 4, COL),)), "declared col"),
    "store to a col of indices": (attrs.evolve(S, outputs=(Store("y", 4, INDICES),)), "must hold numbers"),
    "reduce to a tile": (attrs.evolve(S, outputs=(Reduce("y", 4, tile()),)), "cannot be tile"),
    "reduce to another width": (output(S, 1, type=row(2)), "declared row"),
    "reduce by mean": (output(S, 1, how="mean"), "unknown reduction 'mean'"),
    "output dtype": (output(S, 0, dtype="float32"), "unknown dtype"),
    "store of a mask": (output(S, 0, type=MASK), "must hold numbers"),
    "dead node": (attrs.evolve(S, outputs=S.outputs[1:]), "canonical order"),
    "other order": (
        attrs.evolve(
            S,
            nodes=(S.nodes[1], S.nodes[0], attrs.evolve(S.nodes[2], args=(1, 0)), *S.nodes[3:]),
        ),
        "canonical order",
    ),
    "constant made twice": (
        attrs.evolve(
            S,
            nodes=(*S.nodes, Node("const", (), SCALAR, 1.0), Node("mul", (2, 5), tile())),
            outputs=(S.outputs[0], Reduce("s", 6, COL)),
        ),
        "second node",
    ),
}


def full() -> Epilogue:
    """Nodes: 0 acc, 1 pow(acc, 1.5), 2 cast(., bf16), 3 group_sum(., 16), 4 col_index(); outputs y, value, index."""
    b = EpilogueBuilder("e", ("M", "N"))
    power = b.op("pow", b.param("acc", tile()), attr=1.5)
    total = b.op("group_sum", b.op("cast", power, attr="bf16"), attr=16)
    b.store("y", total, tile())
    b.state(("value", "index"), (total, b.op("col_index")), COL, ARGMAX)
    b.keep(power, "save")
    b.keep(total, "recompute")
    return b.finish()


def define(**changes: object) -> Epilogue:
    """The epilogue with another definition of its state."""
    definition = attrs.evolve(ARGMAX, **changes)
    outputs = (F.outputs[0], *(attrs.evolve(o, definition=definition) for o in F.outputs[1:]))
    return attrs.evolve(F, outputs=outputs)


def function(name: str, **changes: object) -> Epilogue:
    """The epilogue with a state one of whose functions is changed."""
    return define(**{name: attrs.evolve(getattr(ARGMAX, name), **changes)})


def swapped(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The same graph with its first two nodes, which are leaves, in the other order."""
    place = {0: 1, 1: 0}
    rest = (attrs.evolve(n, args=tuple(place.get(a, a) for a in n.args)) for n in nodes[2:])
    return (nodes[1], nodes[0], *rest)


def keep(*keeps: Keep) -> Epilogue:
    """The epilogue with other values kept."""
    return attrs.evolve(F, keeps=keeps)


F = full()
U = ARGMAX.update
B = ARGMAX.merge

BROKEN_FULL = {
    "an exponent that is missing": (node(F, 1, attr=None), "finite constant exponent"),
    "an infinite exponent": (node(F, 1, attr=math.inf), "finite constant exponent"),
    "an exponent that is an int": (node(F, 1, attr=2), "finite constant exponent"),
    "a cast to an integer": (node(F, 2, attr="i32"), "storage dtype"),
    "a cast to a number": (node(F, 2, attr=16), "storage dtype"),
    "a group of 12": (node(F, 3, attr=12), "power of two"),
    "a group of true": (node(F, 3, attr=True), "power of two"),
    "a column index that is a col": (node(F, 4, type=INDICES), "but its operands make it"),
    "a column index of floats": (node(F, 4, type=row()), "but its operands make it"),
    "a column index of something": (node(F, 4, args=(0,)), "takes 0 operands"),
    "a state to a tile": (output(F, 1, type=tile()), "cannot be tile"),
    "a state of another width": (output(F, 1, type=row(2)), "declared row"),
    "a state of one value": (output(F, 1, values=(3,)), "takes 2 values"),
    "a state of no values": (output(F, 1, values=()), "takes 2 values"),
    "a state of no node": (output(F, 1, values=(3, 9)), "no node"),
    "a state of values in another order": (output(F, 1, values=(4, 3)), "its value is row"),
    "a result that there is not": (output(F, 1, result=2), "no result 2"),
    "a negative result": (output(F, 1, result=-1), "no result -1"),
    "an index of floats": (output(F, 2, type=COL), "result 1 of"),
    "a value of indices": (output(F, 1, type=INDICES), "result 0 of"),
    "an index stored as bf16": (output(F, 2, dtype="bf16"), "unknown dtype 'bf16'"),
    "a value stored as i32": (output(F, 1, dtype="i32"), "unknown dtype 'i32'"),
    "keep of no node": (keep(Keep(9, "save")), "no node"),
    "keep of a negative node": (keep(Keep(-1, "save")), "no node"),
    "keep twice": (keep(Keep(1, "save"), Keep(1, "recompute")), "once each"),
    "keep in another order": (keep(Keep(3, "save"), Keep(1, "save")), "in their order"),
    "keep otherwise": (keep(Keep(1, "store")), "saved or recomputed"),
    "state without a name": (define(name="a b"), "cannot name a state"),
    "state without inputs": (define(inputs=()), "no input"),
    "state without carried values": (define(carried=(), initial=()), "no carried value"),
    "state without results": (define(results=()), "no result"),
    "input named as a keyword": (define(inputs=(("let", Dtype.F32), ("i", Dtype.I32))), "name of a input"),
    "input of a storage dtype": (define(inputs=(("x", "f32"), ("i", Dtype.I32))), "no register dtype"),
    "carried named as an input": (define(carried=(("x", Dtype.F32), ("at", Dtype.I32))), "`x` is defined twice"),
    "result named as an input": (define(results=(("x", Dtype.F32), ("at", Dtype.I32))), "`x` is defined twice"),
    "carried mask": (define(carried=(("top", Dtype.BOOL), ("at", Dtype.I32))), "cannot be a mask"),
    "result that is a mask": (define(results=(("value", Dtype.BOOL), ("index", Dtype.I32))), "cannot be a mask"),
    "one initial value": (define(initial=(0.0,)), "from 1 initial"),
    "initial value of another dtype": (define(initial=(0.0, 0.0)), "`at` cannot start from 0.0"),
    "initial value that is an int": (define(initial=(0, 0)), "`top` cannot start from 0"),
    "initial value of 33 bits": (define(initial=(0.0, 2**31)), "cannot start"),
    "merge as update": (define(merge=U), "`merge` must have the parameters"),
    "update with one result": (function("update", results=U.results[:1]), "`update` has 1 results"),
    "update with results in another order": (function("update", results=U.results[::-1]), "makes `top` i32"),
    "result that is no node": (function("merge", results=(0, 99)), "no node"),
    "merge that is not in order": (function("merge", nodes=swapped(B.nodes)), "canonical order"),
    "merge with dead nodes": (function("merge", results=(0, B.results[1])), "canonical order"),
    "node of no op": (function("update", nodes=(*U.nodes[:-1], attrs.evolve(U.nodes[-1], op="f"))), "is no op"),
    "a tile in a state": (
        function("finalize", nodes=(attrs.evolve(ARGMAX.finalize.nodes[0], type=tile()), *ARGMAX.finalize.nodes[1:])),
        "parameter `top` is",
    ),
    "a column index in a state": (
        function(
            "finalize", nodes=(ARGMAX.finalize.nodes[0], Node("col_index", (), attrs.evolve(row(), dtype=Dtype.I32)))
        ),
        "no scalar",
    ),
    "vjp without cotangents": (
        function("vjp", params=ARGMAX.vjp.params[:-1]),
        "`vjp` must have the parameters",
    ),
}


@pytest.mark.parametrize("name", BROKEN_FULL)
def test_broken_full(name: str) -> None:
    e, message = BROKEN_FULL[name]
    verify(F)
    with pytest.raises(CodaError, match=message):
        verify(e)


@pytest.mark.parametrize("name", BUILTIN_STATES)
def test_built_in_states_are_well_formed(name: str) -> None:
    verify_state(BUILTIN_STATES[name])


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name: str) -> None:
    e, message = BROKEN[name]
    verify(S)
    with pytest.raises(CodaError, match=message):
        verify(e)


@given(epilogues())
def test_what_the_builder_makes_is_well_formed(e: Epilogue) -> None:
    verify(e)
