"""The IR: an epilogue as a graph of typed, immutable nodes.

    Epilogue = name, dims, params, nodes, outputs, keeps
    Node     = op(args...) : type           -- SSA: a node's index in `nodes` is its name
    Output   = Store(name, value) | Reduce(name, value, how) | State(name, values, definition, result)

`nodes` lists every node once, operands before users, in the order in which a walk from the outputs first needs
them (see `build.canonical`).  Two epilogues that mean the same therefore compare equal, whatever names their
`let`s had and wherever they stood: locations and name hints take no part in equality.

A node is one of

    param            attr = the parameter's name
    const            attr = a float, an int (i32), or a bool
    any op of ops.OPS

The first parameter is the accumulator of the matmul that hosts the epilogue, if it is a tile of numbers.  One without
one (a derived backward whose cotangents are all vectors) can only run hosted on given dimensions.

The domain of a reduction is the whole [M, w*N] output.  A value that does not vary over a reduced axis is summed as
often as the axis is long: `reduce s: col[M] = sum(1.0)` counts columns.  This is what makes the derived backward of
a broadcast exact.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import TYPE_CHECKING

import attrs

from codalang.errors import Loc
from codalang.ir.types import Dims, Dtype, Kind, ValueType

if TYPE_CHECKING:
    from codalang.ir.states import StateDef


@attrs.frozen
class Param:
    """An input.  `dtype` is the annotated storage dtype, or None for that of the tensor passed at the call."""

    name: str
    type: ValueType
    dtype: str | None = None
    loc: Loc | None = attrs.field(default=None, eq=False, repr=False)


@attrs.frozen
class Node:
    """An SSA value.  `args` are indices into `Epilogue.nodes`; `hint` is the name its author gave it, if any."""

    op: str
    args: tuple[int, ...]
    type: ValueType
    # Compared as written: 0.0 is not -0.0, and nan is nan.
    attr: str | float | int | bool | None = attrs.field(default=None, eq=repr)
    loc: Loc | None = attrs.field(default=None, eq=False, repr=False)
    hint: str | None = attrs.field(default=None, eq=False, repr=False)


@attrs.frozen
class Store:
    """An output of shape `type`, rounded to `dtype`.

    None stands for the dtype of A at the call where it is a tile, and for f32 where it is a vector or a scalar.
    """

    name: str
    value: int
    type: ValueType
    dtype: str | None = None
    loc: Loc | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def values(self) -> tuple[int, ...]:
        """The nodes that the output depends on."""
        return (self.value,)


@attrs.frozen
class Reduce:
    """A reduction of `value` over the axes that `type` lacks, or over each sample's rows: `how` is sum, max or min.

    The width of its domain is the value's own where it has one, the row's for a row result, and 1 otherwise.  `dtype`
    is the storage dtype of the merged result (None: f32).
    """

    name: str
    value: int
    type: ValueType
    how: str = "sum"
    dtype: str | None = None
    loc: Loc | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def values(self) -> tuple[int, ...]:
        """The nodes that the output depends on."""
        return (self.value,)


@attrs.frozen
class State:
    """One result of a stateful transform of `values` over the axes that `type` lacks.

    Results of one transform are outputs of their own with equal `values`, `definition` and shape; the kernel folds
    once for all of them.  `type.dtype` is the result's register dtype.
    """

    name: str
    values: tuple[int, ...]
    type: ValueType
    definition: StateDef
    result: int = 0
    dtype: str | None = None
    loc: Loc | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def value(self) -> int:
        """The first node that the output depends on: it gives the domain's width."""
        return self.values[0]


Output = Store | Reduce | State


@attrs.frozen
class Keep:
    """The author's word on a forward value that the backward may need: `how` is save or recompute.

    It binds where the value is needed, and asks for nothing where it is not.  One row per sample is recomputed always.
    """

    value: int
    how: str
    loc: Loc | None = attrs.field(default=None, eq=False, repr=False)


def with_values(output: Output, values: tuple[int, ...]) -> Output:
    """The same output of other nodes."""
    return attrs.evolve(output, values=values) if isinstance(output, State) else attrs.evolve(output, value=values[0])


@attrs.frozen(cache_hash=True)  # launching looks kernels up by their epilogue
class Epilogue:
    """A tile-local function of a GEMM's accumulator and of further inputs.  See the module's docstring."""

    name: str
    dims: Dims
    params: tuple[Param, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    loc: Loc | None = attrs.field(default=None, eq=False, repr=False)
    keeps: tuple[Keep, ...] = ()  # in the order of their nodes, each node once
    precise: bool = False  # how kernels compute transcendental functions; see `lower.accuracy`

    @property
    def accumulator(self) -> Param | None:
        """The parameter that a hosting matmul computes, or None: the first one, if it is a tile of numbers."""
        first = self.params[0] if self.params else None
        is_one = first is not None and (first.type.kind, first.type.dtype) == (Kind.TILE, Dtype.F32)
        return first if is_one else None

    @property
    def stores(self) -> tuple[Store, ...]:
        """The tile outputs, in textual order."""
        return tuple(o for o in self.outputs if isinstance(o, Store) and o.type.kind is Kind.TILE)

    @property
    def vectors(self) -> tuple[Store, ...]:
        """The stored rows, cols and scalars, in textual order."""
        return tuple(o for o in self.outputs if isinstance(o, Store) and o.type.kind is not Kind.TILE)

    @property
    def reductions(self) -> tuple[Reduce, ...]:
        """The reductions, in textual order."""
        return tuple(o for o in self.outputs if isinstance(o, Reduce))

    @property
    def states(self) -> tuple[State, ...]:
        """The results of stateful transforms, in textual order."""
        return tuple(o for o in self.outputs if isinstance(o, State))

    @functools.cached_property  # asked for at each launch
    def has_samples(self) -> bool:
        """True where something has one row per sample."""
        return any(thing.type.kind is Kind.ROWS for thing in (*self.params, *self.outputs))

    def param(self, name: str) -> Param:
        """The parameter of that name.  Raises KeyError where there is none."""
        for param in self.params:
            if param.name == name:
                return param
        raise KeyError(name)

    def has_param(self, name: str) -> bool:
        """True where a parameter has that name."""
        return any(p.name == name for p in self.params)

    def uses(self) -> list[int]:
        """How often each node is used, by nodes and outputs."""
        counts = [0] * len(self.nodes)
        for node in self.nodes:
            for arg in node.args:
                counts[arg] += 1
        for output in self.outputs:
            for value in output.values:
                counts[value] += 1
        return counts

    def domain_width(self, output: Output) -> Fraction:
        """The width of the [M, w*N] domain that an output covers."""
        widths = [self.nodes[v].type.width for v in output.values]
        return output.type.width or next((w for w in widths if w is not None), Fraction(1))
