"""From a call's arguments to what will be run: everything that can be wrong with a call is found here, up front.

A call is bound in two steps.  `bind` puts positional and keyword arguments into the order of the signature.  `check`
compares shapes, dtypes and devices with the definition and returns a `Binding`: the extents, how to flatten leading
batch dimensions, and what each output will be.  A binding depends only on what `key` sees of the arguments, so it is
made once per combination and then looked up.

| argument                   | shape            | M, N and K                                             |
|----------------------------|------------------|--------------------------------------------------------|
| `a` (hosted: none)         | [..., K]         | `...` are the leading dimensions, M their product      |
| `w` (hosted: none)         | [w*N, K]         | w is the accumulator's width                           |
| a tile                     | [..., w*N]       |                                                        |
| a col                      | [...] or [M]     |                                                        |
| a row                      | [w*N]            |                                                        |
| one row per sample         | [B, w*N]         | B divides M                                            |
| a scalar                   | [] or a number   |                                                        |

What a parameter holds is floats of any dtype, int32 or int64 or bool as it is declared (`ELEMENTS`).

Hosted calls take the accumulator itself as their first tile; `...` and N are then whatever the first arguments that
have them say, or the `extents` that the caller gives.  Where no argument has B, it is the first of several leading
dimensions; where one has, B samples are whole leading dimensions.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from codalang.errors import CodaCallError, Loc
from codalang.ir.epilogue import Epilogue, Node, Output, Param
from codalang.ir.ops import OPS
from codalang.ir.reference import TORCH_DTYPES
from codalang.ir.types import Dtype, Kind, show_extent
from codalang.torch.arguments import MISSING, in_order

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Value = Tensor | float
Extent = int  # or a SymInt while a compiler traces


@attrs.frozen
class Elements:
    """What an argument for a parameter of some register dtype holds.

    Attributes:
        dtypes: of tensors; the first is what a number becomes where it must be a tensor, None for the dtype that is
            computed in.
        number: whether a Python number will do for a scalar.
        called: that number, in words.
    """

    dtypes: tuple[torch.dtype, ...]
    number: Callable[[object], bool]
    called: str

    def as_tensor(self, value: float, compute: torch.dtype, device: torch.device | None) -> Tensor:
        """A number as a tensor without dimensions: what `check` refuses as a number it must refuse as a tensor, too."""
        if isinstance(value, bool | int | float) and not self.number(value):
            return torch.tensor(value, device=device)
        dtype = compute if self.dtypes == FLOATING else self.dtypes[0]  # `is` is not what Dynamo makes of it
        return torch.full((), value if isinstance(value, bool | int) else float(value), dtype=dtype, device=device)


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and -(2**31) <= int(value) < 2**31


def _is_number(value: object) -> bool:
    if isinstance(value, int):  # one of hundreds of digits is no float
        return not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST
    return isinstance(value, numbers.Real)


_LARGEST = sys.float_info.max


ELEMENTS = {
    Dtype.F32: Elements(FLOATING, _is_number, "a number"),
    Dtype.I32: Elements((torch.int32, torch.int64), _is_integer, "an integer of 32 bits"),
    Dtype.BOOL: Elements((torch.bool,), lambda value: isinstance(value, bool), "True or False"),
}

ONE_DTYPE = "cast one of them with .to(dtype), or make the call under torch.autocast"
_OPERAND_SHAPES = {"a": "[..., K]", "w": "[N, K]"}


@attrs.frozen(eq=False)
class Signature:
    """What a call of an epilogue looks like.  `on_gemm`: it takes `a` and `w` in place of the accumulator."""

    epilogue: Epilogue
    on_gemm: bool

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters that are passed as such."""
        return self.epilogue.params[1:] if self.on_gemm else self.epilogue.params

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments' names in order.  Where a parameter is called `a` or `w` too, that keyword is the parameter."""
        return (("a", "w") if self.on_gemm else ()) + tuple(p.name for p in self.params)

    def show(self) -> str:
        """The call as it is written."""
        return f"{self.epilogue.name}{'' if self.on_gemm else '.hosted'}({', '.join(self.names)})"

    @property
    def groups(self) -> list[tuple[Node, int]]:
        """The nodes that combine groups of adjacent columns, and how many each."""
        return [(n, int(n.attr or 1)) for n in self.epilogue.nodes if n.op in OPS and OPS[n.op].attr == "group"]

    @property
    def needs_even_columns(self) -> bool:
        """True where some value has N/2 columns."""
        items = (*self.epilogue.nodes, *self.epilogue.params, *self.epilogue.outputs)
        return any(item.type.width == Fraction(1, 2) for item in items)


