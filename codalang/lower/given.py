"""Buffers that a caller gives for outputs: whether they fit, how they are folded, and what is read meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from codalang.errors import CodaCallError
from codalang.ir.epilogue import Param
from codalang.ir.types import Kind
from codalang.lower.buffers import Read, Written, span
from codalang.lower.call import Result
from codalang.lower.folded import Matrix, box, is_dense
from codalang.lower.prepare import Prepare, Value, copies
from codalang.lower.shape import Shape
from codalang.lower.spec import PLAIN, Folding


def check_buffers(shape: Shape, storage: Mapping[str, torch.dtype], out: Mapping[str, torch.Tensor]) -> None:
    """Raise CodaCallError where the caller's buffers do not fit the outputs."""
    outputs = {o.name: o for o in shape.epilogue.outputs}
    for name, tensor in out.items():
        if name not in outputs:
            raise CodaCallError(
                f"`{shape.epilogue.name}` has no output `{name}`; it has {', '.join(outputs)}", argument="out"
            )
        wanted = (storage[name], shape.of(outputs[name]), shape.device)
        if outputs[name].type.kind is Kind.TILE and tensor.ndim > 2 and is_dense(tensor):
            fits = shape.holds(tensor, outputs[name])
        else:
            fits = tuple(tensor.shape) == wanted[1] and tensor.is_contiguous()
        if not fits or (tensor.dtype, tensor.device) != (wanted[0], wanted[2]):
            raise CodaCallError(
                f"the buffer for `{name}` of `{shape.epilogue.name}` must be a contiguous {wanted[0]} tensor of "
                f"shape {list(wanted[1])} on {wanted[2]}, got {tensor.dtype} {list(tensor.shape)} with strides "
                f"{list(tensor.stride())} on {tensor.device}",
                argument="out",
            )


def output_foldings(shape: Shape, out: Mapping[str, torch.Tensor], fold: bool) -> tuple[Folding, ...]:
    """How each store is folded, where `fold` allows it: as the buffer is that the caller gives."""
    found = []
    for store in shape.epilogue.stores:
        buffer = out.get(store.name)
        place = box(Matrix(buffer, buffer.ndim - 1)) if fold and buffer is not None and buffer.ndim > 2 else None
        found.append(place.folding if place is not None and place.major == "k" else PLAIN)
    return tuple(found)


def written(
    shape: Shape,
    params: Sequence[Param | None],
    values: Sequence[Value],
    prepare: Sequence[Prepare | None],
    results: Sequence[Result],
    out: Mapping[str, torch.Tensor],
) -> tuple[Written, ...]:
    """The caller's buffers, as `check_sharing` takes them.  `params`: of each tensor, None for an operand."""
    direct = {b.given for r in results for b in r.buffers}
    stores = {s.name: s for s in shape.epilogue.stores}
    found = []
    for name, buffer in out.items():
        reads = []
        for index, (param, value, step) in enumerate(zip(params, values, prepare, strict=True)):
            if name not in direct or not isinstance(value, torch.Tensor) or (step and copies(step, value)):
                continue
            in_place = (
                param is not None
                and param.type.kind is Kind.TILE
                and name in stores
                and (value.shape, value.stride(), value.dtype) == (buffer.shape, buffer.stride(), buffer.dtype)
            )
            label = param.name if param else "ab"[index]
            reads.append(Read(index, label, span(value), in_place))
        found.append(Written(name, span(buffer), tuple(reads)))
    return tuple(found)
