"""Judging an index: by what stands where it points.

Of two elements that are equal but for rounding, either may be found to be the maximum.  Whether an index that a kernel
gives is right is therefore asked of the value at it: `attained` is that value, which is to be as large as the largest.

    state (value, index): col[M] = argmax(x, i)          attained = max over the row of where(i == index, x, -inf)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import attrs
import torch
from torch import Tensor

from codalang.ir import reference
from codalang.ir.build import EpilogueBuilder
from codalang.ir.builtin_states import ARGMAX, ARGMAX2
from codalang.ir.epilogue import Epilogue, State
from codalang.ir.types import Dtype


def is_index(output: object) -> bool:
    """True for a result that tells where a maximum stands."""
    return isinstance(output, State) and output.definition in (ARGMAX, ARGMAX2) and output.result > 0


def attained(
    epilogue: Epilogue,
    output: State,
    inputs: Mapping[str, Tensor | float],
    results: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float64,
    extents: tuple[int, ...] | None = None,
) -> Tensor:
    """What stands where `output`, an index, points; -inf where it points nowhere.

    Args:
        epilogue: the program; `output` is one of its outputs.
        inputs, dtype, extents: as `reference.run` takes them.
        results: the outputs by name, as they were found; of a maximum over both axes, the row as well as the column.

    Returns:
        In `dtype`, of the output's shape.
    """
    indices = {o.result: o for o in epilogue.states if is_index(o) and _fold(o) == _fold(output) and o.name in results}
    taken = {p.name for p in epilogue.params}
    builder = EpilogueBuilder(epilogue.name, epilogue.dims)
    builder.params, builder.nodes = list(epilogue.params), list(epilogue.nodes)
    given = dict(inputs)
    masks = []
    for index in indices.values():
        name = next(n for n in (f"{index.name}{'_' * i}" for i in range(len(taken) + 1)) if n not in taken)
        taken.add(name)
        found = builder.param(name, index.type, "i32")
        masks.append(builder.op("eq", output.values[index.result], found))
        given[name] = results[index.name].int()
    mask = reduce(lambda a, b: builder.op("and", a, b), masks)
    value = builder.op("where", mask, output.values[0], builder.const(-float("inf")))
    builder.reduce("attained", value, attrs.evolve(output.type, dtype=Dtype.F32), "max")
    return reference.run(builder.finish(), given, dtype=dtype, extents=extents)["attained"]


def _fold(output: State) -> tuple[object, ...]:
    """What results of one transform have in common."""
    return output.values, output.definition, output.type.kind, output.type.width
