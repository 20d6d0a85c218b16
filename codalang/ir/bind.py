"""Binding a call of the reference interpreter: checks its tensors, and finds the extents that they agree on."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection, Mapping
from fractions import Fraction
from typing import Any

import attrs
import torch
from torch import Tensor

from codalang.errors import CodaCallError
from codalang.ir.epilogue import Epilogue, Param
from codalang.ir.evaluate import Context
from codalang.ir.ops import OPS
from codalang.ir.types import Dtype, Kind, show_extent, show_shape


@attrs.frozen
class Call:
    """Inputs in the dtypes of registers and in the shape of their kind; `whole` has the extents that they agree on."""

    values: dict[str, Tensor]
    whole: Context


@attrs.frozen
class _Extent:
    """A number bound to M or N, and what bound it."""

    value: int
    by: str


def bind(
    epilogue: Epilogue,
    inputs: Mapping[str, Tensor | float],
    dtype: torch.dtype,
    extents: tuple[int, ...] | None,
) -> Call:
    """Check the inputs, convert them to the dtypes that registers have, and find the extents.

    Raises:
        CodaCallError: an input is missing, unknown, of the wrong shape, dtype or device, or extents are undetermined.
    """
    _check_names(epilogue, inputs)
    device = _common_device(epilogue, inputs)
    tensors = {p.name: _as_tensor(epilogue, p, inputs[p.name], device) for p in epilogue.params}
    rows, columns, samples = _bind_extents(epilogue, tensors, extents)
    size = rows // samples if samples else 0
    whole = Context(
        dtype, device, range(rows), range(columns), tuple(range(i * size, (i + 1) * size) for i in range(samples))
    )
    values = {}
    for param in epilogue.params:
        value = tensors[param.name].to(device=device)
        if value.dtype is torch.int64:
            value = narrowed(value)
        value = value.to(whole.torch_dtype(param.type.dtype))
        if param.type.kind is Kind.ROWS:  # each row has that of its sample
            value = value.unsqueeze(1).expand(-1, size, -1).flatten(0, 1)
        values[param.name] = value.unsqueeze(1) if param.type.kind is Kind.COL else value
    return Call(values, whole)


def narrowed(index: Tensor) -> Tensor:
    """int64 as int32.  What does not fit becomes the nearest that does, so that it stays the index of no column."""
    bounds = torch.iinfo(torch.int32)
    return index.clamp(bounds.min, bounds.max).int()


def _check_names(epilogue: Epilogue, inputs: Collection[str]) -> None:
    names = [p.name for p in epilogue.params]
    for param in epilogue.params:
        name = param.name
        if name not in inputs:
            raise CodaCallError(
                f"`{epilogue.name}` needs `{name}`: {param.type.show(epilogue.dims)}, which was not given",
                param.loc,
                argument=name,
            )
    for name in inputs:
        if name not in names:
            raise CodaCallError(
                f"`{epilogue.name}` has no parameter `{name}`; it has {', '.join(names) or 'none'}", argument=name
            )


def _as_tensor(epilogue: Epilogue, param: Param, value: Tensor | float, device: torch.device) -> Tensor:
    """A tensor with as many axes as the parameter's kind has.  A number will do for a scalar, and is made on `device`:
    the caller's default device may be another."""
    wanted = param.type.show(epilogue.dims)
    held = _NUMBERS[param.type.dtype]
    if not isinstance(value, Tensor):
        if param.type.kind is Kind.SCALAR and isinstance(value, held.sort) and not held.refuses(value):
            try:
                return torch.tensor(held.python(value), dtype=held.exact, device=device)
            except (OverflowError, RuntimeError, ValueError):  # which one depends on the dtype and on torch's version
                got = f"an {type(value).__name__} that is too large"
        else:
            got = type(value).__name__
        raise CodaCallError(
            f"`{param.name}` of `{epilogue.name}` is {wanted}, got {got}",
            param.loc,
            argument=param.name,
        )
    axes = param.type.kind.axes
    if value.dim() != axes:
        raise CodaCallError(
            f"`{param.name}` of `{epilogue.name}` is {wanted}, a tensor of {axes} axes, got shape {list(value.shape)}",
            param.loc,
            argument=param.name,
        )
    if not held.accepts(value.dtype):
        raise CodaCallError(
            f"`{param.name}` of `{epilogue.name}` must have {held.described}, got {value.dtype}",
            param.loc,
            argument=param.name,
        )
    return value


@attrs.frozen
class _Numbers:
    """What may be passed for a parameter of a register dtype: tensors of some dtypes, or a number of some sort, which
    `python` makes Python's own."""

    described: str
    accepts: Callable[[torch.dtype], bool]
    sort: type
    python: Callable[[Any], float]
    exact: torch.dtype

    def refuses(self, value: object) -> bool:
        """A truth value is a number to Python only."""
        return isinstance(value, bool) and self.sort is numbers.Integral


_NUMBERS = {
    Dtype.F32: _Numbers("a floating dtype", lambda d: d.is_floating_point, numbers.Real, float, torch.float64),
    Dtype.I32: _Numbers(
        "dtype int32 or int64", lambda d: d in (torch.int32, torch.int64), numbers.Integral, int, torch.int64
    ),
    Dtype.BOOL: _Numbers("dtype bool", lambda d: d is torch.bool, bool, bool, torch.bool),
}


