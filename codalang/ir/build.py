"""Building an epilogue node by node: what the parser, the autodiff pass and the Python builder share.

    b = EpilogueBuilder("scale", ("M", "N"))
    acc = b.param("acc", tile())
    r = b.param("r", COL)
    b.store("y", b.op("mul", acc, r), tile())
    epilogue = b.finish()

Types are inferred as nodes are made, so an error points at the expression that causes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from codalang.errors import CodaNameError, CodaTypeError, Loc
from codalang.ir.epilogue import Epilogue, Keep, Node, Output, Param, Reduce, State, Store, with_values
from codalang.ir.infer import infer
from codalang.ir.names import DISCARD
from codalang.ir.ops import REDUCTIONS
from codalang.ir.states import Function, Named, StateDef
from codalang.ir.types import SCALAR, Dims, Dtype, Kind, ValueType

_NUMBER_HINTS = {
    Dtype.I32: "`float(i)` makes a number of an index",
    Dtype.BOOL: "`float(mask)` makes a number of a mask",
}


class EpilogueBuilder:
    """Collects parameters, nodes and outputs; `finish` returns the canonical epilogue.

    Nodes are referred to by their index.  Leaves (parameters, constants) are made once each; no other node is shared
    or simplified here, so that what was written is what comes out.
    """

    def __init__(self, name: str, dims: Dims, loc: Loc | None = None) -> None:
        self.name = name
        self.dims = dims
        self.loc = loc
        self.params: list[Param] = []
        self.nodes: list[Node] = []
        self.outputs: list[Output] = []
        self.keeps: dict[int, Keep] = {}
        self.precise = False
        self._params: dict[str, Param] = {}
        self._outputs: dict[str, Output] = {}
        self._leaves: dict[tuple[object, ...], int] = {}

    def param(self, name: str, type: ValueType, dtype: str | None = None, loc: Loc | None = None) -> int:
        """Declare the next parameter.  Raises CodaNameError where the name is taken."""
        param = Param(name, type, dtype, loc)
        other = self._params.setdefault(name, param)
        if other is not param:
            notes = ((other.loc, "first declared here"),) if other.loc else ()
            raise CodaNameError(f"parameter `{name}` is declared twice", loc, notes=notes)
        self.params.append(param)
        return self._leaf(Node("param", (), type, name, loc, name))

    def const(self, value: float | bool, loc: Loc | None = None) -> int:
        """A literal: a float, or a bool for a mask.  An index is made by `integer`."""
        if isinstance(value, bool):
            return self._leaf(Node("const", (), ValueType(Kind.SCALAR, None, Dtype.BOOL), value, loc))
        # One nan object, because its hash is its identity.
        return self._leaf(Node("const", (), SCALAR, math.nan if math.isnan(value) else float(value), loc))

    def integer(self, value: int, loc: Loc | None = None) -> int:
        """An i32 literal.  Raises CodaTypeError where it does not fit in 32 bits."""
        if not -(2**31) <= value < 2**31:
            raise CodaTypeError(f"the index {value} does not fit in 32 bits", loc)
        return self._leaf(Node("const", (), ValueType(Kind.SCALAR, None, Dtype.I32), value, loc))

    def op(
        self,
        op: str,
        *args: int,
        attr: str | float | int | None = None,
        loc: Loc | None = None,
        hint: str | None = None,
    ) -> int:
        """Apply an op of the table.  Raises CodaTypeError where the operands or the attribute do not fit."""
        type_ = infer(op, [self.nodes[a].type for a in args], self.dims, loc, attr)
        self.nodes.append(Node(op, args, type_, attr, loc, hint))
        return len(self.nodes) - 1

    def hint(self, value: int, name: str) -> int:
        """Remember the name that the author gave a value (leaves keep their own)."""
        node = self.nodes[value]
        if node.op not in ("param", "const") and node.hint is None:
            self.nodes[value] = attrs.evolve(node, hint=name)
        return value

    def store(self, name: str, value: int, type: ValueType, dtype: str | None = None, loc: Loc | None = None) -> None:
        """Declare a stored output.  A value of fewer axes is broadcast.  Raises CodaTypeError where it cannot be."""
        have = self.nodes[value].type
        if type.kind is Kind.ROWS:
            raise CodaTypeError(
                f"`store {name}` cannot be {type.show(self.dims)}",
                loc,
                hint="a row per sample is loaded, or reduced over the rows of each sample: `reduce ... = sum(...)`",
            )
        too_many_axes = (have.kind.has_rows and not type.kind.has_rows) or (
            have.kind.has_columns and not type.kind.has_columns
        )
        if have.dtype is not Dtype.F32 or too_many_axes or have.width not in (None, type.width):
            hint = "to sum or take the maximum over an axis, use `reduce`" if too_many_axes else None
            raise CodaTypeError(
                f"`store {name}` is declared {type.show(self.dims)}, but its value is {have.show(self.dims)}",
                loc,
                hint=_NUMBER_HINTS.get(have.dtype, hint),
            )
        self._output(Store(name, value, type, dtype, loc))

    def reduce(
        self,
        name: str,
        value: int,
        type: ValueType,
        how: str = "sum",
        dtype: str | None = None,
        loc: Loc | None = None,
    ) -> None:
        """Declare a reduction to a col, row or scalar.  Raises CodaTypeError where value and result do not fit."""
        have = self.nodes[value].type
        if type.kind is Kind.TILE:
            raise CodaTypeError(f"`reduce {name}` must be a col, row or scalar, got {type.show(self.dims)}", loc)
        if how not in REDUCTIONS:
            raise CodaTypeError(f"unknown reduction `{how}`; there is {', '.join(REDUCTIONS)}", loc)
        widths = {w for w in (type.width, have.width) if w is not None}
        if have.dtype is not Dtype.F32 or len(widths) > 1:
            raise CodaTypeError(
                f"`reduce {name}` is declared {type.show(self.dims)}, but its value is {have.show(self.dims)}",
                loc,
                hint=_NUMBER_HINTS.get(have.dtype),
            )
        self._output(Reduce(name, value, type, how, dtype, loc))

    def state(
        self,
        names: Sequence[str],
        values: Sequence[int],
        type: ValueType,
        definition: StateDef,
        dtype: str | None = None,
        loc: Loc | None = None,
    ) -> None:
        """Declare the first len(names) results of a stateful transform, `_` for one that is not wanted.

        Raises CodaTypeError where values and results do not fit.
        """
        if type.kind is Kind.TILE:
            raise CodaTypeError(f"`state {names[0]}` must be a col, row or scalar, got {type.show(self.dims)}", loc)
        if len(values) != len(definition.inputs):
            raise CodaTypeError(f"`{definition.name}` takes {len(definition.inputs)} values, got {len(values)}", loc)
        if not 1 <= len(names) <= len(definition.results):
            raise CodaTypeError(
                f"`{definition.name}` has {len(definition.results)} results, got {len(names)} names", loc
            )
        types = [self.nodes[v].type for v in values]
        for (wanted, input_dtype), have in zip(definition.inputs, types, strict=True):
            if have.dtype is not input_dtype:
                raise CodaTypeError(
                    f"`{wanted}` of `{definition.name}` must be {input_dtype.value}, got {have.show(self.dims)}", loc
                )
        if len({t.width for t in (type, *types)} - {None}) > 1:
            shown = ", ".join(t.show(self.dims) for t in types)
            raise CodaTypeError(
                f"`state {names[0]}` is declared {type.show(self.dims)}, but folds {shown}",
                loc,
                hint="what is folded together has as many columns as a row result",
            )
        for index, name in enumerate(names):
            if name == DISCARD:
                continue
            result = attrs.evolve(type, dtype=definition.results[index][1])
            self._output(State(name, tuple(values), result, definition, index, dtype, loc))

    def keep(self, value: int, how: str, loc: Loc | None = None) -> None:
        """Say that the backward is to `save` or to `recompute` a value.  Raises CodaTypeError where it cannot."""
        if self.nodes[value].op == "const":
            raise CodaTypeError(f"there is nothing to {how}: this is a constant", loc)
        other = self.keeps.setdefault(value, Keep(value, how, loc))
        if other.how != how:
            notes = ((other.loc, f"`{other.how}` is here"),) if other.loc else ()
            raise CodaTypeError(f"a value cannot be both saved and recomputed, got `{how}`", loc, notes=notes)

    def finish(self) -> Epilogue:
        """The finished epilogue in canonical order, dead nodes dropped."""
        return canonical(
            Epilogue(
                self.name,
                self.dims,
                tuple(self.params),
                tuple(self.nodes),
                tuple(self.outputs),
                self.loc,
                tuple(self.keeps.values()),
                self.precise,
            )
        )

    def _leaf(self, node: Node) -> int:
        # repr separates 0.0 from -0.0 and makes nan equal itself
        key = (node.op, repr(node.attr), node.type)
        if key not in self._leaves:
            self.nodes.append(node)
            self._leaves[key] = len(self.nodes) - 1
        return self._leaves[key]

    def _output(self, output: Output) -> None:
        other = self._outputs.setdefault(output.name, output)
        if other is not output:
            notes = ((other.loc, "first defined here"),) if other.loc else ()
            raise CodaNameError(f"output `{output.name}` is defined twice", output.loc, notes=notes)
        self.outputs.append(output)


def function_of(builder: EpilogueBuilder, params: Named, results: Sequence[int]) -> Function:
    """The scalar function that a builder holds, its live nodes in canonical order."""
    order = postorder(builder.nodes, results)
    new_index = {old: new for new, old in enumerate(order)}
    nodes = (attrs.evolve(n, args=tuple(new_index[a] for a in n.args)) for n in (builder.nodes[old] for old in order))
    return Function(params, tuple(nodes), tuple(new_index[r] for r in results))


def canonical(epilogue: Epilogue) -> Epilogue:
    """The same epilogue with its live nodes in the order in which a walk from the outputs first needs them.

    It keeps a symbol for samples only where something has one row per sample.
    """
    order = postorder(epilogue.nodes, [value for o in epilogue.outputs for value in o.values])
    new_index = {old: new for new, old in enumerate(order)}
    nodes = tuple(
        attrs.evolve(epilogue.nodes[old], args=tuple(new_index[a] for a in epilogue.nodes[old].args)) for old in order
    )
    outputs = tuple(with_values(o, tuple(new_index[v] for v in o.values)) for o in epilogue.outputs)
    used = [thing.type.kind for things in (nodes, epilogue.params, outputs) for thing in things]
    dims = epilogue.dims if Kind.ROWS in used else epilogue.dims[:2]
    live = [attrs.evolve(k, value=new_index[k.value]) for k in epilogue.keeps if k.value in new_index]
    keeps = tuple(sorted(live, key=lambda k: k.value))
    return attrs.evolve(epilogue, dims=dims, nodes=nodes, outputs=outputs, keeps=keeps)


def postorder(nodes: Sequence[Node], roots: Sequence[int]) -> list[int]:
    """Operands before users, left to right, each once.  Iterative: programs may be deep."""
    order: list[int] = []
    done: set[int] = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            index, expanded = stack.pop()
            if index in done:
                continue
            if expanded:
                done.add(index)
                order.append(index)
            else:
                stack.append((index, True))
                stack.extend((a, False) for a in reversed(nodes[index].args) if a not in done)
    return order
