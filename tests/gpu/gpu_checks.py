"""Runs one case on the kernels and measures its error.

The truth is the reference in f64 on exactly the tensors the kernel was given.  The yardstick is the reference's
*rounding* mode, also in f64: it is exact but for the rounding of each stored output, so its error (|rounded - truth|)
is what the storage dtype costs.  An output passes where

    |got - truth| <= 1.05 * |rounded - truth|        for a 16-bit output      (2-norms over the whole tensor)
    |got - truth| <= 1e-5 * |truth|                  for an f32 output

An index is judged by the value that stands at it (`ir.attained`), which is an f32 output; any other integer must be
equal.

Three things that no kernel can do better are allowed for, where an output would fail without:

- Tensor cores truncate the accumulator at each step, so that it shrinks by about K * 2^-30, cuBLAS's too (there is a
  test of that).  What a shrinkage by K * 2^-29 does to an output is added.
- A sum of few elements may cancel by chance.  It is measured against the size it would have if its terms had random
  signs, where that is larger.
- Arithmetic in f32 is not exact, and some programs enlarge what it loses: a difference of nearly equal values, an
  angle of many turns, a comparison or a `cast` that falls the other way.  What a relative change of 2^-20 of every
  value does to an output is added, the largest of 8 random changes for each element.
- What is below 2^-126 is 0 in f32: an infinite cotangent times it is NaN.  Where infinities and NaNs are not those of
  f64, all of them must be those of f64 with such values flushed.

Beside the error, each case checks shape, dtype and contiguity, that every element was written (outputs and partials
are NaN before), that nothing outside them was, that no input changed, and that a second run gives the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import attrs
import torch
from gpu_cases import Case, derived, source
from torch import Tensor

from codalang.ir import reference
from codalang.ir.attained import attained, is_index
from codalang.ir.epilogue import Epilogue, Node, Output, Param, Reduce, with_values
from codalang.ir.infer import infer
from codalang.ir.reference import TORCH_DTYPES
from codalang.ir.types import Dtype, Kind, ValueType
from codalang.lower import plan, split
from codalang.lower.folded import Matrix
from codalang.lower.prepare import prepared_operand
from codalang.lower.spec import KernelSpec, Operand, loaded_params

ROUNDING_ALLOWANCE = 1.05
F32_ALLOWANCE = 1e-5
# Below this a 16-bit output is exact up to the f32 arithmetic before its rounding, and a ratio means nothing.
EXACT = 1e-6
# Relative loss of the accumulator per element of K, with a factor of 2 to spare.
TRUNCATION = 2.0**-29
# The relative change of every value whose effect is allowed for, and how many random ones are tried: a comparison that
# f32 decides otherwise is decided otherwise by half of them.
NOISE = 2.0**-20
DRAWS = 8
# The reference runs on blocks of rows of at most this many elements, so that f64 copies stay small.
BLOCK_ELEMENTS = 2**28
GUARD = 512
# The standard deviation of an accumulator of tame inputs: among 10^6 elements, few are beyond 5 of them.
TAME_SPREAD = 0.4

Results = dict[str, Tensor]


class Backend(Protocol):
    """What runs an epilogue: `codalang.lower.run`, or a stand-in."""

    def gemm(
        self,
        e: Epilogue,
        a: Tensor,
        b: Tensor,
        inputs: Mapping[str, Tensor],
        *,
        config: plan.Config | None = None,
        samples: int | None = None,
    ) -> dict[str, Tensor]:
        """On the accumulator a @ b.T."""

    def hosted(
        self,
        e: Epilogue,
        inputs: Mapping[str, Tensor],
        *,
        extents: tuple[int, ...] | None = None,
        default_dtype: torch.dtype | None = None,
    ) -> dict[str, Tensor]:
        """On plain tensors."""


@attrs.frozen
class Finding:
    """The measured error of one output: `error` and `allowed` are relative 2-norms; `fault` says what else is wrong."""

    case: Case
    output: str
    error: float = 0.0
    allowed: float = 0.0
    fault: str | None = None

    @property
    def ok(self) -> bool:
        """True where the output passes.  NaN does not."""
        return self.fault is None and self.error <= self.allowed

    def __str__(self) -> str:
        return f"{self.case}: `{self.output}` {self.fault or f'error {self.error:.3e}, allowed {self.allowed:.3e}'}"


# --- memory layouts ---------------------------------------------------------------------------------------------------


def poison(dtype: torch.dtype) -> float:
    """What fills memory that must be written, or must not be read."""
    return torch.nan if dtype.is_floating_point else 1 if dtype is torch.bool else -(2**30)


def _placed(values: Tensor, shape: tuple[int, ...], view: Callable[[Tensor], Tensor]) -> Tensor:
    """`values` written into a view of a fresh poisoned buffer."""
    buffer = torch.full(shape, poison(values.dtype), dtype=values.dtype, device=values.device)
    view(buffer).copy_(values)
    return view(buffer)


def _pitched(values: Tensor, pitch: int) -> Tensor:
    rows, columns = values.shape
    return _placed(values, (rows, pitch), lambda buffer: buffer[:, :columns])


def _odd_base(values: Tensor) -> Tensor:
    return _placed(values, (values.numel() + 1,), lambda buffer: buffer[1:].view(values.shape))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda v: v,
    "column": lambda v: v.t().contiguous().t(),
    "pitched": lambda v: _pitched(v, (v.shape[1] + 15) // 8 * 8),
    "odd pitch": lambda v: _pitched(v, v.shape[1] | 1),
    "odd base": _odd_base,
    "every other row": lambda v: _placed(v, (2 * v.shape[0], v.shape[1]), lambda buffer: buffer[::2]),
    "every other column": lambda v: _placed(v, (v.shape[0], 2 * v.shape[1]), lambda buffer: buffer[:, ::2]),
    "expanded rows": lambda v: v[:1].expand(v.shape) if len(v) else v,
    "expanded columns": lambda v: v[:, :1].expand(v.shape) if v.shape[1] else v,
    "dense": lambda v: v,
    "strided": lambda v: _placed(v, (*v.shape, 3), lambda buffer: buffer[..., 1]),
    "expanded": lambda v: v[:1].expand(v.shape) if v.dim() and len(v) else v,
}


# --- inputs -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Inputs:
    """The tensors of one case: `a` and `b` of a GEMM (or None), and the epilogue's other inputs by name."""

    a: Tensor | None
    b: Tensor | None
    named: dict[str, Tensor]

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [t for t in (self.a, self.b, *self.named.values()) if t is not None]


