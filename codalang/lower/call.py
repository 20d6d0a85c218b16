"""What calls of one signature have in common, remembered; and what each of them does: allocate, launch, finish."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from codalang.lower.buffers import Written, check_sharing
from codalang.lower.prepare import Prepare, Value
from codalang.lower.spec import KernelSpec

# How outputs and partials are allocated: sooner than by torch.empty.  Tests replace it by one that poisons.
empty = torch.empty_strided


def allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """`empty` for a shape, strides and a dtype on this device, which is the current one: what torch's own compiled code
    calls, at half the cost for the host."""
    compiled: Callable[..., torch.Tensor] | None = _COMPILED.get(device.type)
    if compiled is not None and empty is torch.empty_strided:
        return compiled
    given = empty
    return lambda shape, strides, dtype: given(shape, strides, dtype=dtype, device=device)


_COMPILED = {kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}


def new(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor with nothing in it."""
    return empty(shape, contiguous(shape), dtype=dtype, device=device)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of such a tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@attrs.frozen
class Buffer:
    """What a kernel writes into.

    Attributes:
        shape: what is allocated: a tile with a padded pitch, a vector as one row, or one partial per tile.
        columns: columns of it that the kernel sees, where that is not all.
        given: the output whose buffer, given by the caller, it is; None where it is allocated.
        stride: of a folded one, which the caller gives.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    columns: int | None = None
    given: str | None = None
    stride: tuple[int, ...] | None = None

    def allocate(self, device: torch.device, out: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The kernel's argument."""
        if self.given is not None:
            buffer = out[self.given]
            return buffer.view(self.shape) if self.stride is None else buffer.as_strided(self.shape, self.stride)
        tensor = new(self.shape, self.dtype, device)
        return tensor if self.columns is None else tensor[:, : self.columns]


# Results of buffers.  The second argument has the caller's buffer for each that has one: it may be written there.
Given = list[torch.Tensor | None] | None
Finish = Callable[[list[torch.Tensor], Given], Iterable[torch.Tensor]]


def as_is(buffers: list[torch.Tensor], out: Given) -> Iterable[torch.Tensor]:
    """The buffers are the results."""
    return buffers


@attrs.frozen
class Result:
    """How outputs are made of buffers: `finish` gives one tensor per name, which is then cast to its dtype, or copied
    into the caller's buffer where it is not there already."""

    names: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    finish: Finish
    dtypes: tuple[torch.dtype, ...]

    @property
    def is_straight(self) -> bool:
        """The one output is the one buffer, a new one or a given tile."""
        (buffer, *others), whole = self.buffers, self.finish is as_is
        return whole and not others and (buffer.columns, buffer.stride, buffer.dtype) == (None, None, self.dtypes[0])


Repeat = Callable[[tuple[Value, ...], Mapping[str, torch.Tensor]], Sequence[torch.Tensor]]


