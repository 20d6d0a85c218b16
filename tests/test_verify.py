"""The verifier finds whatever is wrong with an epilogue made by hand."""

from __future__ import annotations

from fractions import Fraction

import attrs
import pytest
from hypothesis import given
from strategies import epilogues

from codalang.errors import CodaError
from codalang.ir.build import EpilogueBuilder
from codalang.ir.epilogue import Epilogue, Node, Reduce, Store
from codalang.ir.types import COL, SCALAR, Dtype, Kind, ValueType, row, tile
from codalang.ir.verify import verify


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
MASK = ValueType(Kind.TILE, Fraction(1), Dtype.BOOL)

BROKEN = {
    "name is a keyword": (attrs.evolve(S, name="let"), "cannot name an epilogue"),
    "name has a space": (attrs.evolve(S, name="a b"), "cannot name an epilogue"),
    "one dimension": (attrs.evolve(S, dims=("M",)), "names of rows and columns"),
    "equal dimensions": (attrs.evolve(S, dims=("M", "M")), "both called `M`"),
    "dimension is no name": (attrs.evolve(S, dims=("M", "2")), "name of a dimension"),
    "parameter is no name": (param(S, 1, name="é"), "name of a parameter"),
    "two parameters": (param(S, 1, name="acc"), "defined twice"),
    "parameter of masks": (param(S, 0, type=MASK), "must hold numbers"),
    "parameter of quarter width": (param(S, 0, type=tile(Fraction(1, 4))), "width"),
    "parameter dtype": (param(S, 1, dtype="f64"), "unknown dtype 'f64'"),
    "parameter type differs from its node's": (param(S, 0, type=tile(2)), "parameter `acc` is"),
    "param node of nothing": (node(S, 0, attr="b"), "names no parameter"),
    "param node with operands": (node(S, 1, args=(0,)), "names no parameter"),
    "constant of an int": (node(S, 3, attr=1), "float or a bool"),
    "constant of nothing": (node(S, 3, attr=None), "float or a bool"),
    "constant of a wrong type": (node(S, 3, attr=True), "wrong type"),
    "constant that is a tile": (node(S, 3, type=tile()), "wrong type"),
    "unknown op": (node(S, 2, op="matmul"), "is no op"),
    "op with an attribute": (node(S, 2, attr=1.0), "has an attribute"),
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
    "store to a col": (attrs.evolve(S, outputs=(Store("y", 4, COL),)), "cannot be col"),
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


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name: str) -> None:
    e, message = BROKEN[name]
    verify(S)
    with pytest.raises(CodaError, match=message):
        verify(e)


@given(epilogues())
def test_what_the_builder_makes_is_well_formed(e: Epilogue) -> None:
    verify(e)