def shape_of(type: ValueType, m: int, n: int) -> tuple[int, ...]:
    """The extents of a value of that type."""
    rows = (samples_of(m),) if type.kind is Kind.ROWS else (m,) if type.kind.has_rows else ()
    columns = (int(n * type.width),) if type.width is not None else ()
    return rows + columns


def samples_of(m: int) -> int:
    """How many samples so many rows are: some of them of a multiple of 16 rows, and some not."""
    return next(samples for samples in (8, 5, 3, 7, 1) if m % samples == 0)


def extents_of(case: Case) -> tuple[int, int, int]:
    """M, N and the number of samples."""
    return case.m, case.n, samples_of(case.m)


def make_inputs(case: Case, device: str, *, contents: bool = True) -> Inputs:
    """Random inputs of a case: unit variance times the case's magnitude for the accumulator and tiles; rows, cols and
    scalars stand around 1, as scales and variances do; indices are those of columns, or just no column.

    A backward is given the outputs and saves of a forward run, rounded as the kernel stores them, and random
    cotangents.  Without `contents` the tensors are uninitialized: enough to see which kernel they need.
    """
    generator = torch.Generator(device).manual_seed(hash((case.m, case.n, case.k)) % 2**31) if contents else None

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device) if contents else torch.empty(shape, device=device)

    def value(param: Param) -> Tensor:
        tile = param.type.kind is Kind.TILE
        shape = shape_of(param.type, case.m, case.n)
        if param.type.dtype is Dtype.BOOL:
            return normal(*shape) > 0
        if param.type.dtype is Dtype.I32:
            low, high = (-2, 10) if case.tame else (-1, max(case.n, 1))
            drawn = torch.empty(shape, device=device)
            drawn = drawn.uniform_(low, high, generator=generator).floor_() if contents else drawn
            return drawn.to(TORCH_DTYPES[param.dtype])
        dtype = param.dtype or (case.dtype if tile or case.vector_dtype == "same" else case.vector_dtype)
        if case.tame and contents:
            return torch.empty(shape, device=device).uniform_(-2, 2, generator=generator).to(TORCH_DTYPES[dtype])
        drawn = normal(*shape)
        return (drawn * case.magnitude if tile else 1 + drawn / 4).to(TORCH_DTYPES[dtype])

    subject, epilogue = case.subject, case.subject.epilogue
    values = {p.name: value(p) for p in source(subject.name).params}
    if subject.backward:
        results = _forward_results(case, values) if contents else _forward_forms(case, device)
        loads = derived(subject.name).loads
        tables = {"param": values, "output": results, "saved": results}
        values = {
            p.name: value(p)
            if loads[p.name].source == "cotangent"
            else tables[loads[p.name].source][loads[p.name].name]
            for p in epilogue.params
        }
    a = b = None
    if subject.on_gemm:
        columns = int(case.n * (epilogue.params[0].type.width or 1))
        spread = (TAME_SPREAD if case.tame else case.magnitude) / max(case.k, 1) ** 0.5
        a = LAYOUTS[case.a]((normal(case.m, case.k) * spread).to(TORCH_DTYPES[case.dtype]))
        b = LAYOUTS[case.b](normal(columns, case.k).to(TORCH_DTYPES[case.dtype]))
    named = {}
    for param in epilogue.params[1:] if subject.on_gemm else epilogue.params:
        layout = case.tile if param.type.kind is Kind.TILE else case.vector
        named[param.name] = LAYOUTS[layout](values[param.name])
    return Inputs(a, b, named)


