"""Module calls on the GPU: gradients for every kind of cotangent, streams, CUDA graphs, no hidden synchronization."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import gpu_cases
import pytest
import torch
from gpu_checks import NOISE, ROUNDING_ALLOWANCE, TORCH_DTYPES, assert_no_synchronization, shape_of
from torch import Tensor

from codalang.ir import reference
from codalang.ir.types import Dtype, Kind
from codalang.torch import EpilogueFunction

LIBRARY = [name for name in gpu_cases.CORE if name != "every_feature"]
# Of the others one dtype and one size each; those that a matmul can host.
OTHERS = [
    name
    for name, epilogue in gpu_cases.SOURCES.items()
    if epilogue.accumulator is not None and name not in LIBRARY and name != "every_feature"
]
EXTENTS = ((130, 104, 72), (1000, 4104, 4096))
SMALL = EXTENTS[0]
GRADIENTS = [
    *itertools.product(LIBRARY, EXTENTS, (torch.bfloat16, torch.float16)),
    *((name, SMALL, TORCH_DTYPES[gpu_cases.DTYPES[gpu_cases.turn_of(name) % 2]]) for name in OTHERS),
]

# What autograd may hand to a backward as the cotangent of an output of some shape.
COTANGENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda dense: dense,
    "transposed": lambda dense: dense.t().contiguous().t() if dense.dim() == 2 else dense,
    "slice of a wider tensor": lambda dense: (
        torch.cat((dense, dense), -1)[..., : dense.shape[-1]] if dense.dim() else torch.stack((dense, dense))[0]
    ),
    "expanded": lambda dense: dense.reshape(-1)[:1].reshape([1] * dense.dim()).expand(dense.shape),
}


def call_function(name: str) -> Callable[..., object]:
    """The module function of an epilogue."""
    return EpilogueFunction(gpu_cases.source(name))


def leaves(name: str, extents: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """`a`, `w` and the further inputs in the call's order, all floats requiring gradients.  Rows and cols are f32."""
    m, n, k = extents
    n = gpu_cases.fitted(name, n)
    epilogue = gpu_cases.source(name)
    generator = torch.Generator("cuda").manual_seed(m + n + k)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    tensors = {"a": (normal(m, k) * k**-0.5).to(dtype), "w": normal(n, k).to(dtype)}
    for param in epilogue.params[1:]:
        value = normal(*shape_of(param.type, m, n))
        if param.type.dtype is Dtype.BOOL:
            tensors[param.name] = value > 0
        elif param.type.dtype is Dtype.I32:
            tensors[param.name] = (value * n / 4).round().clamp(-1, n - 1).to(TORCH_DTYPES[param.dtype])
        else:
            tensors[param.name] = value.to(dtype) if param.type.kind is Kind.TILE else 1 + value / 4
    return {name: t.requires_grad_(t.is_floating_point()) for name, t in tensors.items()}


def differentiable(inputs: dict[str, Tensor]) -> list[Tensor]:
    """Those that have gradients."""
    return [t for t in inputs.values() if t.requires_grad]


def as_tuple(result: object) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def kernels_needed(items: list[pytest.Item]) -> list:
    """See conftest: forwards and backwards of what is asked for, and of `every_feature`."""
    import gpu_compile

    chosen = [("every_feature", SMALL, torch.bfloat16)]
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if "name" in given:
            both = itertools.product([given["name"]], EXTENTS, [torch.bfloat16])
            chosen += [(given["name"], given["extents"], given["dtype"])] if "dtype" in given else both
    with gpu_compile.recorded() as specs:
        for name, extents, dtype in dict.fromkeys(chosen):
            inputs = leaves(name, extents, dtype)
            outputs = [y for y in as_tuple(call_function(name)(**inputs)) if y.requires_grad]
            torch.autograd.grad(outputs, differentiable(inputs), [torch.empty_like(y) for y in outputs])
    return list(specs)


