"""`codalang bench`: every way of a workload computes the same; results and tables, with times that are made up."""

from __future__ import annotations

import pytest
from emulation import emulated

from codalang.bench import implementations, measure, workloads
from codalang.bench.implementations import Skipped
from codalang.bench.workloads import PATTERNS, Width, Workload, make_operands

TINY = Width("tiny", 64, 96, 4, 2, 16, vocabulary=200)
BF16_ROUNDING = 2.0**-7  # relative, in norm; one rounding gives 2**-9.2


def tiny(name: str) -> Workload:
    return Workload(PATTERNS[name], TINY, 40)


def errors_of(way: implementations.Way, workload: Workload, operands: workloads.Operands) -> dict[str, float]:
    results = way.restore(way.call())
    exact = measure.exact_results(workload, operands)
    return {name: measure.error(results[name], exact[name]) for name in results}


def outputs_of(workload: Workload) -> set[str]:
    return {o.name for o in workload.epilogue.outputs}


@pytest.mark.parametrize("name", PATTERNS)
def test_every_way_computes_the_same(name: str) -> None:
    workload = tiny(name)
    operands = make_operands(workload, "cpu")
    every = implementations.implementations()
    every["compile"] = implementations.compiled(None, "aot_eager")
    done = []
    with emulated():
        for way in ("codalang", "cublas", "copy", "eager", "compile"):
            try:
                ready = every[way](workload, operands)
            except Skipped:
                continue
            errors = errors_of(ready, workload, operands)
            assert all(e < BF16_ROUNDING for e in errors.values()), (way, errors)
            alone = way == "copy" or (way == "cublas" and workload.pattern.group == "epilogue")
            assert set(errors) == (set() if alone else outputs_of(workload))
            done.append(way)
    assert "codalang" in done
    assert implementations.baseline(workload) in done
    assert len(done) == (2 if workload.pattern.group == "gemm" else 4)
