"""A call of a program: arguments bound to parameters, and everything that can be wrong with them found up front.

| parameter      | argument                                                                                           |
|----------------|----------------------------------------------------------------------------------------------------|
| a scalar       | a number, or a tensor without dimensions; with a default it may be missing                         |
| [T, D]         | a tensor [T, D], or [..., D]: the leading dimensions are batch dimensions, and T is their product  |
| [T]            | a tensor [T], or [...]                                                                             |
| anything else  | a tensor of that shape                                                                             |

One dimension name of a program may stand for batch dimensions: all arguments that have more axes than they are
declared with must agree about them, and vectors with matrices, where any have such rows.  A result whose rows are that
dimension, or the leading axes of some parameter (`x: [B, S, D]` has B*S rows), gets them back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from codalang.errors import CodaCallError
from codalang.ir.dims import Dim
from codalang.ir.program import Apply, Program, ProgramParam, TensorType
from codalang.ir.program_reference import check_rank, misfit
from codalang.ir.program_reference import sizes as sizes_of
from codalang.ir.reference import TORCH_DTYPES
from codalang.torch.arguments import MISSING, in_order
from codalang.torch.signature import ELEMENTS, FLOATING, Extent, Value, are_leading, common_device

Shape = tuple[Extent, ...]


@attrs.frozen(eq=False)
class Binding:
    """A call that was checked.

    Attributes:
        sizes: the number that each dimension name stands for.
        shapes: of each argument as it was given; () for numbers.
        flat: of each argument as it is declared: batch dimensions joined.
        dtypes: of each argument, None for numbers.
        leads: rows -> the leading dimensions that they are made of, where that is more than one.
        compute: float64 where any argument is, else float32.
        device: where it runs.
        moved: arguments that are tensors without dimensions on the CPU, and must be brought to the device.
    """

    sizes: dict[str, Extent]
    shapes: tuple[Shape, ...]
    flat: tuple[Shape, ...]
    dtypes: tuple[torch.dtype | None, ...]
    leads: dict[Dim, Shape]
    compute: torch.dtype
    device: torch.device
    moved: tuple[int, ...]

    def shape(self, type_: TensorType) -> Shape:
        """The shape that the caller gets for a value of some type."""
        own = tuple(extent(axis, self.sizes) for axis in type_.shape)
        return self.leads[type_.shape[0]] + own[1:] if type_.shape and type_.shape[0] in self.leads else own


def extent(dim: Dim, sizes: Mapping[str, Extent]) -> Extent:
    """The number that an extent is.  Raises CodaCallError where that is no whole number."""
    scale = math.lcm(*(coefficient.denominator for _, coefficient in dim.terms))
    total: Extent = 0
    for monomial, coefficient in dim.terms:
        product: Extent = coefficient.numerator * (scale // coefficient.denominator)
        for name in monomial:
            product = product * sizes[name]
        total = total + product
    if scale == 1:
        return total
    if isinstance(total, int) and total % scale:
        said = ", ".join(f"{name} = {sizes[name]}" for name in sorted(dim.names))
        raise CodaCallError(f"{dim} is {total / scale} for {said}, and an extent is a whole number")
    return total // scale


def show(program: Program) -> str:
    """The call as it is written."""
    return f"{program.name}({', '.join(p.name for p in program.params)})"


def bind(program: Program, args: Sequence[object], named: Mapping[str, object]) -> list[object]:
    """The arguments in the order of the parameters, defaults filled in.

    Raises CodaCallError, naming the argument, where one is missing, given twice, unknown, or there are too many.
    """
    params = program.params
    positions = {param.name: position for position, param in enumerate(params)}
    slots = in_order(program, show, len(params), positions, args, named)
    for position, param in enumerate(params):
        if slots[position] is MISSING:
            if param.default is None:
                raise CodaCallError(
                    f"`{show(program)}` is missing `{param.name}`: {param.type}", param.loc, argument=param.name
                )
            slots[position] = param.default
    return slots


def check(program: Program, values: Sequence[object]) -> Binding:
    """Compare the arguments with the declarations.

    Raises CodaCallError that names the argument, what was expected, and the argument that decided it.
    """
    for param, value in zip(program.params, values, strict=True):
        check_value(program, param, value)
    device = common_device(program.name, ((p.name, v, p.loc) for p, v in zip(program.params, values, strict=True)))
    shapes = tuple(tuple(v.shape) if isinstance(v, Tensor) else () for v in values)
    batch = _batch(program, shapes)
    flat = tuple(_flattened(p.type, shape) for p, shape in zip(program.params, shapes, strict=True))
    sizes = _sizes(program, flat, shapes)
    leads = _leads(program, flat) | batch
    _check_samples(program, sizes, leads)
    dtypes = tuple(v.dtype if isinstance(v, Tensor) else None for v in values)
    return Binding(
        sizes=sizes,
        shapes=shapes,
        flat=flat,
        dtypes=dtypes,
        leads=leads,
        compute=torch.float64 if torch.float64 in dtypes else torch.float32,
        device=device,
        moved=tuple(i for i, v in enumerate(values) if isinstance(v, Tensor) and v.device != device),
    )


def check_value(program: Program, param: ProgramParam, value: object) -> None:
    """A strided tensor of a dtype that fits the declaration, or a number for a scalar."""
    where = f"`{param.name}` of `{program.name}`"
    elements = ELEMENTS[param.type.dtype]
    if not isinstance(value, Tensor):
        if not param.type.shape and elements.number(value):
            return
        also = "" if param.type.shape else f" or {elements.called}"
        raise CodaCallError(
            f"{where} must be a tensor {param.type}{also}, got {type(value).__name__}", param.loc, argument=param.name
        )
    if value.is_nested or value.layout is not torch.strided:
        got = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise CodaCallError(
            f"{where} must be a strided tensor, got {got}",
            param.loc,
            argument=param.name,
            hint="call .to_padded_tensor(0.0)" if value.is_nested else "call .to_dense()",
        )
    declared = TORCH_DTYPES[param.dtype] if param.dtype is not None else None
    if declared is not None and value.dtype is not declared:
        floats = elements.dtypes is FLOATING and value.dtype in FLOATING
        raise CodaCallError(
            f"{where} is declared {param.dtype} ({declared}), got {value.dtype}",
            param.loc,
            argument=param.name,
            hint=f"call .to({declared}){', or drop the annotation to take any dtype' if floats else ''}",
        )
    if value.dtype not in elements.dtypes:
        names = [str(d).removeprefix("torch.") for d in elements.dtypes]
        raise CodaCallError(
            f"{where} must have one of the dtypes {', '.join(names)}, got {value.dtype}",
            param.loc,
            argument=param.name,
            hint="integers are declared i32 or i64, masks bool",
        )


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _batch(program: Program, shapes: Sequence[Shape]) -> dict[Dim, Shape]:
    """The dimension that stands for batch dimensions, and those; empty where no argument has them.

    Where matrices have such rows, one of them has those dimensions: a vector of several axes beside them is no batch,
    but a statistic that kept a dimension of 1.
    """
    leads = []
    for param, shape in zip(program.params, shapes, strict=True):
        declared = param.type.shape
        extra = len(shape) - len(declared)
        if extra >= 0 and declared and _is_name(declared[0]):  # what does not fit is found by `sizes`
            leads.append((param, declared[0], shape[: extra + 1]))
    found: tuple[str, Dim, Shape] | None = None
    for param, dim, lead in leads:
        if len(lead) == 1:
            continue
        if len(param.type.shape) == 1:
            matrices = [(p.name, d, other) for p, d, other in leads if d == dim and len(p.type.shape) > 1]
            if matrices and all(other != lead for _, _, other in matrices):
                raise _disagreement(program, param, dim, lead, matrices[0])
        if found is None:
            found = (param.name, dim, lead)
        elif found[1:] != (dim, lead):
            raise _disagreement(program, param, dim, lead, found)
    return {found[1]: found[2]} if found else {}


def _disagreement(
    program: Program, param: ProgramParam, dim: Dim, lead: Shape, other: tuple[str, Dim, Shape]
) -> CodaCallError:
    name, its, wanted = other
    kept = len(param.type.shape) == 1 and lead[-1] == 1
    return CodaCallError(
        f"`{param.name}` of `{program.name}` is declared {param.type} and has the leading dimensions {list(lead)} for "
        f"{dim}, but `{name}` has {list(wanted)} for {its}",
        param.loc,
        argument=param.name,
        hint="a col has no trailing dimension of 1: call .squeeze(-1)" if kept else None,
    )


def _check_samples(program: Program, sizes: Mapping[str, Extent], leads: Mapping[Dim, Shape]) -> None:
    """Where rows are of several leading dimensions, samples are whole ones."""
    for statement in program.statements:
        if not isinstance(statement, Apply) or len(statement.extents) < 3:
            continue
        rows, _, samples = statement.extents
        lead, count = leads.get(rows, ()), extent(samples, sizes)
        if not are_leading(count, lead):
            param = next((p for p in program.params if p.type.shape and p.type.shape[0] == samples), None)
            raise CodaCallError(
                f"`{statement.epilogue.name}` of `{program.name}` has {samples} = {count} samples, but the leading "
                f"dimensions of its {rows} rows are {list(lead)}, the first of which make no {count} samples",
                param.loc if param is not None else statement.loc,
                argument=param.name if param is not None else None,
                hint="samples are the leading dimension of their rows; flatten it where others are meant",
            )


def _is_name(dim: Dim) -> bool:
    return len(dim.terms) == 1 and len(dim.terms[0][0]) == 1 and dim.terms[0][1] == 1


def _flattened(type_: TensorType, shape: Shape) -> Shape:
    extra = len(shape) - len(type_.shape)
    if extra <= 0 or not type_.shape or not _is_name(type_.shape[0]):
        return shape
    return (math.prod(shape[: extra + 1]), *shape[extra + 1 :])


def _leads(program: Program, flat: Sequence[Shape]) -> dict[Dim, Shape]:
    """Rows of parameters with several leading axes -> those; pairs have an order of their own."""
    leads: dict[Dim, Shape] = {}
    for param, shape in zip(program.params, flat, strict=True):
        matrix = param.type.matrix
        if len(param.type.shape) > 2 and param.type.pair_axis is None and matrix is not None:
            leads.setdefault(matrix[0], shape[:-1])
    return leads


def _sizes(program: Program, shapes: Sequence[Shape], given: Sequence[Shape]) -> dict[str, Extent]:
    """What each dimension name is.  Raises CodaCallError that names the arguments which disagree."""
    if all(isinstance(axis, int) for shape in shapes for axis in shape):
        names = [p.name for p in program.params]
        return dict(sizes_of(program, dict(zip(names, shapes, strict=True)), dict(zip(names, given, strict=True))))
    return _symbolic_sizes(program, shapes, given)


def _symbolic_sizes(program: Program, shapes: Sequence[Shape], given: Sequence[Shape]) -> dict[str, Extent]:
    """The same while a compiler traces: sizes may be symbols, and what is compared becomes a guard."""
    sizes: dict[str, Extent] = {}
    pending = []
    for param, shape, whole in zip(program.params, shapes, given, strict=True):
        check_rank(param, shape)
        both = (shape, whole)
        pending += [(param, declared, have, both) for declared, have in zip(param.type.shape, shape, strict=True)]
    while pending:
        open_ = []
        for param, declared, have, both in pending:
            unknown = sorted(declared.names - sizes.keys())
            if not unknown:
                if extent(declared, sizes) != have:
                    raise CodaCallError(misfit(program, param, declared, have, *both), param.loc, argument=param.name)
            elif len(unknown) == 1 and (solved := _solved(declared, unknown[0], have, sizes)) is not None:
                sizes[unknown[0]] = solved
            else:
                open_.append((param, declared, have, both))
        if len(open_) == len(pending):
            raise CodaCallError(
                f"the shapes do not say what {', '.join(sorted(open_[0][1].names - sizes.keys()))} of "
                f"`{program.name}` is",
                argument=open_[0][0].name,
            )
        pending = open_
    return sizes


def _solved(declared: Dim, name: str, have: Extent, sizes: Mapping[str, Extent]) -> Extent | None:
    """What a name must be for an extent to be `have`: (have - rest) / factor, where it is linear in the name."""
    factor = Dim(tuple((_dropped(m, name), c) for m, c in declared.terms if m.count(name) == 1))
    rest = Dim(tuple((m, c) for m, c in declared.terms if name not in m))
    if len(factor.terms) + len(rest.terms) != len(declared.terms):
        return None
    scale = math.lcm(*(c.denominator for _, c in (*factor.terms, *rest.terms)))
    return (have * scale - extent(rest * scale, sizes)) // extent(factor * scale, sizes)


def _dropped(monomial: tuple[str, ...], name: str) -> tuple[str, ...]:
    position = monomial.index(name)
    return monomial[:position] + monomial[position + 1 :]


__all__ = ["Binding", "Shape", "Value", "bind", "check", "check_value", "extent", "show"]
