"""Programs on the GPU: a Llama block against f64 and PyTorch's own, streams, graphs, memory, no synchronization."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from gpu_checks import assert_no_synchronization
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import block  # noqa: E402

import codalang  # noqa: E402
from codalang.torch import execute, program_step, reference_only  # noqa: E402

LOW = (torch.bfloat16, torch.float16)
SMALL = block.Size(512, 1408, 512, 128)
# Ragged in every extent but for what the heads ask for.
ODD = block.Size(328, 424, 392, 56)
TOKENS = {"small": (SMALL, 1024), "odd": (ODD, 333)}
# What the issue of this project asks for: errors at most so many times PyTorch's own.
ALLOWANCE = 1.02

Tensors = list[Tensor]


def made(size: block.Size, dtype: torch.dtype, tokens: int, seed: int = 0, outliers: bool = False) -> block.Block:
    """Fresh inputs; with outliers, a few rows of the residual stream and of the heads' outputs are 100 times larger."""
    given = block.make(size, dtype, tokens=tokens, seed=seed)
    if outliers:
        with torch.no_grad():
            for tensor in (given.x, given.y):
                tensor[:: tokens // 4] *= 100
    return given


def step(given: block.Block, forward: Callable[[block.Block], tuple[Tensor, Tensor]]) -> Tensors:
    """Results and gradients."""
    results = forward(given)
    return [*(r.detach() for r in results), *torch.autograd.grad(results, given.wanted, (given.d_x2, given.d_qkv))]


def wide(given: block.Block) -> block.Block:
    """The same numbers in f64."""
    tensors = {}
    for field in attrs.fields(block.Block):
        value = getattr(given, field.name)
        if isinstance(value, Tensor):
            double = value.detach().double() if value.is_floating_point() else value
            tensors[field.name] = double.requires_grad_() if value.requires_grad else double
    return attrs.evolve(given, **tensors)


def in_torch(given: block.Block) -> tuple[Tensor, Tensor]:
    """PyTorch's own block."""
    return block.with_torch(given, block.in_torch)


def named(given: block.Block) -> list[str]:
    """What `step` gives, in words."""
    by_id = {id(getattr(given, f.name)): f.name for f in attrs.fields(block.Block)}
    return ["x2", "qkv", *(f"d_{by_id[id(tensor)]}" for tensor in given.wanted)]


def kernels_needed(items: list[pytest.Item]) -> list:
    """See conftest."""
    import gpu_compile

    with gpu_compile.recorded() as specs:
        for size, tokens in TOKENS.values():
            for dtype in LOW:
                step(made(size, dtype, tokens), block.ours)
    return list(specs)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("size", TOKENS)
def test_errors_are_at_most_pytorch_s(size: str, scale: float, outliers: bool, dtype: torch.dtype) -> None:
    """Each result and each gradient by its norm, over three fresh inputs; cotangents may be small for f16."""
    shape, tokens = TOKENS[size]
    ours: dict[str, float] = {}
    theirs: dict[str, float] = {}
    for seed in range(3):
        given = made(shape, dtype, tokens, seed, outliers)
        given = attrs.evolve(given, d_x2=given.d_x2 * scale, d_qkv=given.d_qkv * scale)
        truth = step(wide(given), in_torch)
        for total, forward in ((ours, block.ours), (theirs, in_torch)):
            for name, got, want in zip(named(given), step(given, forward), truth, strict=True):
                total[name] = total.get(name, 0.0) + block.relative_error(got, want) ** 2
    worse = {n: (ours[n] / theirs[n]) ** 0.5 for n in ours if not ours[n] <= ALLOWANCE**2 * theirs[n]}
    assert not worse


@pytest.mark.parametrize("size", TOKENS)
def test_the_kernels_do_what_the_reference_does(size: str) -> None:
    """Both round at the same places: they differ by a fraction of what rounding costs."""
    shape, tokens = TOKENS[size]
    given = made(shape, torch.bfloat16, tokens)
    with reference_only():
        expected = step(given, block.ours)
    for name, got, want in zip(named(given), step(given, block.ours), expected, strict=True):
        assert block.relative_error(got, want) < 2e-3, name


def test_every_step_is_a_kernel() -> None:
    """Nothing falls back to the reference, no matmul is torch's, and no merge of partials."""
    given = made(SMALL, torch.bfloat16, 1024)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(given, block.ours)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    theirs = ("nvjet", "cublas", "cutlass_80", "gemm_bf16", "reduce_kernel")
    assert not any(word in name.lower() for name in names for word in theirs)


def test_bitwise_repeat() -> None:
    given = made(SMALL, torch.bfloat16, 1024)
    one, two = step(given, block.ours), step(given, block.ours)
    assert [name for name, x, y in zip(named(given), one, two, strict=True) if not torch.equal(x, y)] == []


def test_on_another_stream() -> None:
    """Kernels run on the current stream: the inputs become right only after a long wait on it."""
    given = made(SMALL, torch.bfloat16, 1024)
    expected = step(given, block.ours)
    late = made(SMALL, torch.bfloat16, 1024)
    tensors = [f.name for f in attrs.fields(block.Block) if isinstance(getattr(given, f.name), Tensor)]
    with torch.no_grad():
        for name in tensors:
            if getattr(late, name).is_floating_point():
                getattr(late, name).fill_(torch.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            for name in tensors:
                getattr(late, name).copy_(getattr(given, name))
        results = step(late, block.ours)
    stream.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def test_two_streams_at_once() -> None:
    """Each has its own buffers, however the calls overlap."""
    blocks = [made(SMALL, torch.bfloat16, 1024, seed) for seed in range(2)]
    expected = [step(given, block.ours) for given in blocks]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in blocks]
    found: list[Tensors] = [[], []]
    for _ in range(10):
        for index, (given, stream) in enumerate(zip(blocks, streams, strict=True)):
            with torch.cuda.stream(stream):
                found[index] = step(given, block.ours)
    torch.cuda.synchronize()
    for one, two in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


def test_cuda_graph() -> None:
    """Forward and backward, captured once and replayed on new values, give the bits of the eager run."""
    given = made(SMALL, torch.bfloat16, 1024)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(given, block.ours)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(given, block.ours)
    with torch.no_grad():
        for tensor in given.wanted:
            tensor.copy_(torch.randn_like(tensor) * tensor.std())
    for result in captured:
        result.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(captured, step(given, block.ours), strict=True))