Cotangents = dict[str, Tensor]  # by output


def truth(name: str, inputs: dict[str, Tensor], cotangents: Cotangents) -> dict[str, Tensor]:
    """Gradients in f64 by torch's autograd through the reference."""
    epilogue = gpu_cases.source(name)
    wide = {key: t.detach().double().requires_grad_() if t.requires_grad else t for key, t in inputs.items()}
    values = {key: t for key, t in wide.items() if key not in ("a", "w")}
    values[epilogue.params[0].name] = wide["a"] @ wide["w"].t()
    outputs = {key: y for key, y in reference.run(epilogue, values, dtype=torch.float64).items() if y.requires_grad}
    given = [cotangents[key].double() for key in outputs]
    names = [key for key, t in wide.items() if t.requires_grad]
    grads = torch.autograd.grad(
        list(outputs.values()), [wide[n] for n in names], given, allow_unused=True, materialize_grads=True
    )
    return dict(zip(names, grads, strict=True))


def rounded(name: str, inputs: dict[str, Tensor], cotangents: Cotangents, a: Tensor | None = None) -> dict[str, Tensor]:
    """The same, exact but for the rounding of what the forward saves, of the accumulator's gradient, and of each
    gradient at the end.  `a` replaces that of the forward."""
    derivative = gpu_cases.derived(name)
    forward, backward = derivative.forward, derivative.backward
    dtype = inputs["a"].dtype
    storage = reference.Storage(dtype)
    wide = {key: t.detach().double() if t.requires_grad else t for key, t in inputs.items()}
    values = {key: t for key, t in wide.items() if key not in ("a", "w")}
    accumulator = forward.params[0].name
    acc = (wide["a"] if a is None else a.detach()) @ wide["w"].t()
    results = reference.run(forward, values | {accumulator: acc}, storage=storage)
    tables = {"cotangent": cotangents, "param": values, "output": results, "saved": results}
    given = {parameter: tables[load.source][load.name] for parameter, load in derivative.loads.items()}
    m, n = len(inputs["a"]), len(inputs["w"])
    gradients = reference.run(backward, given, extents=(m, n), storage=storage)
    output = derivative.gradients[accumulator]
    d_acc = torch.zeros(m, n, dtype=torch.float64, device="cuda") if output is None else gradients[output].double()
    found = {"a": d_acc @ wide["w"], "w": d_acc.t() @ wide["a"]}
    for key in inputs:
        if key not in found and inputs[key].requires_grad:
            output = derivative.gradients[key]
            found[key] = torch.zeros_like(wide[key]) if output is None else gradients[output]
    return {key: found[key].to(t.dtype).double() for key, t in inputs.items() if t.requires_grad}


def noise(name: str, inputs: dict[str, Tensor], cotangents: Cotangents) -> dict[str, float]:
    """What changes of the size of an f32 rounding in the accumulator may change in each gradient, in norm.

    Where a maximum is at one of two nearly equal elements, all of its gradient moves; where what is saved lies between
    two values of its dtype, it is rounded to the other.
    """
    before = [way(name, inputs, cotangents) for way in (truth, rounded)]
    most = dict.fromkeys(before[0], 0.0)
    for seed in range(4):
        generator = torch.Generator("cuda").manual_seed(seed)
        drawn = torch.randn(inputs["a"].shape, generator=generator, device="cuda", dtype=torch.float64)
        moved = (inputs["a"].detach().double() * (1 + NOISE * drawn)).requires_grad_()
        after = [truth(name, inputs | {"a": moved}, cotangents), rounded(name, inputs, cotangents, moved)]
        for key in most:
            changes = [float((x[key] - y[key]).norm()) for x, y in zip(before, after, strict=True)]
            most[key] = max(most[key], sum(changes))
    return most