def _forward_results(case: Case, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the forward leaves for the backward: each output and save, in its storage dtype."""
    forward = derived(case.subject.name).forward
    rounded: dict[str, list[Tensor]] = {}
    for rows in _blocks(case):
        block = {name: _rows(forward.param(name).type, t, rows) for name, t in values.items()}
        for name, result in _evaluate(forward, block, _extents_of(case, rows), case.dtype).items():
            rounded.setdefault(name, []).append(result)
    return {o.name: _merge(o, rounded[o.name]) for o in forward.outputs}


def _forward_forms(case: Case, device: str) -> dict[str, Tensor]:
    """The same, uninitialized."""
    return {
        o.name: torch.empty(shape_of(o.type, case.m, case.n), dtype=storage_dtype(o, case.dtype), device=device)
        for o in derived(case.subject.name).forward.outputs
    }


def adds_up(output: Output) -> bool:
    """True where the results of blocks of rows are simply put together: side by side, or added."""
    return output.type.kind.per_row or (isinstance(output, Reduce) and output.how == "sum")


# --- truth ------------------------------------------------------------------------------------------------------------


def storage_dtype(output: Output, dtype: str) -> torch.dtype:
    """The dtype in which a kernel keeps an output where A has `dtype`."""
    return reference.Storage(TORCH_DTYPES[dtype]).of(output)


def _blocks(case: Case) -> list[slice]:
    """Ranges of rows small enough for the reference; one, empty or not, at the least, or where the results of several
    do not add up."""
    epilogue = case.subject.epilogue
    whole = any(node.op == "row_index" for node in epilogue.nodes) or derived(case.subject.name).forward.has_samples
    if whole or not all(adds_up(o) for o in (*epilogue.outputs, *derived(case.subject.name).forward.outputs)):
        return [slice(0, case.m)]
    step = max(1, BLOCK_ELEMENTS // max(1, case.n))
    return [slice(start, min(start + step, case.m)) for start in range(0, max(case.m, 1), step)]


def _rows(type: ValueType, tensor: Tensor, rows: slice) -> Tensor:
    return tensor[rows] if type.kind.per_row else tensor


def _extents_of(case: Case, rows: slice) -> tuple[int, int, int]:
    """Those of a block of rows; it is all rows where there are samples."""
    return rows.stop - rows.start, case.n, samples_of(rows.stop - rows.start)


def _merge(output: Output, blocks: list[Tensor]) -> Tensor:
    """One result from those of the blocks: rows side by side, sums over rows added."""
    if len(blocks) == 1:
        return blocks[0]
    return torch.cat(blocks) if output.type.kind.per_row else torch.stack(blocks).sum(0)


def _evaluate(
    epilogue: Epilogue, inputs: Mapping[str, Tensor], extents: tuple[int, ...], storage: str | None = None
) -> dict[str, Tensor]:
    """The reference in f64; with a storage dtype, in rounding mode."""
    rounding = None if storage is None else reference.Storage(TORCH_DTYPES[storage])
    return reference.run(epilogue, inputs, dtype=torch.float64, extents=extents, storage=rounding)


def _reference_blocks(
    case: Case, inputs: Inputs, epilogue: Epilogue, shrink: float = 0.0
) -> Iterator[tuple[slice, Results]]:
    """Per block of rows: the reference's results in f64, of an accumulator that is smaller by the factor `shrink`."""
    for rows in _blocks(case):
        yield rows, _evaluate(epilogue, _accumulated(case, inputs, rows, shrink), _extents_of(case, rows))


def _accumulated(case: Case, inputs: Inputs, rows: slice, shrink: float = 0.0) -> dict[str, Tensor]:
    """All parameters by name, of some rows, the accumulator among them in f64."""
    epilogue = case.subject.epilogue
    block = {name: _rows(epilogue.param(name).type, t, rows) for name, t in inputs.named.items()}
    if inputs.a is not None and inputs.b is not None:
        block[epilogue.params[0].name] = (inputs.a[rows].double() @ inputs.b.double().t()) * (1 - shrink)
    return block


# --- the check --------------------------------------------------------------------------------------------------------


def run_case(case: Case, inputs: Inputs, backend: Backend) -> Results:
    """One run on the backend."""
    epilogue = case.subject.epilogue
    if inputs.a is None or inputs.b is None:
        dtype = TORCH_DTYPES[case.dtype]
        extents = extents_of(case)[: len(epilogue.dims)]
        return backend.hosted(epilogue, inputs.named, extents=extents, default_dtype=dtype)
    samples = samples_of(case.m) if epilogue.has_samples else None
    if case.tiling is None and case.parts is None:
        return backend.gemm(epilogue, inputs.a, inputs.b, inputs.named, samples=samples)
    config = _configuration(case, inputs)
    return backend.gemm(epilogue, inputs.a, inputs.b, inputs.named, config=config, samples=samples)


def _configuration(case: Case, inputs: Inputs) -> plan.Config | None:
    """The configuration of the case's tiling, None (hence the heuristic's choice) where the epilogue does not fit."""
    epilogue = case.subject.epilogue
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    loaded = tuple(names[inputs.named[p.name].dtype] for p in loaded_params(epilogue, True))
    stored = tuple(s.dtype or case.dtype for s in epilogue.stores)
    majors = [prepared_operand(Matrix(t, 1), False)[1] for t in (inputs.a, inputs.b) if t is not None]
    spec = KernelSpec(epilogue, Operand(case.dtype, *majors), loaded, stored, None)
    if case.parts is not None:
        tiling, parts = split.TILINGS[case.parts[0]], case.parts[1]
        fitting = next(split.configurations(spec, tiling, case.m), None)
        return fitting and attrs.evolve(fitting, split=parts)
    return next(iter(plan._configurations(spec, plan.TILINGS[case.tiling or 0])), None)


def check(case: Case, backend: Backend, device: str = "cuda", allocator: object | None = None) -> list[Finding]:
    """Run a case twice and judge it; one finding per output.

    `allocator` is the module whose `empty` makes outputs and partials; it is wrapped so that they start as NaN between
    guard bands.
    """
    inputs = make_inputs(case, device)
    before = [t.clone() for t in inputs.tensors()]
    with poisoned(allocator) as allocations:
        first = run_case(case, inputs, backend)
        second = run_case(case, inputs, backend)
    if fault := next(filter(None, (allocation.fault() for allocation in allocations)), None):
        return [Finding(case, "*", fault=fault)]
    if not all(_same_bits(x, y) for x, y in zip(before, inputs.tensors(), strict=True)):
        return [Finding(case, "*", fault="an input was written into")]
    outputs = case.subject.epilogue.outputs
    if list(first) != [o.name for o in outputs]:
        return [Finding(case, "*", fault=f"outputs are {list(first)}, expected {[o.name for o in outputs]}")]
    faults = {o.name: _form_fault(case, o, first[o.name], second[o.name]) for o in outputs}
    sound = [o for o in outputs if faults[o.name] is None]
    errors = _errors(case, inputs, {o.name: first[o.name] for o in sound})
    return [
        Finding(case, o.name, *errors[o.name]) if o in sound else Finding(case, o.name, fault=faults[o.name])
        for o in outputs
    ]


def _form_fault(case: Case, output: Output, first: Tensor, second: Tensor) -> str | None:
    """What is wrong with an output beside its values, or None."""
    shape, dtype = shape_of(output.type, case.m, case.n), storage_dtype(output, case.dtype)
    if tuple(first.shape) != shape or first.dtype != dtype:
        return f"is {first.dtype} {tuple(first.shape)}, expected {dtype} {shape}"
    if not first.is_contiguous():
        return f"is not contiguous: strides {first.stride()}"
    return None if _same_bits(first, second) else "differs between two runs"


def _same_bits(x: Tensor, y: Tensor) -> bool:
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.equal(x.view(integer), y.view(integer))


def _errors(case: Case, inputs: Inputs, got: Mapping[str, Tensor]) -> dict[str, tuple[float, float, str | None]]:
    """Per output: its relative error, the error allowed, and a fault where infinities or NaNs are not where they
    must be."""
    epilogue = case.subject.epilogue
    outputs = {o.name: o for o in epilogue.outputs if o.name in got and o.type.dtype is Dtype.F32}
    results = _integer_errors(case, inputs, got)
    squares, faults = _compared(case, inputs, epilogue, outputs, got)
    if any(faults.values()):  # an infinity times what is tiny in f64, and 0 in f32
        squares, faults = _compared(case, inputs, flushed(epilogue), outputs, got)
    for name, output in outputs.items():
        error, allowed = _relative(squares[name], storage_dtype(output, case.dtype))
        size = float(squares[name][2].sqrt()) or 1.0
        if error > allowed:
            if isinstance(output, Reduce) and output.how == "sum":
                allowed *= max(1.0, _random_sign_size(case, inputs, output) / size)
            allowed += _truncation_effect(case, inputs, output) / size
        if error > allowed:
            allowed += _noise_effect(case, inputs, output) / size
        results[name] = (error, allowed, faults[name])
    return results


def _compared(
    case: Case, inputs: Inputs, epilogue: Epilogue, outputs: Mapping[str, Output], got: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, str | None]]:
    """Per output: what `_accumulate` adds up, and a fault."""
    squares = {name: torch.zeros(3, dtype=torch.float64) for name in outputs}
    faults: dict[str, str | None] = dict.fromkeys(outputs)
    sums: dict[str, Tensor] = {}
    for rows, truth in _reference_blocks(case, inputs, epilogue):
        for name, output in outputs.items():
            if output.type.kind.per_row:
                faults[name] = faults[name] or _accumulate(squares[name], got[name][rows], truth[name])
            else:
                sums[name] = sums[name] + truth[name] if name in sums else truth[name]
    for name, total in sums.items():
        faults[name] = _accumulate(squares[name], got[name], total)
    return squares, faults


