"""Module calls on the GPU: gradients for every kind of cotangent, streams, CUDA graphs, no hidden synchronization."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import gpu_cases
import pytest
import torch
from gpu_checks import ROUNDING_ALLOWANCE, shape_of
from torch import Tensor

import codalang
from codalang.ir import reference
from codalang.ir.types import Kind

LIBRARY = [name for name in gpu_cases.SOURCES if name != "every_feature"]
EXTENTS = ((130, 104, 72), (1000, 4104, 4096))

# What autograd may hand to a backward as the cotangent of an output of some shape.
COTANGENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda dense: dense,
    "transposed": lambda dense: dense.t().contiguous().t() if dense.dim() == 2 else dense,
    "slice of a wider tensor": lambda dense: torch.cat((dense, dense), -1)[..., : dense.shape[-1]],
    "expanded": lambda dense: dense.reshape(-1)[:1].reshape([1] * dense.dim()).expand(dense.shape),
}


def call_function(name: str) -> Callable[..., object]:
    """The module function of an epilogue."""
    return getattr(codalang.load(gpu_cases.SOURCES[name]), name)


def leaves(name: str, extents: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """`a`, `w` and the further inputs in the call's order, all requiring gradients.  Rows and cols are f32."""
    m, n, k = extents
    epilogue = gpu_cases.source(name)
    generator = torch.Generator("cuda").manual_seed(m + n + k)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    tensors = {"a": (normal(m, k) * k**-0.5).to(dtype), "w": normal(n, k).to(dtype)}
    for param in epilogue.params[1:]:
        value = normal(*shape_of(param.type, m, n))
        tensors[param.name] = value.to(dtype) if param.type.kind is Kind.TILE else value
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def as_tuple(result: object) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def kernels_needed(items: list[pytest.Item]) -> list:
    """See conftest: forwards and backwards, at all extents, in both dtypes."""
    import gpu_compile

    with gpu_compile.recorded() as specs:
        for name, extents, dtype in itertools.product(gpu_cases.SOURCES, EXTENTS, (torch.bfloat16, torch.float16)):
            inputs = leaves(name, extents, dtype)
            outputs = as_tuple(call_function(name)(**inputs))
            torch.autograd.grad(outputs, list(inputs.values()), [torch.empty_like(y) for y in outputs])
    return list(specs)


def truth(name: str, inputs: dict[str, Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    """Gradients in f64 by torch's autograd through the reference."""
    epilogue = gpu_cases.source(name)
    wide = {key: t.detach().double().requires_grad_() for key, t in inputs.items()}
    values = {key: t for key, t in wide.items() if key not in ("a", "w")}
    values[epilogue.params[0].name] = wide["a"] @ wide["w"].t()
    outputs = reference.run(epilogue, values, dtype=torch.float64)
    grads = torch.autograd.grad(
        list(outputs.values()), list(wide.values()), [c.double() for c in cotangents], allow_unused=True
    )
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wide.values(), grads, strict=True)]


