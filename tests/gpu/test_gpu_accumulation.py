"""How much of a long sum the tensor cores lose: what is stored in f32 keeps 1e-5 of it in a precise epilogue."""

from __future__ import annotations

import attrs
import pytest
import torch

import codalang
from codalang.ir.epilogue import Epilogue
from codalang.lower import run
from codalang.parser import parse

MATMUL = "epilogue matmul(acc: tile[M, N]) { store y: tile[M, N]: f32 = acc }"
EXTENTS = [(8192, 4096, 14336), (1000, 520, 14344), (7, 4104, 14336), (129, 130, 131072)]


def precise(epilogue: Epilogue) -> Epilogue:
    """The same as a `precise epilogue`."""
    return attrs.evolve(epilogue, precise=True)


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative, by the 2-norm."""
    return float((got.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("extents", EXTENTS, ids=str)
def test_a_product_of_positive_numbers(extents: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Nothing cancels, so that all that is truncated counts."""
    m, n, k = extents
    a, b = (torch.rand(rows, k, device="cuda").to(dtype) for rows in (m, n))
    truth = a.double() @ b.double().T
    epilogue = parse(MATMUL).epilogues["matmul"]
    fast, exact = (error(run.gemm(e, a, b, {})["y"], truth) for e in (epilogue, precise(epilogue)))
    assert exact <= 8e-6, f"{exact:.2e}, and {fast:.2e} in an epilogue that is not precise"
    assert fast > 2 * exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("extents", EXTENTS[:3], ids=str)
def test_a_sum_of_squares(extents: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The squares of a residual stream after the down projection: twice the accumulator's error."""
    m, n, k = extents
    a, b = (torch.randn(rows, k, device="cuda").to(dtype) for rows in (m, n))
    b /= k**0.5
    res = torch.randn(m, n, device="cuda").to(dtype)
    gamma = torch.randn(n, device="cuda")
    module = codalang.load("residual_rms", precise=True)
    got = run.gemm(module.residual_rms.epilogue, a, b, {"res": res, "gamma": gamma})
    assert error(got["ss"], ((a.double() @ b.double().T + res.double()) ** 2).sum(1)) <= 1e-5
