"""Few tiles: the configurations that are considered fit, cover the GPU, and compile without spills."""

from __future__ import annotations

import tempfile
from pathlib import Path

import attrs
import pytest
import torch
from emulation import emulated
from test_lower import spec_of, stdlib_epilogue

from codalang.autodiff import derive
from codalang.lower import plan, run, split
from codalang.lower.compile import compile_object
from codalang.lower.spec import Folding, KernelSpec, Operand
from codalang.parser import parse

STDLIB = Path(__file__).parents[1] / "stdlib"
PLAIN = parse("epilogue plain(acc: tile[M, N]) { store y: tile[M, N] = acc }").epilogues["plain"]
RESIDUAL = stdlib_epilogue(STDLIB / "residual_rms.coda")
OPERAND = Operand("bf16", "k", "k")


@pytest.mark.parametrize("epilogue", [PLAIN, RESIDUAL, derive(RESIDUAL).backward], ids=lambda e: e.name)
def test_every_candidate_fits(epilogue: object) -> None:
    spec = spec_of(epilogue, OPERAND)
    found = list(split.candidates(spec, 64, 4096, 4096))
    assert {c.split for c in found} == set(split.SPLITS)
    for config in found:
        assert plan.shared_bytes(spec, config) <= plan.SMEM_CAPACITY
        assert config.stages >= 2
        assert config.split == 1 or split.workspace(config, 64, 4096) * 4 <= split.MOST_WORKSPACE


@pytest.mark.parametrize("m", [1, 16, 64, 128, 256])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (64, 8192)])
def test_a_short_batch_keeps_most_of_the_gpu_busy(m: int, n: int, k: int) -> None:
    """Of the multiprocessors that there is work for: a part of K is at least 256 long."""
    spec = spec_of(PLAIN, OPERAND)
    config = split.choose(spec, m, n, k)
    most = max(split.tiles(c, m, n) * c.split for c in split.candidates(spec, m, n, k))
    assert split.tiles(config, m, n) * config.split >= min(0.6 * plan.SMS, most / 2)


def test_a_long_batch_is_planned_as_ever() -> None:
    spec = spec_of(PLAIN, OPERAND)
    for extents in ((8192, 4096, 4096), (2048, 6144, 4096)):
        assert split.choose(spec, *extents) == plan.choose(spec, *extents)


@pytest.mark.parametrize("epilogue", [PLAIN, RESIDUAL], ids=lambda e: e.name)
@pytest.mark.parametrize("tiling", [(64, 32), (64, 256), (128, 128)])
def test_split_kernels_compile_cleanly(epilogue: object, tiling: tuple[int, int]) -> None:
    spec = spec_of(epilogue, OPERAND)
    config = next(c for c in split.candidates(spec, 64, 4096, 4096) if c.tile == tiling and c.split == 4)
    with tempfile.TemporaryDirectory() as folder:
        report = compile_object(attrs.evolve(spec, config=config), Path(folder) / "kernel.o")
    assert (report.spill_bytes, report.serialized) == (0, None)


@pytest.mark.parametrize(
    "change",
    [
        {"operand": Operand("bf16", "k", "k", b_folding=Folding((2,)))},
        {"operand": Operand("bf16", "k", "k", Folding((64, 2)), Folding((64, 2)))},
        {"operand": Operand("bf16", "k", "mn", b_folding=Folding((), (64, 2)))},
        {"operand": Operand("bf16", "mn", "mn"), "output_foldings": (Folding((2,)),)},
        {"operand": Operand("bf16", "mn", "mn"), "output_foldings": (Folding((64, 2)),)},
    ],
    ids=["rows of b in pairs", "heads", "k in heads", "output in pairs", "output in heads"],
)
def test_folded_kernels_compile_cleanly_and_move_as_few_boxes(change: dict) -> None:
    plain = spec_of(PLAIN, attrs.evolve(change["operand"], a_folding=Folding(), b_folding=Folding()))
    folded: KernelSpec = attrs.evolve(plain, **change)
    config = plan.choose(folded, 4096, 4096, 4096)
    moves = []
    with tempfile.TemporaryDirectory() as folder:
        for spec in (plain, folded):
            report = compile_object(attrs.evolve(spec, config=config), Path(folder) / "kernel.o", keep_ptx=True)
            assert (report.spill_bytes, report.serialized) == (0, None)
            assert report.ptx is not None
            moves.append(report.ptx.count("cp.async.bulk.tensor"))
    assert moves[0] == moves[1] > 0


def test_a_split_gemm_gets_its_workspace() -> None:
    a, b = torch.randn(16, 4096).bfloat16(), torch.randn(96, 4096).bfloat16()
    with emulated() as asked:
        for _ in range(2):
            got = run.gemm(PLAIN, a, b, {})["y"]
    assert asked[0].config.split > 1
    assert torch.equal(got, (a.double() @ b.double().T).bfloat16())