@attrs.frozen(eq=False)
class Binding:
    """A call that was checked.

    Attributes:
        lead: the leading dimensions, whose product is `rows`.
        rows, columns: M and N.
        compute: float64 where any argument is, else float32.
        device: where it runs.
        flat: for each argument its shape with leading dimensions flattened, None where it has it.
        moved: arguments that are 0-d tensors on the CPU and must be brought to the device.
        default: the storage dtype of a tile that has no annotation.
        samples: B, where there is one row per sample, else 0.
    """

    lead: tuple[Extent, ...]
    rows: Extent
    columns: Extent
    compute: torch.dtype
    device: torch.device
    flat: tuple[tuple[Extent, ...] | None, ...]
    moved: tuple[int, ...]
    default: torch.dtype
    samples: Extent = 0

    @property
    def is_empty(self) -> bool:
        """No rows, or no columns; an extent that is a symbol is not 0."""
        return any(isinstance(e, int) and e == 0 for e in (self.rows, self.columns))

    def shape(self, output: Output) -> tuple[Extent, ...]:
        """The shape the caller gets for an output."""
        return lead_of(output, self.lead, self.samples) + columns_of(output.type.width, self.columns)


def lead_of(item: Param | Output, rows: tuple[Extent, ...], samples: Extent) -> tuple[Extent, ...]:
    """The dimensions before the columns: `rows` of what has a number for each row, `samples`, or none."""
    if item.type.kind is Kind.ROWS:
        return (samples,)
    return rows if item.type.kind.has_rows else ()


def are_leading(samples: Extent, lead: Sequence[Extent]) -> bool:
    """Are samples whole leading dimensions of their rows: all rows, those of the first, of the first two, ...?"""
    return len(lead) < 2 or any(samples == math.prod(lead[:count]) for count in range(len(lead) + 1))