def test_no_hidden_synchronization() -> None:
    """Scalars that are CUDA tensors included."""
    given = made(SMALL, torch.bfloat16, 1024)
    function = codalang.load(block.HERE.parent / "examples/llama_block.coda").llama_block_fused
    eps = torch.tensor(1e-5, device="cuda", requires_grad=True)

    def run() -> None:
        b = given
        results = function(
            b.y, b.x, b.w_o, b.g_mlp, b.w_gate_up, b.w_down, b.g_attention, b.w_qkv, b.positions, b.frequency, eps
        )
        torch.autograd.grad(results, [*b.wanted, eps], (b.d_x2, b.d_qkv))

    assert_no_synchronization(run)


def test_peak_memory_is_at_most_pytorch_s() -> None:
    given = made(SMALL, torch.bfloat16, 8192)
    compiled = torch.compile(block.in_torch, fullgraph=True, dynamic=False)
    ours = block.peak_gib(lambda: step(given, block.ours))
    theirs = block.peak_gib(lambda: step(given, lambda g: block.with_torch(g, compiled)))
    assert ours <= theirs


def test_what_the_forward_saved_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """In-place accumulation is used, and changes no bit."""
    given = made(SMALL, torch.bfloat16, 1024)
    results = block.ours(given)
    retained = torch.autograd.grad(results, given.wanted, (given.d_x2, given.d_qkv), retain_graph=True)
    written = []
    real = program_step.execute

    def record(job: object, values: list, out: dict | None = None) -> Tensors:
        written.extend(out or {})
        return real(job, values, out)

    monkeypatch.setattr(program_step, "execute", record)
    monkeypatch.setattr(execute, "stepwise", True)
    last = torch.autograd.grad(results, given.wanted, (given.d_x2, given.d_qkv))
    assert written and all(torch.equal(x, y) for x, y in zip(last, retained, strict=True))


def test_gradients_are_only_those_asked_for() -> None:
    given = made(SMALL, torch.bfloat16, 1024)
    everything = dict(zip(named(given)[2:], step(given, block.ours)[2:], strict=True))
    for tensor in (given.w_o, given.w_gate_up, given.w_down, given.w_qkv):
        tensor.requires_grad_(False)
    results = block.ours(given)
    found = torch.autograd.grad(results, [given.x, given.y, given.g_mlp], (given.d_x2, given.d_qkv))
    for name, gradient in zip(("d_x", "d_y", "d_g_mlp"), found, strict=True):
        assert torch.equal(gradient, everything[name])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_another_device() -> None:
    expected = step(made(SMALL, torch.bfloat16, 1024), block.ours)
    other = attrs.evolve(made(SMALL, torch.bfloat16, 1024))
    moved = {
        f.name: value.detach().to("cuda:1").requires_grad_(value.requires_grad)
        for f in attrs.fields(block.Block)
        if isinstance(value := getattr(other, f.name), Tensor)
    }
    results = step(attrs.evolve(other, **moved), block.ours)
    assert all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(results, expected, strict=True))


def test_torch_compile() -> None:
    """A program inside a compiled function, its lengths symbols."""
    given = made(SMALL, torch.bfloat16, 1024)
    b = given
    function = codalang.load(block.HERE.parent / "examples/llama_block.coda").llama_block_fused
    weights = (b.w_o, b.g_mlp, b.w_gate_up, b.w_down, b.g_attention, b.w_qkv)

    def run(y: Tensor, x: Tensor, positions: Tensor) -> Tensor:
        x2, qkv = function(y, x, *weights, positions, b.frequency)
        return (x2 * 2).float().sum() + qkv.float().square().sum()

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for rows in (1024, 768, 256):
        arguments = [t[:rows].detach().requires_grad_() for t in (b.y, b.x)]
        found, expected = (
            torch.autograd.grad(call(*arguments, b.positions[:rows]), [*arguments, *weights])
            for call in (compiled, run)
        )
        for one, two in zip(found, expected, strict=True):
            assert block.relative_error(one, two) < 1e-2