@pytest.mark.parametrize(("name", "extents", "dtype"), GRADIENTS, ids=str)
@pytest.mark.parametrize("style", COTANGENTS)
def test_gradients(name: str, extents: tuple[int, int, int], dtype: torch.dtype, style: str) -> None:
    inputs = leaves(name, extents, dtype)
    results = as_tuple(call_function(name)(**inputs))
    names = [o.name for o in gpu_cases.source(name).outputs]
    outputs = {key: y for key, y in zip(names, results, strict=True) if y.requires_grad}
    cotangents = {key: COTANGENTS[style](torch.randn_like(y)) for key, y in outputs.items()}
    before = [c.clone() for c in cotangents.values()]
    gradients = torch.autograd.grad(list(outputs.values()), differentiable(inputs), list(cotangents.values()))
    unchanged = all(torch.equal(c, b) for c, b in zip(cotangents.values(), before, strict=True))
    assert unchanged, "a cotangent was written into"
    exact, yardstick = truth(name, inputs, cotangents), rounded(name, inputs, cotangents)
    for (key, want), got in zip(exact.items(), gradients, strict=True):
        assert got.dtype == inputs[key].dtype and got.shape == inputs[key].shape
        error, allowed = float((got.double() - want).norm()), float((yardstick[key] - want).norm())
        allowed = ROUNDING_ALLOWANCE * allowed + 1e-5 * float(want.norm())
        assert error <= allowed or error <= allowed + noise(name, inputs, cotangents)[key], key


@pytest.mark.parametrize("name", LIBRARY)
def test_leading_dimensions_and_a_loss(name: str) -> None:
    """[..., K] in, [..., N] out, and the stride-0 cotangents of a mean, as `y.mean().backward()` gives them."""
    inputs = leaves(name, (130, 104, 72), torch.bfloat16)
    flat = as_tuple(call_function(name)(**inputs))
    expected = torch.autograd.grad(sum(y.float().mean() for y in flat), differentiable(inputs))
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
        return [*outputs, *torch.autograd.grad(outputs, differentiable(inputs), cotangents)]

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
        return torch.autograd.grad(outputs, differentiable(inputs), [torch.ones_like(y) for y in outputs])

    assert_no_synchronization(step)


def test_scalar_as_number_and_as_tensor_agree() -> None:
    inputs = leaves("every_feature", (130, 104, 72), torch.bfloat16)
    function = call_function("every_feature")
    with torch.no_grad():
        as_tensors = function(**inputs)
        as_number = function(**inputs | {"scale": float(inputs["scale"])})
    assert all(torch.equal(x, y) for x, y in zip(as_tensors, as_number, strict=True))


def _full_language_step() -> Callable[[], list[Tensor]]:
    """Calls and gradients with indices, masks, groups, maxima and transforms; integers given as numbers, too."""
    inputs = {name: leaves(name, SMALL, torch.bfloat16) for name in ("every_index", "every_group", "every_state")}
    inputs["every_index"] |= {"base": 3, "on": True}
    functions = {name: call_function(name) for name in inputs}

    def step() -> list[Tensor]:
        results = []
        for name, given in inputs.items():
            outputs = as_tuple(functions[name](**given))
            floats = [y for y in outputs if y.requires_grad]
            wanted = [t for t in given.values() if isinstance(t, Tensor) and t.requires_grad]
            results += [*outputs, *torch.autograd.grad(floats, wanted, [torch.ones_like(y) for y in floats])]
        return results

    return step


def test_the_full_language_repeats_bitwise() -> None:
    step = _full_language_step()
    assert [bool(torch.equal(one, two)) for one, two in zip(step(), step(), strict=True)].count(False) == 0


def test_the_full_language_does_not_synchronize() -> None:
    step = _full_language_step()
    assert_no_synchronization(step)


def test_the_full_language_in_a_cuda_graph() -> None:
    step = _full_language_step()
    # Results that kept their graph alive would tie the leaves to the stream of this call, where a capture cannot be.
    expected = [y.detach() for y in step()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(got, want) for got, want in zip(captured, expected, strict=True))
