"""Reductions that a GEMM's epilogue makes of a block of columns at once, not element by element.

| reduction                                        | how                                                           |
|--------------------------------------------------|---------------------------------------------------------------|
| a state of `ir.builtin_states.BLOCKWISE`         | its passes: 4 instructions an element for logsumexp, not 15   |
| sum, max, min of `where(col_index() == r, x, z)` | nothing where no row's r is in the block; z changes no result |

A block is what a thread has of a row: of a whole tile, where one value waits for its end in the accumulator's place,
else of a sub-tile.  What does not exist is masked in blocks at the right edge alone, behind a branch.  Only reductions
over n are made so: over m, a thread has two or four rows of a column.
"""

from __future__ import annotations

import math

from codalang.ir.builtin_states import BLOCKWISE
from codalang.ir.epilogue import Epilogue, Node, Output, Reduce, State
from codalang.ir.types import Kind
from codalang.lower.spec import base_width

NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}


def picked(epilogue: Epilogue, output: Output) -> tuple[int, int] | None:
    """(x, r) where a reduction over n is of `where(col_index() == r, x, neutral)`, with r the same for a whole row."""
    if not isinstance(output, Reduce) or output.type.kind is not Kind.COL:
        return None
    node = epilogue.nodes[output.value]
    if node.op != "where":
        return None
    mask, value, other = node.args
    if epilogue.nodes[other].op != "const" or epilogue.nodes[other].attr != NEUTRAL[output.how]:
        return None
    index = _index(epilogue, epilogue.nodes[mask], node)
    return None if index is None else (value, index)


def _index(epilogue: Epilogue, mask: Node, like: Node) -> int | None:
    """r of `col_index() == r`, where the columns are those of the value that is reduced."""
    if mask.op != "eq":
        return None
    for columns, index in (mask.args, mask.args[::-1]):
        is_column = epilogue.nodes[columns].op == "col_index" and epilogue.nodes[columns].type.width == like.type.width
        if is_column and not epilogue.nodes[index].type.kind.has_columns:
            return index
    return None


def taken(epilogue: Epilogue, output: Reduce | State, on_gemm: bool) -> tuple[int, ...]:
    """The values that a kernel takes of each column for a reduction."""
    found = picked(epilogue, output) if on_gemm else None
    return output.values if found is None else found


def _made_by_blocks(epilogue: Epilogue, output: Output) -> bool:
    if isinstance(output, State):
        return output.type.kind is Kind.COL and output.definition in BLOCKWISE
    return picked(epilogue, output) is not None


def waiting(epilogue: Epilogue) -> set[int]:
    """The values that wait in registers for the end of their block; an index is known at any time."""
    outputs: tuple[Reduce | State, ...] = (*epilogue.reductions, *epilogue.states)
    values = {v for output in outputs if _made_by_blocks(epilogue, output) for v in taken(epilogue, output, True)}
    nodes = epilogue.nodes
    return {value for value in values if nodes[value].type.kind.has_columns and nodes[value].op != "col_index"}


def waits(epilogue: Epilogue, output: Reduce | State) -> bool:
    """Whether a kernel on a GEMM makes a reduction by blocks; other sums and maxima too, of what waits anyway."""
    if _made_by_blocks(epilogue, output):
        return True
    return isinstance(output, Reduce) and output.type.kind is Kind.COL and output.value in waiting(epilogue)


def takes_whole_tiles(epilogue: Epilogue) -> bool:
    """Whether blocks are whole tiles: a second value would have no place beside the accumulator."""
    values = [epilogue.nodes[value].type for value in waiting(epilogue)]
    return len(values) == 1 and (values[0].width or 0) <= base_width(epilogue)