def columns_of(width: Fraction | None, columns: Extent) -> tuple[Extent, ...]:
    """`(width * columns,)`, or () where there is no width."""
    return () if width is None else (columns * width.numerator // width.denominator,)


def bind(signature: Signature, args: Sequence[object], named: Mapping[str, object]) -> list[object]:
    """The arguments in the order of the signature.

    Raises CodaCallError, naming the argument, where one is missing, given twice, unknown, or there are too many.
    """
    names = signature.names
    if not named and len(args) == len(names):
        return list(args)
    positions = {name: position for position, name in enumerate(names)}
    slots = in_order(signature, Signature.show, len(names), positions, args, named)
    for name, value, param in zip(names, slots, _params_or_operands(signature), strict=True):
        if value is MISSING:
            wanted = f": {param.type.show(signature.epilogue.dims)}" if param else ""
            raise CodaCallError(
                f"`{signature.show()}` is missing `{name}`{wanted}", param.loc if param else None, argument=name
            )
    return slots


def extents_of(signature: Signature, given: object) -> tuple[Extent, ...]:
    """The `extents` of a call as (M, N), or (M, N, B).  Raises CodaCallError where they are no sizes of a tensor."""
    dims = signature.epilogue.dims
    if isinstance(given, tuple | list) and 2 <= len(given) <= len(dims):
        if all(isinstance(e, torch.SymInt) or (_is_integer(e) and e >= 0) for e in given):
            return tuple(given)
    count = "two" if len(dims) == 2 else "two or three"
    raise CodaCallError(
        f"extents of `{signature.show()}` must be ({', '.join(dims)}), {count} integers from 0 to 2**31 - 1, "
        f"got {_shortened(given)}",
        argument="extents",
    )


def _shortened(value: object) -> str:
    """A value as Python writes it, where that is short."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "<thousands of digits>"
    return text if len(text) <= 60 else f"{text[:57]}..."


def key(values: Sequence[object]) -> tuple[object, ...]:
    """All that `check` looks at.  Numbers differ only in that they are numbers."""
    return tuple([(v.shape, v.dtype, v.device, v.layout) if isinstance(v, Tensor) else _number_key(v) for v in values])


def forms(values: Sequence[Any]) -> tuple[object, ...]:
    """All that a call depends on but addresses: how tensors lie in memory, too, and whether they require gradients.

    Raises RuntimeError for what has no strides or no memory.
    """
    return tuple(
        [
            (v.shape, v.stride(), v.dtype, v.device, v.data_ptr() & 15, v.requires_grad)
            if type(v) in PLAIN or has_memory(v)
            else _number_key(v)
            for v in values
        ]
    )


PLAIN = frozenset((Tensor, torch.nn.Parameter))  # most arguments; to ask their type is soonest


def has_memory(value: object) -> bool:
    """Is it a tensor?  Raises RuntimeError for one that does torch's operators itself: its address says nothing."""
    if not isinstance(value, Tensor):
        return False
    if dispatches(value):
        raise RuntimeError("no memory of its own")
    return True


def dispatches(value: object) -> bool:
    """Does this tensor do torch's operators itself (a fake one outside its mode, a distributed one)?"""
    return isinstance(value, Tensor) and torch._C._dispatch_keys(value).has(torch._C.DispatchKey.Python)


Found = TypeVar("Found")


def remember(memory: dict[Any, Found], seen: Any, found: Found, most: int) -> Found:
    """Keep what was found for a key; where so many are kept, they are forgotten first."""
    if len(memory) >= most:
        memory.clear()
    memory[seen] = found
    return found


def _number_key(value: object) -> object:
    """Which sorts of numbers it is; what is none is like itself only."""
    sorts = (_is_number(value), _is_integer(value), isinstance(value, bool))
    return sorts if True in sorts else (type(value), id(value))


def check(signature: Signature, values: Sequence[object], extents: tuple[Extent, ...] | None = None) -> Binding:
    """Compare the arguments with the definition.  `extents`: (M, N) or (M, N, B), for hosted calls that lack one.

    Raises CodaCallError that names the argument, what was expected, and the tensor that decided it.
    """
    epilogue = signature.epilogue
    if signature.on_gemm and epilogue.accumulator is None:
        raise CodaCallError(
            f"`{epilogue.name}` has no accumulator (its first parameter is no tile of numbers), so no matmul can host "
            "it",
            epilogue.loc,
            hint=f"call {epilogue.name}.hosted(...)",
        )
    check_values(signature, values)
    device = common_device(
        signature.epilogue.name, ((name, value, None) for name, value in zip(signature.names, values, strict=True))
    )
    shapes = _Shapes(signature, values, extents)
    flat = shapes.check_params()
    tensors = [v for v in values if isinstance(v, Tensor)]
    compute = torch.float64 if any(t.dtype is torch.float64 for t in tensors) else torch.float32
    moved = tuple(i for i, v in enumerate(values) if isinstance(v, Tensor) and v.device != device)
    return Binding(
        lead=shapes.lead,
        rows=shapes.rows,
        columns=shapes.columns,
        compute=compute,
        device=device,
        flat=flat,
        moved=moved,
        default=_default_dtype(signature, values, compute),
        samples=shapes.samples,
    )


def output_dtype(output: Output, default: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """An annotation wins; else a tile has `default`, an index int32, and any other vector the dtype that is computed
    in."""
    if output.dtype is not None:
        return TORCH_DTYPES[output.dtype]
    if output.type.dtype is Dtype.I32:
        return torch.int32
    return default if output.type.kind is Kind.TILE else compute


def _default_dtype(signature: Signature, values: Sequence[object], compute: torch.dtype) -> torch.dtype:
    """A's dtype; hosted, that of the first tile of floats."""
    for value, param in zip(values, _params_or_operands(signature), strict=True):
        if isinstance(value, Tensor) and (param is None or param.type.kind is Kind.TILE):
            if value.is_floating_point():
                return value.dtype
    return compute


def _params_or_operands(signature: Signature) -> list[Param | None]:
    """Each argument's parameter; None for `a` and `w`."""
    return ([None, None] if signature.on_gemm else []) + list(signature.params)


def check_values(signature: Signature, values: Sequence[object], numbers_only: bool = False) -> None:
    """Compare each argument alone with its declaration: see `check`.  `numbers_only`: leave tensors out."""
    for name, value, param in zip(signature.names, values, _params_or_operands(signature), strict=True):
        if not (numbers_only and isinstance(value, Tensor)):
            _check_kind_of_value(signature, name, value, param)


def _check_kind_of_value(signature: Signature, name: str, value: object, param: Param | None) -> None:
    """A strided tensor of a dtype that fits the declaration, or a number for a scalar."""
    where = f"`{name}` of `{signature.epilogue.name}`"
    loc = param.loc if param else None
    elements = ELEMENTS[param.type.dtype if param else Dtype.F32]
    wanted = (
        param.type.show(signature.epilogue.dims) if param else {"a": "a tensor [..., K]", "w": "a tensor [N, K]"}[name]
    )
    is_scalar = param is not None and param.type.kind is Kind.SCALAR
    if not isinstance(value, Tensor):
        if is_scalar and elements.number(value):
            return
        also = f" or {elements.called}" if is_scalar else ""
        raise CodaCallError(f"{where} must be {wanted}{also}, got {_describe(value)}", loc, argument=name)
    if value.is_nested or value.layout is not torch.strided:
        got = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise CodaCallError(
            f"{where} must be a strided tensor, got {got}",
            loc,
            argument=name,
            hint="call .to_padded_tensor(0.0)" if value.is_nested else "call .to_dense()",
        )
    declared = TORCH_DTYPES[param.dtype] if param is not None and param.dtype is not None else None
    if declared is not None and value.dtype is not declared:
        other = elements.dtypes is FLOATING and value.dtype in FLOATING
        raise CodaCallError(
            f"{where} is declared {param.dtype if param else None} ({declared}), got {value.dtype}",
            loc,
            argument=name,
            hint=f"call .to({declared}){', or drop the annotation to take any dtype' if other else ''}",
        )
    if value.dtype not in elements.dtypes:
        names = [str(d).removeprefix("torch.") for d in elements.dtypes]
        raise CodaCallError(
            f"{where} must have one of the dtypes {', '.join(names)}, got {value.dtype}",
            loc,
            argument=name,
            hint=None if param is None else "integers are declared i32 or i64, masks bool",
        )


def _describe(value: object) -> str:
    called = type(value).__name__
    return f"the {called} {_shortened(value)}" if isinstance(value, bool | int | float) else called


def common_device(called: str, arguments: Iterable[tuple[str, object, Loc | None]]) -> torch.device:
    """The one device of all tensors among the arguments of a call: (name, value, where it is declared) each.

    A tensor without dimensions on the CPU may go with any, as in torch.  Raises CodaCallError.
    """
    decided: tuple[str, torch.device] | None = None
    for name, value, loc in arguments:
        if not isinstance(value, Tensor) or (value.dim() == 0 and value.device.type == "cpu"):
            continue
        if decided is None:
            decided = (name, value.device)
        elif value.device != decided[1]:
            raise CodaCallError(
                f"`{name}` of `{called}` is on {value.device}, but `{decided[0]}` is on {decided[1]}",
                loc,
                argument=name,
                hint="bring all tensors of a call to one device with .to(device)",
            )
    return decided[1] if decided else torch.device("cpu")


class _Shapes:
    """Binds the leading dimensions and N while it walks over the arguments, and checks each against them."""

    def __init__(self, signature: Signature, values: Sequence[object], extents: tuple[Extent, ...] | None) -> None:
        self.signature = signature
        self.epilogue = signature.epilogue
        self.m, self.n = self.epilogue.dims[:2]
        self.values = values
        self.lead: tuple[Extent, ...]
        self.columns: Extent
        self.rows_by, self.columns_by = "extents", "extents"
        if signature.on_gemm:
            self._from_operands()
        else:
            self._from_params(extents)
        self.rows: Extent = math.prod(self.lead)
        if signature.needs_even_columns and self.columns % 2:
            raise CodaCallError(
                f"`{self.epilogue.name}` splits {self.n} columns in pairs, but `{self.columns_by}` makes "
                f"{self.n} = {self.columns}",
                self.epilogue.loc,
                argument=self.columns_by,
            )
        self._check_groups()
        self.samples_by = "extents"
        self.samples: Extent = self._samples(extents) if self.epilogue.has_samples else 0

    def _samples(self, extents: tuple[Extent, ...] | None) -> Extent:
        """B, which divides M: as the first argument that has it says, or the extents, or the leading dimensions."""
        symbol = self.epilogue.dims[2]
        samples: Extent | None = extents[2] if extents is not None and len(extents) > 2 else None
        for param, value in zip(self.signature.params, self.values[2 * self.signature.on_gemm :], strict=True):
            if samples is None and param.type.kind is Kind.ROWS and isinstance(value, Tensor) and value.dim() == 2:
                samples, self.samples_by = value.shape[0], param.name
        if samples is None and len(self.lead) > 1:
            samples, self.samples_by = self.lead[0], self.rows_by
        if samples is None:
            raise CodaCallError(
                f"no argument of `{self.signature.show()}` determines {symbol}",
                self.epilogue.loc,
                argument="extents",
                hint=f"give `{self.rows_by}` leading dimensions [{symbol}, {self.m}/{symbol}]"
                + ("" if self.signature.on_gemm else f", or pass extents=({self.m}, {self.n}, {symbol})"),
            )
        if self.rows % samples if samples else self.rows:
            raise CodaCallError(
                f"`{self.samples_by}` makes {symbol} = {samples} samples of {self.m}/{symbol} rows each, but "
                f"`{self.rows_by}` makes {self.m} = {self.rows}, which is no multiple of it",
                self.epilogue.loc,
                argument=self.samples_by,
            )
        if not are_leading(samples, self.lead):
            raise CodaCallError(
                f"`{self.samples_by}` makes {symbol} = {samples} samples, but `{self.rows_by}` has the leading "
                f"dimensions {_show(self.lead)}, the first of which make no {samples} samples",
                self.epilogue.loc,
                argument=self.samples_by,
                hint=f"samples are the leading dimension of `{self.rows_by}`; flatten it where others are meant",
            )
        return samples

    def _check_groups(self) -> None:
        """Groups of adjacent columns divide the columns that they are formed of."""
        for node, group in self.signature.groups:
            columns = columns_of(node.type.width, self.columns)[0]
            if columns % group:
                raise CodaCallError(
                    f"`{node.op}` of `{self.epilogue.name}` has groups of {group} columns, but `{self.columns_by}` "
                    f"makes {show_extent(node.type.width or Fraction(1), self.n)} = {columns}",
                    node.loc,
                    argument=self.columns_by,
                    hint=f"pass a multiple of {group} columns",
                )

    def _from_operands(self) -> None:
        a, w = self.values[0], self.values[1]
        assert isinstance(a, Tensor) and isinstance(w, Tensor)
        if a.dim() < 1:
            raise CodaCallError(f"`a` must be [..., K], got shape {_show(a.shape)}", argument="a")
        if w.dim() != 2:
            rows = show_extent(self.epilogue.params[0].type.width or Fraction(1), self.n)
            raise CodaCallError(f"`w` must be [{rows}, K], got shape {_show(w.shape)}", argument="w")
        if a.shape[-1] != w.shape[-1]:
            transposed = a.shape[-1] == w.shape[0]
            raise CodaCallError(
                f"`a` is {_show(a.shape)}, so K = {a.shape[-1]}, but `w` is {_show(w.shape)}, so K = {w.shape[-1]}",
                argument="w",
                hint="`w` is [N, K] as torch.nn.Linear keeps it: pass w.T" if transposed else None,
            )
        if a.dtype is not w.dtype:
            raise CodaCallError(
                f"`a` is {a.dtype}, but `w` is {w.dtype}; a matmul takes one dtype", argument="w", hint=ONE_DTYPE
            )
        self.lead, self.rows_by = tuple(a.shape[:-1]), "a"
        self.columns = self._columns("w", self.epilogue.params[0], w.shape[0])
        self.columns_by = "w"

    def _columns(self, name: str, param: Param, size: Extent) -> Extent:
        """N, from an argument that has `width * N` columns."""
        width = param.type.width or Fraction(1)
        if size % width.numerator:
            raise CodaCallError(
                f"`{name}` has {size} {'rows' if name == 'w' else 'columns'}, which are {show_extent(width, self.n)}: "
                f"not a multiple of {width.numerator}",
                param.loc,
                argument=name,
            )
        return size * width.denominator // width.numerator

    def _from_params(self, extents: tuple[Extent, ...] | None) -> None:
        """A tile's leading dimensions are the call's; a col may be flat, so it decides only where there is no tile."""
        given = [(p, v) for p, v in zip(self.signature.params, self.values, strict=True) if isinstance(v, Tensor)]
        for param, value in given:
            if param.type.width is not None and value.dim() == 0:
                raise CodaCallError(self._mismatch(param, value), param.loc, argument=param.name)
        lead: tuple[Extent, ...] | None = None
        columns: Extent | None = None
        for kind in (Kind.TILE, Kind.COL):
            for param, value in given:
                if lead is None and param.type.kind is kind:
                    lead, self.rows_by = tuple(value.shape[: value.dim() - (kind is Kind.TILE)]), param.name
        for param, value in given:
            if columns is None and param.type.width is not None:
                columns, self.columns_by = self._columns(param.name, param, value.shape[-1]), param.name
        if extents is not None:
            lead = (extents[0],) if lead is None else lead
            columns = extents[1] if columns is None else columns
            if (math.prod(lead), columns) != tuple(extents[:2]):
                raise CodaCallError(
                    f"extents = {_show(extents[:2])}, but `{self.rows_by}` makes {self.m} = {math.prod(lead)} and "
                    f"`{self.columns_by}` makes {self.n} = {columns}",
                    argument="extents",
                )
        for symbol, bound in ((self.m, lead), (self.n, columns)):
            if bound is None and self.epilogue.outputs:
                raise CodaCallError(
                    f"no argument of `{self.signature.show()}` determines {symbol}",
                    self.epilogue.loc,
                    argument="extents",
                    hint=f"pass extents=({self.m}, {self.n})",
                )
        self.lead = (0,) if lead is None else lead
        self.columns = 0 if columns is None else columns

    def check_params(self) -> tuple[tuple[Extent, ...] | None, ...]:
        """Each argument's flattened shape, None where it has it already."""
        flat: list[tuple[Extent, ...] | None] = []
        if self.signature.on_gemm:
            a = self.values[0]
            assert isinstance(a, Tensor)
            flat += [None if a.dim() == 2 else (self.rows, a.shape[-1]), None]
        for param, value in zip(self.signature.params, self.values[len(flat) :], strict=True):
            if not isinstance(value, Tensor):
                flat.append(None)
                continue
            shape, tail = tuple(value.shape), columns_of(param.type.width, self.columns)
            lead = lead_of(param, self.lead, self.samples)
            rows = lead_of(param, (self.rows,), self.samples)
            if shape != lead + tail and not (param.type.kind is Kind.COL and shape == rows):
                raise CodaCallError(
                    self._mismatch(param, value), param.loc, argument=param.name, hint=self._shape_hint(param, shape)
                )
            flat.append(None if shape == rows + tail else rows + tail)
        return tuple(flat)

    def _mismatch(self, param: Param, value: Tensor) -> str:
        text = f"`{param.name}` of `{self.epilogue.name}` is {param.type.show(self.epilogue.dims)}"
        if not hasattr(self, "columns"):
            return f"{text}, got shape {_show(value.shape)}"
        if param.type.kind is Kind.ROWS and not hasattr(self, "samples"):
            return f"{text}, got shape {_show(value.shape)}"
        expected = lead_of(param, self.lead, self.samples) + columns_of(param.type.width, self.columns)
        bound = []
        if param.type.kind is Kind.ROWS:
            bound.append(f"{self.epilogue.dims[2]} = {self.samples} from `{self.samples_by}`")
        elif param.type.kind.has_rows:
            bound.append(f"{self.m} = {math.prod(self.lead)} from `{self.rows_by}`")
        if param.type.width is not None:
            bound.append(f"{self.n} = {self.columns} from `{self.columns_by}`")
        because = f" ({', '.join(bound)})" if bound else ""
        return f"{text}, here {_show(expected)}{because}, got shape {_show(value.shape)}"

    def _shape_hint(self, param: Param, shape: tuple[Extent, ...]) -> str | None:
        if param.type.kind is Kind.SCALAR and math.prod(shape) == 1:
            return "a scalar is a number or a tensor without dimensions: call .reshape(())"
        if param.type.kind is Kind.COL and shape and shape[-1] == 1:
            return "a col has no trailing dimension of 1: call .squeeze(-1)"
        if param.type.kind is Kind.ROW and len(shape) > 1 and math.prod(shape[:-1]) == 1:
            return "a row has one dimension: call .reshape(-1)"
        if param.type.kind is Kind.ROWS and len(shape) == 1:
            return "one row for all samples is one sample: call .unsqueeze(0)"
        if param.type.kind is Kind.ROWS and len(shape) > 2:
            return "one row per sample has two dimensions: call .flatten(0, -2)"
        return None


def _show(shape: Sequence[Extent]) -> str:
    return f"[{', '.join(str(s) for s in shape)}]"
