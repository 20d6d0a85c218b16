"""Random programs through the lowering, fresh in every run: benchmarks/random_programs.py where there is no GPU.

What it does on a GPU is done here on stand-ins for kernels; and as many of its kernels as time allows are compiled.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "benchmarks"), str(Path(__file__).parent / "gpu")]

import emulation  # noqa: E402
import random_programs  # noqa: E402

from codalang.lower.compile import compile_object  # noqa: E402

SEED = int(os.environ["CODALANG_SEED"])
SMALL = ((33, 40, 24), (70, 136, 40))
COMPILED = 20
SECONDS = 40.0


def test_the_same_seed_draws_the_same_programs() -> None:
    first, again, other = (random_programs.draw(5, seed, extents=SMALL) for seed in (SEED, SEED, SEED + 1))
    assert [p.epilogue for p in first] == [p.epilogue for p in again] != [p.epilogue for p in other]
    assert len({p.epilogue for p in first}) == 5
    assert all(any(c.subject.on_gemm for c in p.cases) for p in first)


def test_right_kernels_are_found_right() -> None:
    programs = random_programs.draw(6, SEED, extents=SMALL)
    rows = random_programs.check_programs(programs, device="cpu", compiles=False, runs=True)
    assert [row.faults for row in rows] == [()] * 6, "\n".join(f"{r.source}\n{r.faults}" for r in rows if r.faults)
    assert all(row.kernels > 0 and row.cases > 0 for row in rows)


def test_wrong_kernels_are_found_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = emulation._one_tile

    def wrong(epilogue, call, outputs, tile, rows, columns):  # noqa: ANN001, ANN202
        right(epilogue, call, outputs, tile, rows, columns)
        for buffer in outputs:
            if buffer.is_floating_point():
                buffer.mul_(1.03).add_(0.1)

    monkeypatch.setattr(emulation, "_one_tile", wrong)
    programs = random_programs.draw(2, SEED, extents=SMALL)
    rows = random_programs.check_programs(programs, device="cpu", compiles=False, runs=True)
    assert all(row.verdict == "WRONG" for row in rows)
    random_programs.report(rows, SEED, None)
    shown = capsys.readouterr().out
    assert "2 wrong" in shown and f"--seed {SEED} --only 1" in shown and rows[1].source in shown


def test_kernels_compile(tmp_path: Path) -> None:
    """One kernel of each program in turn: forward or backward, on a GEMM or hosted, or one that merges."""
    begin, registers = time.perf_counter(), []
    programs = random_programs.draw(COMPILED, SEED + 2, extents=SMALL)
    with emulation.emulated():
        kernels = list(random_programs.kernels_of(programs, "cpu").values())
    for turn, specs in enumerate(k for k in kernels if k):
        report = compile_object(specs[turn % len(specs)], tmp_path / "kernel.o")
        registers.append(report.registers)
        assert (tmp_path / "kernel.o").read_bytes().startswith(b"\x7fELF")
        if time.perf_counter() - begin > SECONDS:
            break
    assert len(registers) >= 2 and all(0 < r <= 255 for r in registers)