def _integer_errors(
    case: Case, inputs: Inputs, got: Mapping[str, Tensor]
) -> dict[str, tuple[float, float, str | None]]:
    """The same of integer outputs."""
    epilogue = case.subject.epilogue
    outputs = [o for o in epilogue.states if o.name in got and o.type.dtype is not Dtype.F32]
    results: dict[str, tuple[float, float, str | None]] = {}
    if not outputs:
        return results
    ((_, truth),) = _reference_blocks(case, inputs, epilogue)
    for output in outputs:
        name = output.name
        wrong = int((got[name] != truth[name]).sum())
        if not wrong or not is_index(output):
            results[name] = (0.0, 0.0, f"{wrong} of {got[name].numel()} integers are wrong" if wrong else None)
            continue
        given, extents = _accumulated(case, inputs, slice(0, case.m)), extents_of(case)
        there, wanted = (attained(epilogue, output, given, results_, extents=extents) for results_ in (got, truth))
        squares = torch.zeros(3, dtype=torch.float64)
        fault = _accumulate(squares, there, wanted)
        error, allowed = float(squares[0].sqrt()), F32_ALLOWANCE * float(squares[2].sqrt())
        if error > allowed:
            value = Reduce(name, output.value, attrs.evolve(output.type, dtype=Dtype.F32), "max")
            allowed += _truncation_effect(case, inputs, value) + _noise_effect(case, inputs, value)
        size = float(squares[2].sqrt()) or 1.0
        results[name] = (error / size, allowed / size, fault)
    return results


