"""`row[B, N]`: one row per sample, for calls of torch tensors and for what such a call can have wrong."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
from emulation import emulated
from torch import Tensor

import codalang
from codalang.builder import Dim, reduce, row, store, tile
from codalang.builder import sum as coda_sum
from codalang.errors import CodaCallError, CodaTypeError
from codalang.ir import reference
from codalang.lower import plan, run
from codalang.lower.compile import compile_object
from codalang.lower.spec import KernelSpec, Operand

SOURCE = """
epilogue modulate(acc: tile[M, N], scale: row[B, N], shift: row[B, N], gate: row[N]) {
    let x = acc * (1 + scale) + shift
    store x: tile[M, N] = x * gate
    reduce total: row[B, N] = sum(x * x)
}

epilogue sums(acc: tile[M, N]) {
    reduce s: row[B, N] = sum(acc)
    reduce top: row[B, N] = max(acc)
    state (mean, var): row[B, N] = welford(acc)
}

epilogue halves(acc: tile[M, N], gate: row[B, N/2], wide: row[B, 2*N]) {
    let (a, b) = split(acc)
    store y: tile[M, N/2] = a * gate + b
    let (even, odd) = split(wide)
    reduce s: row[B, N] = sum(acc * even * odd)
}
"""
LIBRARY = codalang.load(SOURCE)
B, T, N, K = 3, 4, 6, 5


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def _modulated(acc: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """By torch, of [B, T, N]."""
    x = acc * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
    return x * gate, (x * x).sum(1)


@pytest.mark.parametrize("lead", [(B, T), (B * T,), (B, 2, T // 2)], ids=str)
@pytest.mark.parametrize("samples", [B, 1, B * T])
def test_values_and_gradients(lead: tuple[int, ...], samples: int) -> None:
    """On a GEMM and hosted; samples of flat rows are of any size; one may have every row, or each row be one."""
    a, w, gate = _random(*lead, K), _random(N, K), _random(N)
    scale, shift = _random(samples, N), _random(samples, N)
    inputs = (a, w, scale, shift, gate)
    x, total = LIBRARY.modulate(*inputs)
    wanted_x, wanted = _modulated((a @ w.T).reshape(samples, -1, N), scale, shift, gate)
    assert x.shape == (*lead, N) and total.shape == (samples, N)
    torch.testing.assert_close(x.reshape(wanted_x.shape), wanted_x)
    torch.testing.assert_close(total, wanted)
    d_x, d_total = torch.randn_like(wanted_x), torch.randn_like(wanted)
    got = torch.autograd.grad((x, total), inputs, (d_x.reshape(x.shape), d_total))
    expected = torch.autograd.grad((wanted_x, wanted), inputs, (d_x, d_total))
    torch.testing.assert_close(got, expected)
    hosted = LIBRARY.modulate.hosted(a @ w.T, scale, shift, gate)
    torch.testing.assert_close(hosted.x, x)
    torch.testing.assert_close(hosted.total, total)


def test_second_derivatives() -> None:
    def through(acc: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        return tuple(LIBRARY.modulate.hosted(acc, scale, shift, gate))

    assert torch.autograd.gradgradcheck(through, (_random(B * 2, 4), _random(B, 4), _random(B, 4), _random(4)))


@pytest.mark.parametrize("lead", [(B, T), (B, 2, T // 2)], ids=str)
def test_samples_that_no_argument_has_are_the_first_dimension(lead: tuple[int, ...]) -> None:
    acc = _random(*lead, N)
    found = LIBRARY.sums.hosted(acc)
    flat = acc.reshape(B, T, N)
    torch.testing.assert_close(found.s, flat.sum(1))
    torch.testing.assert_close(found.top, flat.amax(1))
    torch.testing.assert_close(found.mean, flat.mean(1))
    torch.testing.assert_close(found.var, flat.var(1, correction=0))
    (gradient,) = torch.autograd.grad(found.top.sum() + (found.var * 2).sum(), acc)
    at_top = torch.nn.functional.one_hot(flat.argmax(1), T).movedim(2, 1)
    of_var = 4 / T * (flat - flat.mean(1, keepdim=True)).detach()
    torch.testing.assert_close(gradient.reshape(flat.shape), at_top + of_var)
    torch.testing.assert_close(LIBRARY.sums.hosted(flat.reshape(B * T, N), extents=(B * T, N, B)).s, found.s)


def test_other_widths() -> None:
    acc, gate, wide = _random(B, T, N), _random(B, N // 2), _random(B, 2 * N)
    found = LIBRARY.halves.hosted(acc, gate, wide)
    y = acc[..., 0::2] * gate.unsqueeze(1) + acc[..., 1::2]
    s = (acc * (wide[:, 0::2] * wide[:, 1::2]).unsqueeze(1)).sum(1)
    torch.testing.assert_close(found.y, y)
    torch.testing.assert_close(found.s, s)
    cotangents = torch.randn_like(y), torch.randn_like(s)
    torch.testing.assert_close(
        torch.autograd.grad((found.y, found.s), (acc, gate, wide), cotangents),
        torch.autograd.grad((y, s), (acc, gate, wide), cotangents),
    )


def test_nothing() -> None:
    """No rows, hence no samples or empty ones; no columns."""
    for samples in (0, 2):
        x, total = LIBRARY.modulate.hosted(*(torch.ones(s) for s in ((0, N), (samples, N), (samples, N), (N,))))
        assert x.shape == (0, N) and total.shape == (samples, N) and not total.any()
    x, total = LIBRARY.modulate.hosted(*(torch.ones(s) for s in ((4, 0), (2, 0), (2, 0), (0,))))
    assert x.shape == (4, 0) and total.shape == (2, 0)


def test_compiled() -> None:
    """torch.compile sees the shapes that there are, for two batch sizes."""

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def step(acc: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> Tensor:
        x, total = LIBRARY.modulate.hosted(acc, scale, shift, gate)
        return x.sum() + total.sum()

    for samples in (2, 3):
        inputs = (_random(samples * T, N), _random(samples, N), _random(samples, N), _random(N))
        wanted = sum(part.sum() for part in _modulated(inputs[0].reshape(samples, T, N), *inputs[1:]))
        got = torch.autograd.grad(step(*inputs), inputs)
        torch.testing.assert_close(got, torch.autograd.grad(wanted, inputs))


@pytest.mark.parametrize(
    ("shapes", "argument", "message"),
    [
        (((12, 6), (5, 6), (5, 6), (6,)), "scale", "`scale` makes B = 5 samples of M/B rows each"),
        (((12, 6), (3, 6), (4, 6), (6,)), "shift", "here [3, 6] (B = 3 from `scale`, N = 6 from `acc`)"),
        (((12, 6), (6,), (3, 6), (6,)), "scale", "got shape [6]"),
        (((12, 6), (3, 1, 6), (3, 6), (6,)), "scale", "call .flatten(0, -2)"),
        (((12, 6), (0, 6), (0, 6), (6,)), "scale", "`scale` makes B = 0 samples"),
        (((4, 3, 6), (2, 6), (2, 6), (6,)), "scale", "`acc` has the leading dimensions [4, 3], the first of which"),
    ],
    ids=str,
)
def test_wrong_calls(shapes: tuple[tuple[int, ...], ...], argument: str, message: str) -> None:
    with pytest.raises(CodaCallError) as caught:
        LIBRARY.modulate.hosted(*(torch.ones(shape) for shape in shapes))
    assert caught.value.argument == argument and message in str(caught.value)


def test_a_plain_row_gets_a_hint() -> None:
    with pytest.raises(CodaCallError, match=r"call \.unsqueeze\(0\)"):
        LIBRARY.modulate.hosted(torch.ones(4, 6), torch.ones(6), torch.ones(1, 6), torch.ones(6))


def test_samples_that_nothing_determines() -> None:
    with pytest.raises(CodaCallError, match="determines B") as caught:
        LIBRARY.sums.hosted(torch.ones(4, 6))
    assert caught.value.argument == "extents" and "extents=(M, N, B)" in str(caught.value)
    with pytest.raises(CodaCallError, match=r"leading dimensions \[B, M/B\]"):
        LIBRARY.sums(torch.ones(4, 6), torch.ones(6, 6))


def test_a_row_per_sample_is_not_stored() -> None:
    with pytest.raises(CodaTypeError, match=r"`store v` cannot be row\[B, N\]"):
        codalang.load("epilogue f(acc: tile[M, N], r: row[B, N]) {\n store v: row[B, N] = r\n}")


def test_other_names_and_both_frontends() -> None:
    batch, tokens, width = Dim("S"), Dim("T"), Dim("D")

    @codalang.epilogue
    def gated(acc: tile[tokens, width], gate: row[batch, width]) -> None:
        store("y", acc * gate, tile[tokens, width])
        reduce("g", coda_sum(acc), "row[S, D]")

    text = "epilogue gated(acc: tile[T, D], gate: row[S, D]) {\n    store y: tile[T, D] = acc * gate\n"
    text += "    reduce g: row[S, D] = sum(acc)\n}\n"
    assert gated.source == text and gated.epilogue == codalang.load(text).gated.epilogue


# ---- kernels: what the launcher does, on kernels that are computed on the CPU ---------------------------------------

KERNELS = codalang.load("""
epilogue everything(acc: tile[M, N], scale: row[B, N], wide: row[B, 2*N], keep: row[B, N]: bool, at: row[B, N]: i64) {
    let (even, odd) = split(wide)
    let x = where(keep, acc * scale, acc) + even * odd
    store x: tile[M, N]
    reduce total: row[B, N] = sum(x)
    reduce columns: row[N] = max(x)
    reduce rows: col[M] = sum(x)
    state (top, at_top): row[B, N] = argmax(x, at + row_index())
    state (mean, var): row[B, N] = welford(x)
}
""").everything.epilogue


def _kernel_inputs(samples: int, n: int) -> dict[str, Tensor]:
    return {
        "scale": torch.randn(samples, n).bfloat16(),
        "wide": torch.randn(samples, 2 * n),
        "keep": torch.rand(samples, n) > 0.3,
        "at": torch.randint(0, 3, (samples, n)),
    }


def _check(got: dict[str, Tensor], accumulator: Tensor, inputs: dict[str, Tensor]) -> None:
    exact = {name: v.double() if v.is_floating_point() else v for name, v in inputs.items()}
    truth = reference.run(KERNELS, {"acc": accumulator.double(), **exact})
    assert list(got) == list(truth)
    for name, value in got.items():
        assert value.is_contiguous() and value.shape == truth[name].shape
        if value.is_floating_point():
            unit = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[value.dtype]
            assert (value.double() - truth[name]).norm() <= unit * truth[name].norm(), name
        else:
            assert torch.equal(value, truth[name]), name


@pytest.mark.parametrize("n", [24, 36])
@pytest.mark.parametrize(("samples", "size"), [(3, 64), (2, 16), (1, 208), (5, 48), (2, 300), (7, 1), (4, 77)])
def test_kernels(samples: int, size: int, n: int) -> None:
    """Sizes that are multiples of a tile, of what a warp has of it, and of nothing."""
    a, b = torch.randn(samples * size, 40).bfloat16(), torch.randn(n, 40).bfloat16()
    inputs = _kernel_inputs(samples, n)
    with emulated() as asked:
        _check(run.gemm(KERNELS, a, b, inputs), a.double() @ b.double().T, inputs)
        hosts = [spec.operand is not None for spec in asked if spec.merge is None]
        assert hosts == ([True] if size % 16 == 0 else [True, False])
        acc = torch.randn(samples * size, n).bfloat16()
        _check(run.hosted(KERNELS, {"acc": acc, **inputs}), acc, inputs)


@pytest.mark.parametrize("size", [32, 9])
def test_samples_that_no_input_of_a_kernel_has(size: int) -> None:
    sums = LIBRARY.sums.epilogue
    a, b, acc = torch.randn(3 * size, 8).bfloat16(), torch.randn(16, 8).bfloat16(), torch.randn(3 * size, 16)
    with emulated():
        got = run.gemm(sums, a, b, {}, samples=3)
        torch.testing.assert_close(got["s"], (a.float() @ b.float().T).view(3, size, 16).sum(1), rtol=1e-5, atol=1e-5)
        got = run.hosted(sums, {"acc": acc}, extents=(3 * size, 16, 3))
        torch.testing.assert_close(got["top"], acc.view(3, size, 16).amax(1))
        for call in (lambda: run.gemm(sums, a, b, {}), lambda: run.hosted(sums, {"acc": acc})):
            with pytest.raises(CodaCallError, match="do not determine the number of its samples, B"):
                call()
        with pytest.raises(CodaCallError, match="has 5 samples, which must divide its"):
            run.gemm(sums, a, b, {}, samples=5)


def test_buffers_of_a_caller() -> None:
    acc, inputs = torch.randn(64, 24), _kernel_inputs(2, 24)
    out = {"total": torch.full((2, 24), torch.nan), "mean": torch.full((2, 24), torch.nan)}
    with emulated():
        got = run.hosted(KERNELS, {"acc": acc, **inputs}, out=out)
    assert got["total"] is out["total"] and got["mean"] is out["mean"]
    _check({**got, "x": got["x"].float()}, acc, inputs)


@pytest.mark.parametrize("on_gemm", [True, False])
def test_kernels_compile(on_gemm: bool, tmp_path: Path) -> None:
    """For sm_90a, with no GPU; none spills."""
    dtypes = ("bf16", "f32", "bool", "i32")
    spec = KernelSpec(KERNELS, Operand("bf16", "k", "k") if on_gemm else None, dtypes, ("bf16",), None)
    if not on_gemm:
        spec = attrs.evolve(spec, input_dtypes=("bf16", *dtypes))
    else:
        spec = attrs.evolve(spec, config=plan.choose(spec, 4096, 4096, 4096))
    report = compile_object(spec, tmp_path / "kernel.o")
    assert report.spill_bytes == 0 and report.serialized is None