def _common_device(epilogue: Epilogue, inputs: Mapping[str, Tensor | float]) -> torch.device:
    """The device of the tensors; a 0-d CPU scalar may go with tensors of another device, as in torch."""
    first: tuple[str, torch.device] | None = None
    for param in epilogue.params:
        value = inputs[param.name]
        if not isinstance(value, Tensor) or (value.dim() == 0 and value.device.type == "cpu"):
            continue
        if first is None:
            first = (param.name, value.device)
        elif first[1] != value.device:
            raise CodaCallError(
                f"`{param.name}` of `{epilogue.name}` is on {value.device}, but `{first[0]}` is on {first[1]}",
                param.loc,
                argument=param.name,
            )
    return first[1] if first else torch.device("cpu")


def _bind_extents(
    epilogue: Epilogue, tensors: Mapping[str, Tensor], given: tuple[int, ...] | None
) -> tuple[int, int, int]:
    """(M, N, samples) as all inputs and `given` agree.  Raises CodaCallError naming both sides of a disagreement.

    They are numbers, where sizes are a compiler's symbols, too.
    """
    m, n, b = [*(_Extent(int(size), "extents") for size in given or ()), None, None, None][:3]
    for param in epilogue.params:
        shape = tuple(map(int, tensors[param.name].shape))
        if param.type.kind is Kind.ROWS:
            b = _agree(epilogue, param, 2, b, shape[0], Fraction(1))
        elif param.type.kind.has_rows:
            m = _agree(epilogue, param, 0, m, shape[0], Fraction(1))
        if param.type.width is not None:
            n = _agree(epilogue, param, 1, n, shape[-1], param.type.width)
    _check_groups(epilogue, n)
    if n is not None and n.value % 2 and _has_half_width(epilogue):
        raise CodaCallError(
            f"`{epilogue.name}` has values of {epilogue.dims[1]}/2 columns, so {epilogue.dims[1]} must be even, "
            f"but `{n.by}` makes it {n.value}",
            argument=n.by,
        )
    rows, columns = _needed(epilogue, 0, m), _needed(epilogue, 1, n)
    return rows, columns, _samples(epilogue, rows, b) if epilogue.has_samples else 0


def _samples(epilogue: Epilogue, rows: int, b: _Extent | None) -> int:
    """The number of samples, which divides that of rows."""
    samples = _needed(epilogue, 2, b)
    if rows % samples if samples else rows:
        m, _, symbol = epilogue.dims
        raise CodaCallError(
            f"`{epilogue.name}` has {symbol} = {samples} samples of {m}/{symbol} rows each, which must divide "
            f"{m} = {rows}",
            epilogue.loc,
            argument=b.by if b is not None else "extents",
        )
    return samples


def _agree(epilogue: Epilogue, param: Param, axis: int, bound: _Extent | None, size: int, width: Fraction) -> _Extent:
    extent = Fraction(size) / width
    symbol = epilogue.dims[axis]
    wanted = f"`{param.name}` is {show_shape(param.type.kind, param.type.width, epilogue.dims)}"
    if extent.denominator != 1:
        raise CodaCallError(
            f"{wanted}, but its {size} columns are not a multiple of {width.numerator}", param.loc, argument=param.name
        )
    if bound is not None and bound.value != extent:
        notes = tuple((p.loc, "bound here") for p in epilogue.params if p.name == bound.by and p.loc)
        raise CodaCallError(
            f"{wanted} and has {size} {('rows', 'columns', 'rows')[axis]}, which makes {symbol} = {extent}, "
            f"but `{bound.by}` makes {symbol} = {bound.value}",
            param.loc,
            notes=notes,
            argument=param.name,
        )
    return bound or _Extent(int(extent), param.name)


def _needed(epilogue: Epilogue, axis: int, bound: _Extent | None) -> int:
    """A bound extent.  An unbound one is an error unless there is nothing to compute."""
    if bound is not None:
        return bound.value
    if not epilogue.outputs:
        return 0
    raise CodaCallError(
        f"no input of `{epilogue.name}` determines {show_extent(Fraction(1), epilogue.dims[axis])}",
        epilogue.loc,
        hint=f"pass extents=({', '.join(epilogue.dims)})",
        argument="extents",
    )


def _has_half_width(epilogue: Epilogue) -> bool:
    types = [n.type for n in epilogue.nodes] + [o.type for o in epilogue.outputs] + [p.type for p in epilogue.params]
    return any(t.width == Fraction(1, 2) for t in types)


def _check_groups(epilogue: Epilogue, n: _Extent | None) -> None:
    """Groups divide the columns."""
    for node in epilogue.nodes:
        if n is None or OPS.get(node.op) is None or OPS[node.op].attr != "group":
            continue
        columns = Fraction(n.value) * (node.type.width or 1)
        if columns % int(node.attr):  # type: ignore[arg-type]
            raise CodaCallError(
                f"`{node.op}` of `{epilogue.name}` has groups of {node.attr} columns, which must divide the {columns} "
                f"columns that `{n.by}` brings",
                node.loc,
                argument=n.by,
            )


def granularity(epilogue: Epilogue) -> int:
    """The columns of a tile, in units of N, are a multiple of this: no pair of columns and no group is cut."""
    steps = [2 if _has_half_width(epilogue) else 1]
    for node in epilogue.nodes:
        if node.op in OPS and OPS[node.op].attr == "group":
            steps.append(math.ceil(int(node.attr) / (node.type.width or 1)))  # type: ignore[arg-type]
    return math.lcm(*steps)