def _truncation_effect(case: Case, inputs: Inputs, output: Output) -> float:
    """The 2-norm of what the tensor cores' truncation of the accumulator may change in an output."""
    if inputs.a is None:
        return 0.0
    epilogue = attrs.evolve(case.subject.epilogue, outputs=(output,))
    exact = _reference_blocks(case, inputs, epilogue)
    shrunk = _reference_blocks(case, inputs, epilogue, case.k * TRUNCATION)
    changes = [t[output.name] - s[output.name] for (_, t), (_, s) in zip(exact, shrunk, strict=True)]
    return float(_merge(output, changes).nan_to_num(0.0, 0.0, 0.0).norm())


def _random_sign_size(case: Case, inputs: Inputs, output: Reduce) -> float:
    """The 2-norm that a reduction is expected to have if its terms had random signs: sqrt of their squares' sum."""
    epilogue = case.subject.epilogue
    value = epilogue.nodes[output.value]
    square = Node("mul", (output.value, output.value), value.type)
    squared = attrs.evolve(
        epilogue,
        nodes=(*epilogue.nodes, square),
        outputs=(attrs.evolve(output, value=len(epilogue.nodes)),),
    )
    blocks = _reference_blocks(case, inputs, squared)
    return sum(float(squares[output.name].sum()) for _, squares in blocks) ** 0.5