def rounded(name: str, inputs: dict[str, Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    """The same, exact but for the rounding of what the forward saves, of the accumulator's gradient, and of each
    gradient at the end."""
    derivative = gpu_cases.derived(name)
    forward, backward = derivative.forward, derivative.backward
    dtype = inputs["a"].dtype
    storage = reference.Storage(dtype)
    wide = {key: t.detach().double() for key, t in inputs.items()}
    values = {key: t for key, t in wide.items() if key not in ("a", "w")}
    accumulator = forward.params[0].name
    results = reference.run(forward, values | {accumulator: wide["a"] @ wide["w"].t()}, storage=storage)
    cotangent_of = {o.name: c for o, c in zip(gpu_cases.source(name).outputs, cotangents, strict=True)}
    values |= results
    given = {
        parameter: cotangent_of[load.name] if load.source == "cotangent" else values[load.name]
        for parameter, load in derivative.loads.items()
    }
    m, n = len(inputs["a"]), len(inputs["w"])
    gradients = reference.run(backward, given, extents=(m, n), storage=storage)
    d_acc = gradients[derivative.gradients[accumulator]].double()
    found = {"a": d_acc @ wide["w"], "w": d_acc.t() @ wide["a"]}
    for key in inputs:
        if key not in found:
            output = derivative.gradients[key]
            found[key] = torch.zeros_like(wide[key]) if output is None else gradients[output]
    return [found[key].to(t.dtype).double() for key, t in inputs.items()]


@pytest.mark.parametrize("style", COTANGENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("extents", EXTENTS, ids=str)
@pytest.mark.parametrize("name", LIBRARY)
def test_gradients(name: str, extents: tuple[int, int, int], dtype: torch.dtype, style: str) -> None:
    inputs = leaves(name, extents, dtype)
    outputs = as_tuple(call_function(name)(**inputs))
    cotangents = [COTANGENTS[style](torch.randn_like(y)) for y in outputs]
    before = [c.clone() for c in cotangents]
    gradients = torch.autograd.grad(outputs, list(inputs.values()), cotangents)
    assert all(torch.equal(c, b) for c, b in zip(cotangents, before, strict=True)), "a cotangent was written into"
    exact = truth(name, inputs, cotangents)
    yardstick = rounded(name, inputs, cotangents)
    for key, got, want, near in zip(inputs, gradients, exact, yardstick, strict=True):
        assert got.dtype == inputs[key].dtype and got.shape == inputs[key].shape
        error, allowed = float((got.double() - want).norm()), float((near - want).norm())
        assert error <= ROUNDING_ALLOWANCE * allowed + 1e-5 * float(want.norm()), key


@pytest.mark.parametrize("name", LIBRARY)
def test_leading_dimensions_and_a_loss(name: str) -> None:
    """[..., K] in, [..., N] out, and the stride-0 cotangents of a mean, as `y.mean().backward()` gives them."""
    inputs = leaves(name, (130, 104, 72), torch.bfloat16)
    flat = as_tuple(call_function(name)(**inputs))
    expected = torch.autograd.grad(sum(y.float().mean() for y in flat), list(inputs.values()))
    rows = {"a"} | {p.name for p in gpu_cases.source(name).params if p.type.kind.has_rows}
    batched = {key: t.detach().unflatten(0, (2, 65)) if key in rows else t.detach() for key, t in inputs.items()}
    batched = {key: t.requires_grad_() for key, t in batched.items()}
    outputs = as_tuple(call_function(name)(**batched))
    assert all(y.shape[:2] == (2, 65) and torch.equal(y.flatten(0, 1), f) for y, f in zip(outputs, flat, strict=True))
    gradients = torch.autograd.grad(sum(y.float().mean() for y in outputs), list(batched.values()))
    for got, want in zip(gradients, expected, strict=True):
        assert torch.equal(got.reshape(want.shape), want)


@pytest.mark.parametrize("name", LIBRARY)
def test_on_another_stream(name: str) -> None:
    """The kernel must run on the current stream: the inputs become right only after a long wait on it."""
    inputs = leaves(name, (1000, 4104, 4096), torch.bfloat16)
    function = call_function(name)
    expected = [y.clone() for y in as_tuple(function(**inputs))]
    late = {key: torch.full_like(t, torch.nan) for key, t in inputs.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for key, tensor in inputs.items():
            late[key].copy_(tensor.detach())
        outputs = as_tuple(function(**late))
    stream.synchronize()
    assert all(torch.equal(y, want) for y, want in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("name", LIBRARY)
def test_cuda_graph(name: str) -> None:
    """Forward and backward, captured once and replayed on new values, give the bits of the eager run."""
    inputs = leaves(name, (130, 104, 72), torch.bfloat16)
    function = call_function(name)

    def step() -> list[Tensor]:
        outputs = as_tuple(function(**inputs))
        cotangents = [y.detach().sign() for y in outputs]
        return [*outputs, *torch.autograd.grad(outputs, list(inputs.values()), cotangents)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for tensor in inputs.values():
            tensor.copy_(torch.randn_like(tensor))
    for result in captured:
        result.detach().fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)


def test_no_hidden_synchronization() -> None:
    """A scalar that is a CUDA tensor, forward and backward: nothing waits for the device."""
    inputs = leaves("every_feature", (130, 104, 72), torch.bfloat16)
    function = call_function("every_feature")

    def step() -> tuple[Tensor, ...]:
        outputs = as_tuple(function(**inputs))
        return torch.autograd.grad(outputs, list(inputs.values()), [torch.ones_like(y) for y in outputs])

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_scalar_as_number_and_as_tensor_agree() -> None:
    inputs = leaves("every_feature", (130, 104, 72), torch.bfloat16)
    function = call_function("every_feature")
    with torch.no_grad():
        as_tensors = function(**inputs)
        as_number = function(**inputs | {"scale": float(inputs["scale"])})
    assert all(torch.equal(x, y) for x, y in zip(as_tensors, as_number, strict=True))
