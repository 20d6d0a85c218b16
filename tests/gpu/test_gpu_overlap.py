"""Kernels that start while the one before them ends, and kernels that load only the rows of A that there are.

Both must give the bits that they give otherwise.  Chains are made so that a kernel which does not wait reads what is
not written yet, or writes what is still read: each step is short, and buffers take turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import attrs
import pytest
import torch
from torch import Tensor

from codalang.errors import CodaCallError
from codalang.lower import run, split
from codalang.lower.call import forget
from codalang.lower.spec import KernelSpec, Operand
from codalang.parser import parse

EPILOGUES = parse(
    """
    epilogue plain(acc: tile[M, N]) { store y: tile[M, N] = acc }
    epilogue residual(acc: tile[M, N], res: tile[M, N], gamma: row[N]) {
        let x = acc + res
        store x: tile[M, N]
        reduce ss: col[M] = sum(x * x)
        reduce most: row[N] = max(abs(x * gamma))
    }
    epilogue norm(x: tile[M, N], ss: col[M]) { store y: tile[M, N] = x * rsqrt(ss + 1) }
    """
).epilogues
PLAIN, RESIDUAL, NORM = EPILOGUES["plain"], EPILOGUES["residual"], EPILOGUES["norm"]
PLAIN_SPEC = KernelSpec(PLAIN, Operand("bf16", "k", "k"), (), ("bf16",), None)
STEPS = 12
# M and the width: one tile, a few, and many for each multiprocessor
EXTENTS = ((16, 256), (128, 1024), (2048, 2048))
ROWS = (1, 15, 16, 17, 32, 33, 65, 80, 96)


@contextlib.contextmanager
def overlapping(overlap: bool) -> Iterator[None]:
    before, run.overlap = run.overlap, overlap
    try:
        yield
    finally:
        run.overlap = before


@attrs.frozen
class Chain:
    """A chain's weights and its buffers, which take turns."""

    x: Tensor
    weights: tuple[Tensor, Tensor]
    gamma: Tensor
    buffers: tuple[Tensor, ...]

    @staticmethod
    def of(m: int, width: int) -> Chain:
        torch.manual_seed(m)
        x, *buffers = (torch.randn(m, width, device="cuda").bfloat16() for _ in range(4))
        weights = tuple((torch.randn(width, width, device="cuda") / width**0.5).bfloat16() for _ in range(2))
        return Chain(x, (weights[0], weights[1]), torch.randn(width, device="cuda"), tuple(buffers))

    def run(self, overlap: bool) -> list[Tensor]:
        """GEMMs, hosted kernels, merges of partials and kernels of torch, each of which reads what the last wrote."""
        x, kept = self.x, []
        first, second, third = self.buffers
        with overlapping(overlap):
            for step in range(STEPS):
                out = {"x": first}
                made = run.gemm(RESIDUAL, x, self.weights[0], {"res": x, "gamma": self.gamma}, out=out)
                y = run.hosted(NORM, {"x": made["x"], "ss": made["ss"]}, out={"y": second})["y"]
                x = run.gemm(PLAIN, y, self.weights[1], {}, out={"y": third})["y"]
                if step % 3 == 0:
                    x = x * 0.5
                kept += [made["ss"], made["most"], x.clone()]
        return kept


def _same(xs: list[Tensor], ys: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize(("m", "width"), EXTENTS)
def test_chains_that_overlap_give_the_same_bits(m: int, width: int) -> None:
    chain = Chain.of(m, width)
    truth = chain.run(overlap=False)
    assert all(bool(t.isfinite().all()) for t in truth)
    for _ in range(10):
        assert _same(chain.run(overlap=True), truth)


@pytest.mark.parametrize(("m", "width"), EXTENTS)
def test_chains_that_overlap_can_be_captured(m: int, width: int) -> None:
    chain = Chain.of(m, width)
    truth = chain.run(overlap=False)
    chain.run(overlap=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain.run(overlap=True)
    for _ in range(10):
        for tensor in found:
            tensor.zero_()
        graph.replay()
        assert _same(found, truth)


def short(m: int) -> dict[str, Tensor]:
    """A short batch by each configuration, and by the same that loads whole tiles of A."""
    torch.manual_seed(m)
    a, b = torch.randn(m, 1096, device="cuda").bfloat16(), torch.randn(200, 1096, device="cuda").bfloat16()
    found = {}
    for config in split.candidates(PLAIN_SPEC, m, 200, 1096):
        if config.split in (1, 3) and config.a_rows:
            for each in (config, attrs.evolve(config, a_rows=0)):
                found[repr(each)] = run.gemm(PLAIN, a, b, {}, config=each)["y"]
    return found


def kernels_needed(items: list[pytest.Item]) -> list[KernelSpec]:
    """See conftest."""
    import gpu_compile

    functions = {item.function for item in items}
    with gpu_compile.recorded() as specs:
        if functions & {test_chains_that_overlap_give_the_same_bits, test_chains_that_overlap_can_be_captured}:
            for extents in EXTENTS:
                for overlap in (False, True):
                    Chain.of(*extents).run(overlap)
        if test_rows_that_are_not_loaded_do_not_matter in functions:
            for m in ROWS:
                short(m)
    forget()
    return list(specs)


@pytest.mark.parametrize("m", ROWS)
def test_rows_that_are_not_loaded_do_not_matter(m: int) -> None:
    found = list(short(m).values())
    assert found
    for loaded, whole in zip(found[::2], found[1::2], strict=True):
        assert torch.equal(loaded, whole)


def test_a_configuration_for_fewer_rows_is_refused() -> None:
    config = next(c for c in split.candidates(PLAIN_SPEC, 16, 256, 256) if c.a_rows)
    a, b = (torch.zeros(m, 256, device="cuda", dtype=torch.bfloat16) for m in (17, 256))
    with pytest.raises(CodaCallError):
        run.gemm(PLAIN, a, b, {}, config=config)