def _noise_effect(case: Case, inputs: Inputs, output: Output) -> float:
    """The 2-norm of what small relative changes of every value may change in an output, beside rounding."""
    epilogue = attrs.evolve(case.subject.epilogue, outputs=(output,))
    rows, extents = slice(0, case.m), extents_of(case)
    given = _accumulated(case, inputs, rows)
    noisy = with_noise(epilogue, exact=not case.subject.on_gemm)
    generator = torch.Generator(next(iter(given.values())).device).manual_seed(0)
    truth = _evaluate(epilogue, given, extents)[output.name]
    most = torch.zeros_like(truth)
    for _ in range(DRAWS):
        noise = {}
        for param in noisy.params[len(epilogue.params) :]:
            shape = shape_of(param.type, case.m, case.n)
            drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float64)
            noise[param.name] = 1 + NOISE * drawn
        change = _evaluate(noisy, given | noise, extents)[output.name] - truth
        most = torch.maximum(most, change.abs().nan_to_num(0.0, 0.0, 0.0))
    return float(most.norm())


def with_noise(epilogue: Epilogue, exact: bool) -> Epilogue:
    """The epilogue with each float value that it computes multiplied by a further parameter, and its accumulator, too,
    unless that is `exact`."""
    params: list[Param] = []

    def noisy(nodes: list[Node], value: int) -> None:
        type_ = nodes[value].type
        name = f"noise {len(nodes)}"  # no name that a program may have
        params.append(Param(name, type_))
        nodes.append(Node("param", (), type_, name))
        nodes.append(Node("mul", (value, len(nodes) - 1), infer("mul", [type_, type_], epilogue.dims)))

    changed = _with_values_changed(epilogue, noisy, exact=exact)
    return attrs.evolve(changed, params=(*epilogue.params, *params))