@attrs.frozen
class Call:
    """A launch with everything decided: only pointers change from call to call of a signature.

    Attributes:
        launch: the compiled function.
        prepare: for each tensor of the call, what makes it addressable, None where it is so.
        operands: how many of them are operands of a GEMM; the others are the epilogue's inputs.
        results: in the order of the kernel's signature.
        names: the outputs' names in textual order.
        tail: the integers, or tuples of them, that end the kernel's signature.
        written: the caller's buffers.
        parts: words of workspace and counters that a GEMM needs whose tiles come in parts; see `gather`.
    """

    launch: Callable[..., None]
    prepare: tuple[Prepare | None, ...]
    operands: int
    results: tuple[Result, ...]
    names: tuple[str, ...]
    tail: tuple[int | tuple[int, ...], ...]
    device: torch.device
    written: tuple[Written, ...]
    parts: tuple[int, int] | None = None

    repeat: Repeat = attrs.field(init=False, eq=False)

    @repeat.default
    def _repeat(self) -> Repeat:
        """Does the work of `run` on the current device, for buffers that are known to be apart, and tiles of two axes:
        the outputs in order."""
        return functools.partial(_any, self) if self.straight is None else _straight(self, self.straight)

    @property
    def straight(self) -> tuple[tuple[str, Buffer], ...] | None:
        """Each output and the buffer that it is, in the kernel's order, where values are read as they are and outputs
        written as they are to be."""
        if self.parts or any(self.prepare) or not all(r.is_straight for r in self.results):
            return None
        return tuple((r.names[0], r.buffers[0]) for r in self.results)

    def run(self, values: tuple[Value, ...], out: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Allocate, launch on the current stream, finish.  Raises CodaCallError for buffers that share memory."""
        if _thread.calls is not None:
            _thread.calls.append(self)
        if self.written and self.device.type != "meta":  # tensors without memory share none
            check_sharing(self.written, values, out)
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return dict(zip(self.names, _any(self, values, out), strict=True))
        return dict(zip(self.names, _any(self, values, out) if out else self.repeat(values, out), strict=True))


def _straight(call: Call, written: Sequence[tuple[str, Buffer]]) -> Repeat:
    launch, operands, tail, device = call.launch, call.operands, call.tail, call.device
    buffers = tuple((b.shape, contiguous(b.shape), b.dtype, b.given) for _, b in written)
    given = sum(buffer[-1] is not None for buffer in buffers)
    order = tuple([name for name, _ in written].index(name) for name in call.names)
    in_order = order == tuple(range(len(order)))

    def repeat(values: tuple[Value, ...], out: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
        if len(out) != given:  # one is copied into
            return _any(call, values, out)
        make = allocator(device)
        outputs = tuple([make(*form) if name is None else out[name] for *form, name in buffers])
        launch(*values[:operands], values[operands:], outputs, *tail)
        return outputs if in_order else [outputs[i] for i in order]

    return repeat


def _any(call: Call, values: tuple[Value, ...], out: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
    buffers = [[b.allocate(call.device, out) for b in r.buffers] for r in call.results]
    tensors = [p(v) if p else v for p, v in zip(call.prepare, values, strict=True)]
    outputs = tuple([b for group in buffers for b in group])
    if call.parts:
        workspace = new((1, call.parts[0]), torch.float32, call.device)
        outputs = (*outputs, workspace, _counters(call.device, call.parts[1]))
    call.launch(*tensors[: call.operands], tuple(tensors[call.operands :]), outputs, *call.tail)
    finished = {}
    for result, group in zip(call.results, buffers, strict=True):
        finals = result.finish(group, [out.get(name) for name in result.names] if out else None)
        for name, tensor, dtype in zip(result.names, finals, result.dtypes, strict=True):
            if name in out:
                in_place = tensor.data_ptr() == out[name].data_ptr()
                finished[name] = out[name] if in_place else filled(out[name], tensor)
            else:
                finished[name] = tensor if tensor.dtype is dtype else tensor.to(dtype)
    return [finished[name] for name in call.names]


class _Thread(threading.local):
    calls: list[Call] | None = None
    rehearsed: Rehearsed | None = None


_thread = _Thread()


@contextlib.contextmanager
def listening() -> Iterator[list[Call]]:
    """What this thread launches within, in order.  Who knows that tensors have the forms of those may `repeat` it."""
    before, launched = _thread.calls, list[Call]()
    _thread.calls = launched
    try:
        yield launched
    finally:
        _thread.calls = before


@attrs.frozen
class Rehearsed:
    """The kernels that calls would launch, each once, in order, and on which GPU; None is any."""

    device: torch.device | None
    specs: dict[KernelSpec, None] = attrs.field(factory=dict)

    def note(self, spec: KernelSpec) -> Callable[..., None]:
        """What stands in for the launcher of a kernel."""
        self.specs.setdefault(spec)
        return lambda *arguments: None


@contextlib.contextmanager
def rehearsing(device: torch.device | None = None) -> Iterator[Rehearsed]:
    """Meanwhile this thread's calls, of tensors on `meta`, are what they would be on a GPU, but for their launches."""
    before, rehearsed = _thread.rehearsed, Rehearsed(device)
    _thread.rehearsed = rehearsed
    try:
        with listening():  # nobody else is to hear of it
            yield rehearsed
    finally:
        _thread.rehearsed = before


def rehearsed() -> Rehearsed | None:
    """The rehearsal of this thread, if it is one."""
    return _thread.rehearsed


CALLS: dict[Any, Call] = {}  # by signature
_MOST_CALLS = 4096  # a new sequence length is a new signature


def remember(key: Any, call: Call) -> Call:
    """Kept for the next call of its signature."""
    if _thread.rehearsed is not None:
        return call
    if len(CALLS) >= _MOST_CALLS:
        forget()
    CALLS[key] = call
    return call


def forget() -> None:
    """Calls are decided anew."""
    CALLS.clear()


_LEAST_COUNTERS = 4096  # so that they are seldom allocated anew
_COUNTERS: dict[tuple[torch.device, int], torch.Tensor] = {}  # by device and stream; each kernel leaves zeros


def _counters(device: torch.device, count: int) -> torch.Tensor:
    """At least so many zeros, i32 [1, n], that no kernel uses which may run at the same time."""
    if device.type != "cuda":
        return torch.zeros((1, count), dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():  # a graph may be replayed beside others of this stream
        return torch.zeros((1, count), dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    found = _COUNTERS.get(key)
    if found is None or found.shape[1] < count:
        found = _COUNTERS[key] = torch.zeros((1, max(count, _LEAST_COUNTERS)), dtype=torch.int32, device=device)
    return found


def form(value: Value) -> Any:
    """All that decides how a value is passed: two calls whose values have equal forms differ in pointers only."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.data_ptr() % 16, value.device
    return None if value is None else "number"


def forms(tensors: Mapping[str, torch.Tensor]) -> Iterable[Any]:
    """The same of named tensors."""
    return [(name, form(tensor)) for name, tensor in tensors.items()]


def filled(target: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A buffer of the caller with such contents."""
    return target.copy_(values.view(target.shape))
