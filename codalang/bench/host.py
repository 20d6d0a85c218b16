"""The host's time per call, on tensors so small that the device has nothing to do, beside calls of torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

import codalang
from codalang.bench.timing import Call, host_microseconds
from codalang.bench.workloads import derived
from codalang.lower import ahead, run
from codalang.lower.call import listening

PROGRAM = """program linear(a: [M, K], w: [N, K]) {
    y = a @ w.T
    return y
}"""


def calls(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> dict[str, Call]:
    """What is timed, by name, but for `launch`."""
    a, w = _operands(device, dtype)
    a_grad, w_grad = a.clone().requires_grad_(), w.clone().requires_grad_()
    cotangent = torch.randn(128, 256, device=device, dtype=dtype)
    module, program = codalang.load("swiglu"), codalang.load(PROGRAM)
    wide = torch.randn(128, 512, device=device, dtype=dtype)
    forward = derived("swiglu").forward

    def differentiated(call: Callable[[], torch.Tensor], given: torch.Tensor = cotangent) -> Call:
        return lambda: torch.autograd.grad(call(), (a_grad, w_grad), given)

    return {
        "torch.mul": lambda: torch.mul(a, a),
        "torch.matmul": lambda: torch.matmul(a, w.t()),
        "lower.run.gemm": lambda: run.gemm(forward, a, w, {}),
        "module.swiglu, no gradient": lambda: module.swiglu(a, w),
        "module.swiglu, gradient recorded": lambda: module.swiglu(a_grad, w_grad),
        "module.swiglu, forward and backward": differentiated(lambda: module.swiglu(a_grad, w_grad)),
        "torch.matmul, forward and backward": differentiated(lambda: torch.matmul(a_grad, w_grad.t()), wide),
        "a program of one matmul, no gradient": lambda: program.linear(a, w),
        "a program of one matmul, gradient recorded": lambda: program.linear(a_grad, w_grad),
        "a program of one matmul, forward and backward": differentiated(lambda: program.linear(a_grad, w_grad), wide),
    }


def launch(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Call:
    """The kernel of `lower.run.gemm` itself, called with its arguments at hand.  It is compiled here, where it is not
    on disk."""
    a, w = _operands(device, dtype)
    with listening() as launched:
        run.gemm(derived("swiglu").forward, a, w, {})
    (known,) = launched
    outputs = tuple(buffer.allocate(known.device, {}) for result in known.results for buffer in result.buffers)
    compiled, tail = known.launch, known.tail

    def call() -> tuple[torch.Tensor, ...]:
        compiled(a, w, (), outputs, *tail)
        return outputs

    return call


def microseconds() -> dict[str, float]:
    """Of each call, the median.  Their kernels are compiled before, in parallel."""
    timed = calls()
    with ahead.recorded() as specs:
        for call in timed.values():
            call()
    ahead.compile_each(specs)
    timed = {"launch of a compiled kernel": launch()} | timed
    return {name: host_microseconds(call) for name, call in timed.items()}


def _operands(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(128, 256, device=device, dtype=dtype), torch.randn(512, 256, device=device, dtype=dtype)