def flushed(epilogue: Epilogue) -> Epilogue:
    """The epilogue with 0 for each float value that it computes which is below the least normal number of f32."""

    def flush(nodes: list[Node], value: int) -> None:
        type_ = nodes[value].type
        number = ValueType(Kind.SCALAR)
        first = len(nodes)
        nodes.append(Node("abs", (value,), type_))
        nodes.append(Node("const", (), number, 2.0**-126))
        nodes.append(Node("lt", (first, first + 1), infer("lt", [type_, number], epilogue.dims)))
        nodes.append(Node("const", (), number, 0.0))
        chosen = [nodes[first + 2].type, number, type_]
        nodes.append(Node("where", (first + 2, first + 3, value), infer("where", chosen, epilogue.dims)))

    return _with_values_changed(epilogue, flush, exact=False)


def _with_values_changed(epilogue: Epilogue, change: Callable[[list[Node], int], None], *, exact: bool) -> Epilogue:
    """The epilogue where what uses a float value takes the node that `change` ends with instead: of each that it
    computes, and of its accumulator unless that is `exact`."""
    nodes: list[Node] = []
    place: list[int] = []
    for node in epilogue.nodes:
        nodes.append(attrs.evolve(node, args=tuple(place[a] for a in node.args)))
        loaded = node.op == "param" and (exact or node.attr != epilogue.params[0].name)
        if node.type.dtype is Dtype.F32 and node.op != "const" and not loaded:
            change(nodes, len(nodes) - 1)
        place.append(len(nodes) - 1)
    outputs = tuple(with_values(o, tuple(place[v] for v in o.values)) for o in epilogue.outputs)
    return attrs.evolve(epilogue, nodes=tuple(nodes), outputs=outputs)


def _accumulate(squares: Tensor, got: Tensor, truth: Tensor) -> str | None:
    """Add the squared norms of got - truth, rounded - truth and truth over what is finite in storage.

    The rounding mode of the reference, computing in f64, is its truth rounded to the storage dtype.
    """
    rounded = truth.to(got.dtype).double()
    got = got.double()
    finite = rounded.isfinite()
    if bool((got.isfinite() != finite).any()):
        return (
            f"{int((finite & ~got.isfinite()).sum())} elements are inf or NaN that must be finite, "
            f"{int((~finite & got.isfinite()).sum())} finite that must not be"
        )
    beyond = ~finite & ~((got == rounded) | (got.isnan() & rounded.isnan()))
    if bool(beyond.any()):
        return f"{int(beyond.sum())} elements are the wrong one of inf, -inf and NaN"
    terms = [torch.where(finite, x, 0.0).square().sum() for x in (got - truth, rounded - truth, truth)]
    squares += torch.stack(terms).cpu()
    return None


def _relative(squares: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    error, rounding, size = squares.sqrt().tolist()
    scale = size or 1.0
    if dtype == torch.float32:
        return error / scale, F32_ALLOWANCE
    return error / scale, max(ROUNDING_ALLOWANCE * rounding / scale, EXACT)


# --- poison -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Allocation:
    """A poisoned buffer of which a kernel was given the middle."""

    buffer: Tensor
    size: int

    def fault(self) -> str | None:
        """What was written into the guard bands, or None."""
        bands = torch.cat((self.buffer[:GUARD], self.buffer[GUARD + self.size :]))
        kept = bands.isnan() if bands.is_floating_point() else bands == poison(bands.dtype)
        return None if bool(kept.all()) else "a buffer was written past its ends"


@contextlib.contextmanager
def poisoned(module: object | None) -> Iterator[list[Allocation]]:
    """Make `module.empty` give poisoned tensors between guard bands; yields what was allocated.

    GUARD elements are a multiple of 512 bytes for every dtype, so that alignment stays what torch gives.
    """
    allocations: list[Allocation] = []
    if module is None:
        yield allocations
        return
    original = module.empty

    def empty(
        shape: tuple[int, ...], strides: tuple[int, ...] = (), *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        size = int(torch.Size(shape).numel())
        buffer = torch.full((size + 2 * GUARD,), poison(dtype), dtype=dtype, device=device)
        allocations.append(Allocation(buffer, size))
        return buffer[GUARD : GUARD + size].view(shape)

    module.empty = empty
    try:
        yield allocations
    finally:
        module.empty = original


def assert_no_synchronization(step: Callable[[], object]) -> None:
    """Nothing in a step waits for the device, once it has run: torch raises where something does."""
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
