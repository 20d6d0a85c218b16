"""The arithmetic of benchmarks/energy.py: what is counted, and the bound that follows."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import energy  # noqa: E402

from codalang.bench.workloads import PATTERNS, WIDTHS, Workload  # noqa: E402
from codalang.ir.verify import verify  # noqa: E402
from codalang.lower import ahead  # noqa: E402

PATTERN = [p for p in PATTERNS.values() if p.group == "epilogue"]


def test_power_is_energy_between_ticks() -> None:
    assert energy.watts([(1.0, 5000), (1.2, 9000), (1.5, 355000)]) == pytest.approx(700.0)
    with pytest.raises(SystemExit):
        energy.watts([(1.0, 5000)])


def test_without_nvml_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(SystemExit, match="pip install nvidia-ml-py"):
        energy.Meter()


def test_the_clock_is_cycles_over_time_where_both_counts_saw_a_multiprocessor() -> None:
    begin = [[1000, 10], [7, 20], [0, 0], [50, 0]]
    end = [[1000 + 1_500_000, 10 + 1_000_000], [7 + 3_000_000, 20 + 2_000_000], [9, 9], [99, 99]]
    assert energy.megahertz(begin, end) == pytest.approx(1500.0)


def test_the_exponent_of_energy_is_within_what_voltage_can_do() -> None:
    assert energy.exponent((1.0, 1000.0), (1.21, 1100.0)) == pytest.approx(2.0)
    assert energy.exponent((1.0, 1000.0), (2.0, 1100.0)) == 2.0
    assert energy.exponent((1.0, 1000.0), (0.9, 1100.0)) == 0.0
    assert energy.exponent((1.0, 1000.0), (1.5, 1001.0)) == 0.0


@pytest.mark.parametrize("power", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("added", [-0.1, 0.0, 0.2])
def test_the_least_time_pays_for_both(added: float, power: float) -> None:
    x = energy.least_time(added, power)
    assert x == pytest.approx(x**-power + added, abs=1e-5)


def test_shares_of_a_pattern() -> None:
    """A GEMM of 1 J above idling that an epilogue adds a tenth to in bytes, a twentieth in instructions."""
    workload = Workload(PATTERNS["residual_rms"], WIDTHS["8B"], 8192)
    m, n, _ = workload.extents
    extra = workload.tile_bytes - 2 * m * n  # the hosted epilogue moves as much, and the accumulator twice
    price = energy.Prices(energy.Load(1.0, 2000.0, 100.0), 0.1 / extra, 0.0)
    turns = {"cublas": energy.Speed(1.6, 1700.0), "codalang": energy.Speed(2.0, 1600.0)}
    steady = {
        "cublas": energy.Load(2.0, 1500.0, 600.0),
        "hosted": energy.Load(1.0, 1900.0, 100.0 + 1e3 * (0.1 * (extra + 4 * m * n) / extra + 0.05)),
    }
    found = energy.shares(workload, turns, steady, price)
    assert found["extra bytes"] == pytest.approx(0.1)
    assert found["instructions"] == pytest.approx(0.05)
    assert found["bound by bytes"] == pytest.approx(1 / 1.1, abs=1e-5)
    assert found["bound"] == pytest.approx(1 / 1.15, abs=1e-5)
    assert found["measured"] == pytest.approx(0.8)
    assert found["clock"] * found["cycles"] == pytest.approx(found["measured"])


@pytest.mark.parametrize("pattern", PATTERN, ids=lambda p: p.name)
def test_less_of_an_epilogue_moves_the_same_tiles(pattern: energy.Any) -> None:
    workload = Workload(pattern, WIDTHS["8B"], 8192)
    verify(energy.plain(workload.epilogue))
    if any(s.type.width for s in workload.epilogue.stores):
        less = energy.moves(workload.epilogue)
        verify(less)
        bare = Workload(attrs.evolve(pattern, epilogue=lambda: less), workload.width, workload.tokens)
        assert bare.tile_bytes == workload.tile_bytes


def test_every_load_has_its_kernel() -> None:
    """Recorded without a GPU: what is compiled ahead is what the loads launch."""
    workload = Workload(PATTERNS["swiglu_backward"], WIDTHS["8B"], 8192)
    with ahead.recorded() as specs:
        names = [name for name, call in energy.calls(workload, "meta") if call() is not None]
    assert names == ["codalang", "plain", "moves", "hosted"]
    assert len([spec for spec in specs if spec.merge is None]) == 4
