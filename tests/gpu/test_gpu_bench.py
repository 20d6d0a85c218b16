"""Measuring and tuning on a GPU: small workloads, few rounds."""

from __future__ import annotations

import attrs
import pytest
import torch

from codalang.bench import measure, tune
from codalang.bench.timing import host_microseconds, interleaved
from codalang.bench.workloads import PATTERNS, Width, Workload, make_operands, standard
from codalang.lower import ahead, run, split, tuned
from codalang.lower.cache import Cache
from codalang.lower.spec import KernelSpec

SMALL = Width("small", 1024, 2048, 8, 4, 64, vocabulary=2048)
MEASURED = [p for p in PATTERNS.values() if not p.name.startswith("gemm") or p.name.startswith("gemm_down")]


def kernels_needed(items: list[pytest.Item]) -> list[KernelSpec]:
    """For `compiled_ahead`."""
    return measure.kernels([Workload(pattern, SMALL, 512) for pattern in MEASURED])


@pytest.mark.parametrize("pattern", MEASURED, ids=lambda p: p.name)
def test_a_workload_is_measured_and_right(pattern) -> None:
    """Ours, the point of reference and plain torch agree with float64, and have times."""
    workload = Workload(pattern, SMALL, 512)
    result = measure.measured(workload, ("eager",), timer=lambda c: interleaved(c, rounds=3, warm_up=1))
    ways = {"codalang", result.baseline} | ({"eager"} if pattern.group != "gemm" else set())
    assert set(result.times) == ways
    assert all(0 < t.low <= t.median <= t.high < 10 for t in result.times.values())
    assert result.wrong == [], result.errors
    assert set(result.errors["codalang"]) >= {o.name for o in workload.epilogue.outputs}


def test_the_host_s_cost_is_not_in_the_device_s_time() -> None:
    """A call that keeps the host busy takes no longer on the device."""
    x = torch.randn(1024, 1024, device="cuda")

    def busy() -> None:
        for _ in range(2000):
            pass
        torch.mul(x, x)

    times = interleaved({"plain": lambda: torch.mul(x, x), "busy": busy}, rounds=9)
    assert times["busy"].median < 2 * times["plain"].median
    assert host_microseconds(busy) > host_microseconds(lambda: torch.mul(x, x))


def test_what_is_tuned_is_remembered_and_taken(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Cache(tmp_path / "c", "tuned")
    monkeypatch.setattr(tuned, "store", lambda: store)
    operands = make_operands(Workload(PATTERNS["swiglu"], SMALL, 512), "cuda")
    epilogue = standard("swiglu")
    with tune.recording() as calls:
        before = run.gemm(epilogue, operands.a, operands.b, {})
    (call,) = calls
    problem = call.problem
    heuristic = split.choose(problem.spec, problem.m, problem.n, problem.k)
    other = next(c for c in tune.all_for(problem.spec, problem.m, problem.n, problem.k) if c.tile != heuristic.tile)
    ahead.compile_each([attrs.evolve(problem.spec, config=c) for c in (heuristic, other)])
    result = tune.tune(call, [heuristic, other])
    assert result.best in (heuristic, other)
    assert result.best_ms <= result.heuristic_ms
    gpu = tuned.gpu_of(torch.device("cuda", torch.cuda.current_device()))
    assert tune.keep(attrs.evolve(result, best=other), gpu)
    launched = []
    original = run.function
    monkeypatch.setattr(run, "function", lambda spec: launched.append(spec) or original(spec))
    after = run.gemm(epilogue, operands.a, operands.b, {})
    assert [spec.config for spec in launched] == [other]
    assert (after["y"] - before["y"]).float().norm() < 2**-8 * before["y"].float().norm()
