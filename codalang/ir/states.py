"""Stateful transforms: a reduction that carries several values.

    StateDef = inputs, carried (with initial values), update, merge, finalize, vjp

A state folds the elements of its inputs, one after the other in any order, into carried values; partial results merge;
`finalize` turns the carried values into results.  The kernel needs no more than that, so `logsumexp`, `argmax` and
`welford` are definitions in the language (stdlib/states.coda), and users write their own.

`vjp` gives the cotangent of each float input, per element, from the inputs, the finalized results and the results'
cotangents.  It is what the derived backward evaluates as a map; property tests check it against the definition.

Each of the four is a `Function`: a graph of scalar nodes, as an epilogue's but with named parameters and several
results.
"""

from __future__ import annotations

import attrs

from codalang.errors import Loc
from codalang.ir.epilogue import Node
from codalang.ir.types import Dtype

Named = tuple[tuple[str, Dtype], ...]


@attrs.frozen
class Function:
    """A pure function of scalars: `nodes` as in an Epilogue (params are nodes of op `param`), `results` index them."""

    params: Named
    nodes: tuple[Node, ...]
    results: tuple[int, ...]


@attrs.frozen
class Pass:
    """A reduction over a block of elements: `how` (sum, max or min) of `value`, a function of (inputs..., results of
    the passes before it)."""

    name: str
    dtype: Dtype
    how: str
    value: Function


@attrs.frozen
class Blockwise:
    """What a state carries of a whole block of elements, where that takes less than an update by each: passes over the
    block, then `carried`, a function of their results."""

    passes: tuple[Pass, ...]
    carried: Function


@attrs.frozen(cache_hash=True)
class StateDef:
    """A stateful transform.

    Two definitions are equal where they fold alike, whatever they are called.

    Attributes:
        inputs: what is folded, per element.
        carried: the carried values; `initial` is the identity of `merge`.
        update: (carried..., inputs...) -> carried.
        merge: (carried of one part..., carried of another...) -> carried; its parameters are named a_<c> and b_<c>.
        finalize: (carried...) -> results.
        results: names and dtypes of the results, of which a user may name a prefix.
        vjp: (inputs..., results..., d_<result> of each float result...) -> a cotangent per float input; or None where
            the state has no derivative.
    """

    name: str = attrs.field(eq=False)
    inputs: Named
    carried: Named
    initial: tuple[float | int, ...] = attrs.field(eq=repr)  # compared as written, as constants are
    update: Function
    merge: Function
    finalize: Function
    results: Named
    vjp: Function | None
    loc: Loc | None = attrs.field(default=None, eq=False, repr=False)
