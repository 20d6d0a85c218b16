"""Faults that users of other libraries have met, and that no other test here is about, reduced to small inputs."""

from __future__ import annotations

import pytest
import torch
from emulation import emulated
from torch import Tensor

import codalang
from codalang.lower import run
from codalang.parser import parse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["max", "min"])
def test_a_maximum_that_is_kept_in_16_bits_has_its_gradient(dtype: torch.dtype, how: str) -> None:
    """Rounded, it equals no element, or others than the one that it is; what counts is where it stood."""
    kept = "bf16" if dtype is torch.bfloat16 else "f16"
    f = codalang.load(f"epilogue f(acc: tile[M, N], b: row[N]) {{ reduce m: col[M]: {kept} = {how}(acc * b) }}").f
    a, w = torch.randn(7, 24).to(dtype).requires_grad_(), torch.randn(33, 24).to(dtype).requires_grad_()
    b = (1 + torch.rand(33) * 1e-3).requires_grad_()
    m = f(a, w, b)
    assert m.dtype is dtype
    cotangent = torch.randn(7).to(dtype)
    got = torch.autograd.grad(m, (a, w, b), cotangent)
    x = (a.float() @ w.float().T) * b
    wanted = torch.autograd.grad(getattr(x, how)(dim=1).values, (a, w, b), cotangent.float())
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours.float() - theirs.float()).norm() <= 2e-2 * theirs.float().norm() and theirs.norm() > 0


def test_gate_and_up_are_neither_exchanged_nor_half_interleaved() -> None:
    """F = 4 with distinct values: the weight, its bias, its scale, and the gradients of all, in one layout."""
    f = codalang.load("""
epilogue gated(acc: tile[M, N], bias: row[N], scale: row[N]) {
    let (gate, up) = split(acc * scale + bias)
    store y: tile[M, N/2] = gate * sigmoid(gate) * up
}
""").gated
    width, depth = 4, 3
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(2, width, *rest, generator=generator, dtype=torch.float64) for rest in ((depth,), (), ())]
    w, bias, scale = [v.requires_grad_() for v in values]  # [gate or up, F, ...], as checkpoints hold them
    a = torch.randn(5, depth, generator=generator, dtype=torch.float64)
    y = f(a, *(v.transpose(0, 1).flatten(0, 1) for v in (w, bias, scale)))
    gate, up = (a @ w[i].T * scale[i] + bias[i] for i in (0, 1))
    wanted = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(y, wanted)
    cotangent = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, (w, bias, scale), cotangent), torch.autograd.grad(wanted, (w, bias, scale), cotangent)
    )


@pytest.mark.parametrize("positions", [[0, 1, 2, 0, 1, 0], [5, 6, 7, 8, 9, 10], [3, 3, 0, 131071, 1, 2]], ids=str)
def test_each_token_is_rotated_by_its_own_position(positions: list[int]) -> None:
    """Packed sequences, an offset, and sequences that differ."""
    rope = codalang.load("rope").rope
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    frequency = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    together = rope.hosted(x, torch.tensor(positions), frequency)
    for row, position in enumerate(positions):
        alone = rope.hosted(x[row : row + 1], torch.tensor([position]), frequency)
        assert torch.equal(together[row : row + 1], alone)
        angle = position * frequency
        even, odd = x[row, 0::2], x[row, 1::2]
        torch.testing.assert_close(alone[0, 0::2], even * angle.cos() - odd * angle.sin())
        torch.testing.assert_close(alone[0, 1::2], even * angle.sin() + odd * angle.cos())


def _shifted(tensor: Tensor) -> Tensor:
    """The same at an address that is a multiple of 2 bytes only."""
    return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape)


def test_no_kernel_is_taken_for_another_memory_order_alignment_or_dtype() -> None:
    """One after the other, each call asks for the kernel of its own arguments, and is right."""
    epilogue = parse("epilogue f(acc: tile[M, N], c: tile[M, N], r: row[N]) { store y: tile[M, N] = acc + c * r }")
    epilogue = epilogue.epilogues["f"]
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(*s, generator=generator).bfloat16() for s in ((24, 40), (16, 40), (24, 16)))
    r = torch.randn(16, generator=generator)
    calls = [
        (a, b, c, r),
        (a.T.contiguous().T, b, c, r),
        (a, b.T.contiguous().T, c, r),
        (a, b, c.float(), r),
        (a, b, c, r.bfloat16()),
        (a.half(), b.half(), c.half(), r),
        (_shifted(a), _shifted(b), _shifted(c), _shifted(r)),
        (a, b, c.T.contiguous().T, r),
    ]
    with emulated() as asked:
        for a_, b_, c_, r_ in calls * 2:
            got = run.gemm(epilogue, a_, b_, {"c": c_, "r": r_})["y"]
            wanted = a_.double() @ b_.double().T + c_.double() * r_.double()
            assert got.dtype is a_.dtype and (got.double() - wanted).norm() <= 2.0**-8 * wanted.norm()
        assert len(set(asked)) == 6  # what is not aligned, or a column-major tile, goes through a copy to the first
        doubled = parse("epilogue g(x: tile[M, N]) { store y: tile[M, N] = 2 * x }").epilogues["g"]
        before = set(asked)
        results = [run.hosted(doubled, {"x": x})["y"] for x in (c, _shifted(c), c)]
        assert all(torch.equal(result, 2 * c) for result in results) and len(set(asked) - before) == 2
