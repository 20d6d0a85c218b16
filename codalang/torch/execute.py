"""Running an epilogue without gradients: which backend, and what it is given.

| tensors                                                     | backend                                              |
|-------------------------------------------------------------|------------------------------------------------------|
| on a Hopper GPU; a and w both bf16 or both f16, the rest    | the kernel (`codalang.lower.run`)                    |
| bf16, f16, f32, int32, int64 or bool                        |                                                      |
| anything else                                               | the reference interpreter, on the tensors' device    |

The reference computes in float64 where any tensor is float64, else in float32, the matmul included, and rounds each
output to its storage dtype: on bf16 and f16 it imitates the kernel.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from codalang.errors import CodaUnsupportedError
from codalang.ir import reference
from codalang.ir.epilogue import Epilogue
from codalang.ir.fold import REDUCTION_FUNCTIONS
from codalang.lower.call import Call, listening, rehearsed, rehearsing
from codalang.lower.folded import Matrix
from codalang.lower.spec import KernelSpec, loaded_params
from codalang.torch.signature import Extent, Value

_MATMUL_DTYPES = (torch.bfloat16, torch.float16)
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.bool)


# What the reference does by a view.
_VIEWING = ("even", "odd", "stop_gradient", "cast")


class CodaFallbackWarning(UserWarning):
    """A Hopper kernel was possible by dtype and device, but the epilogue is beyond it; the reference runs instead."""


@attrs.frozen(eq=False)
class Job:
    """One epilogue, how it is hosted, and the extents and dtypes of this call.  Made once, run often.

    Attributes:
        epilogue: what to run.
        on_gemm: the first two values are A [M, K] and B [w*N, K], and the accumulator is A @ B.T; otherwise all values
            are parameters.
        rows, columns: M and N.
        compute: what the reference computes in.
        dtypes: the storage dtype of each output.
        samples: B, where there is one row per sample.
        unmerged: reductions that kernels give in parts, [parts, length]; the reference merges them.
        parts: of an auxiliary step, an elementwise expression: how inputs that come in parts are merged, by name; they
            may be whole, too.  None for other jobs.
        device: where it runs if no value is a tensor.
        fresh: for each output whether the reference makes a new tensor for it.
    """

    epilogue: Epilogue
    on_gemm: bool
    rows: Extent
    columns: Extent
    compute: torch.dtype
    dtypes: tuple[torch.dtype, ...]
    samples: Extent = 0
    unmerged: tuple[str, ...] = ()
    parts: Mapping[str, str] | None = None
    device: torch.device = torch.device("cpu")
    fresh: tuple[bool, ...] = attrs.field(init=False)

    @fresh.default
    def _fresh(self) -> tuple[bool, ...]:
        """One that merely views an input, or is another output too, must be copied: a caller may write into it."""
        nodes, seen, fresh = self.epilogue.nodes, set(), []
        for output in self.epilogue.outputs:
            index = output.value
            while nodes[index].op in _VIEWING:
                index = nodes[index].args[0]
            is_matmul = self.on_gemm and nodes[index].attr == self.epilogue.params[0].name
            is_leaf = nodes[index].op in ("param", "const") and not is_matmul
            fresh.append(not is_leaf and index not in seen)
            seen.add(index)
        return tuple(fresh)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """(M, N), or (M, N, B)."""
        return (self.rows, self.columns, self.samples) if self.epilogue.has_samples else (self.rows, self.columns)


_reference_only = contextvars.ContextVar("codalang_reference_only", default=False)


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """Within it calls run on the reference even where a kernel could: to compare the two, or to find a fault."""
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


is_reference_only = _reference_only.get
stepwise = False  # True for who looks at each step: `execute` runs it, and no launch is repeated
# Sooner than torch's own, which asks whether there is a GPU: who has tensors on one need not.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


@contextlib.contextmanager
def rehearsal(device: torch.device | None = None) -> Iterator[dict[KernelSpec, None]]:
    """Within it this thread's calls of tensors on `meta` are what they would be on a Hopper GPU: the kernels that they
    would launch, each once, in order.  None is compiled or launched.

    `device`: which one; what has no kernel is then said where the call is made in earnest.
    """
    with rehearsing(device) as found:
        yield found.specs


def execute(job: Job, values: Sequence[Value | Matrix], out: Mapping[str, Tensor] | None = None) -> list[Tensor]:
    """The outputs in order, contiguous and new, on flattened values.  Nothing here is recorded by autograd.

    `out` holds buffers for some of the outputs, as `lower.run` takes them; operands may be folded.
    """
    device = device_of(values, job.device)
    if not is_autocast_on(device):
        return _execute(job, values, out, device)
    # What is computed in which dtype is decided above: autocast must not change it underneath.
    with torch.autocast(device.type, enabled=False):
        return _execute(job, values, out, device)


def _execute(
    job: Job, values: Sequence[Value | Matrix], out: Mapping[str, Tensor] | None, device: torch.device
) -> list[Tensor]:
    if _takes_kernel(job, values, device):
        try:
            return _run_kernel(job, values, out)
        except CodaUnsupportedError as error:
            if (rehearsal_ := rehearsed()) is None or rehearsal_.device is None:
                _say_once(job.epilogue.name, str(error))
    outputs = _run_reference(job, values, device)
    if not out:
        return outputs
    names = [output.name for output in job.epilogue.outputs]
    return [
        out[name].copy_(tensor.view(out[name].shape)) if name in out else tensor
        for name, tensor in zip(names, outputs, strict=True)
    ]


@attrs.frozen(eq=False)
class Launch:
    """A kernel with everything decided but addresses: runs a job again on values of the same forms.

    Attributes:
        call: its `repeat` gives the outputs in order, for tensors in the kernel's order and buffers for some outputs by
            name.  The current device must be that of the tensors.
        order: which of the job's values the kernel is given, in its order.
        folded: which of them are `Matrix`.
    """

    call: Call
    order: tuple[int, ...]
    folded: Collection[int]


def execute_listening(
    job: Job, values: Sequence[Value | Matrix], out: Mapping[str, Tensor] | None
) -> tuple[list[Tensor], Launch | None]:
    """`execute`, and what it launched where that was one kernel."""
    with listening() as calls:
        outputs = execute(job, values, out)
    if len(calls) != 1:
        return outputs, None
    first = 2 if job.on_gemm else 0
    params = job.epilogue.params[1:] if job.on_gemm else job.epilogue.params
    positions = {param.name: index for index, param in enumerate(params, first)}
    loaded = [positions[p.name] for p in loaded_params(job.epilogue, job.on_gemm)]
    folded = [i for i, value in enumerate(values) if isinstance(value, Matrix)]
    return outputs, Launch(calls[0], (*range(first), *loaded), folded)


def launches_repeat(device: torch.device) -> bool:
    """Do calls on this device run on kernels here and now, and may their launches be repeated?"""
    return device.type == "cuda" and _is_hopper(device.index) and not stepwise and not is_reference_only()


def launches_repeat_now(index: int) -> bool:
    """The same of a device where launches were remembered: is it the current one, too?"""
    return current_device() == index and not stepwise and not is_reference_only()


def is_autocast_on(device: torch.device) -> bool:
    """True under autocast for that device.  Asking torch for one device costs more than asking for any."""
    return torch._C._is_any_autocast_enabled() and device.type != "meta" and torch.is_autocast_enabled(device.type)


def device_of(values: Sequence[Value | Matrix], otherwise: torch.device) -> torch.device:
    """Where it runs: the arguments agree about it, where one is a tensor."""
    for value in values:
        if isinstance(value, Matrix):
            return value.tensor.device
        if isinstance(value, Tensor):
            return value.device
    return otherwise


@functools.cache
def _is_hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index) == (9, 0)


def _takes_kernel(job: Job, values: Sequence[Value | Matrix], device: torch.device) -> bool:
    on_hopper = _is_hopper(device.index) if device.type == "cuda" else device.type == "meta" and rehearsed() is not None
    if not on_hopper or is_reference_only():
        return False
    whole = [v.tensor if isinstance(v, Matrix) else v for v in values]
    tensors = [v for v in whole if isinstance(v, Tensor)]
    operands = tensors[:2] if job.on_gemm else []
    return all(t.dtype in _KERNEL_DTYPES for t in tensors) and all(t.dtype in _MATMUL_DTYPES for t in operands)


def _run_kernel(job: Job, values: Sequence[Value | Matrix], out: Mapping[str, Tensor] | None) -> list[Tensor]:
    from codalang.lower import run  # imports the device compiler

    params = job.epilogue.params
    dtypes = {o.name: d for o, d in zip(job.epilogue.outputs, job.dtypes, strict=True)}
    if job.on_gemm:
        a, b, *rest = values
        assert isinstance(a, Tensor | Matrix) and isinstance(b, Tensor | Matrix)
        inputs: Any = {p.name: v for p, v in zip(params[1:], rest, strict=True)}
        samples = job.samples if job.epilogue.has_samples else None
        asked: Any = {"dtypes": dtypes, "out": out, "unmerged": job.unmerged}
        outputs = run.gemm(job.epilogue, a, b, inputs, samples=samples, **asked)
    elif job.parts is not None:
        inputs = {p.name: v for p, v in zip(params, values, strict=True)}
        outputs = run.vector(job.epilogue, inputs, job.columns, parts=job.parts, dtypes=dtypes, device=job.device)
    else:
        inputs = {p.name: v for p, v in zip(params, values, strict=True)}
        hosted: Any = {"extents": job.extents, "device": job.device, "unmerged": job.unmerged}
        outputs = run.hosted(job.epilogue, inputs, dtypes=dtypes, out=out, **hosted)
    return [outputs[o.name] for o in job.epilogue.outputs]


def _run_reference(job: Job, values: Sequence[Value | Matrix], device: torch.device) -> list[Tensor]:
    epilogue = job.epilogue
    plain: list[Any] = [v.flat() if isinstance(v, Matrix) else v for v in values]
    if job.on_gemm:
        a, b = plain[:2]
        plain[:2] = [a.to(job.compute) @ b.to(job.compute).T]
    inputs = {p.name: v for p, v in zip(epilogue.params, plain, strict=True)}
    for name, how in (job.parts or {}).items():
        if inputs[name].dim() > 1:  # left by a kernel
            inputs[name] = REDUCTION_FUNCTIONS[how](inputs[name].to(job.compute), (0,))
    outputs = reference.run(epilogue, inputs, dtype=job.compute, extents=job.extents)
    return [
        outputs[output.name].to(device=device, dtype=dtype, copy=not fresh)
        for output, dtype, fresh in zip(epilogue.outputs, job.dtypes, job.fresh, strict=True)
    ]


_said: set[tuple[str, str]] = set()


def _say_once(name: str, reason: str) -> None:
    if (name, reason) not in _said:
        _said.add((name, reason))
        warnings.warn(f"`{name}` runs on the reference, not on a kernel: {reason}", CodaFallbackWarning, stacklevel=2)
