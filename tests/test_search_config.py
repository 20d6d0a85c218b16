"""benchmarks/search_config.py: what it tries, and that it finds the best beside the heuristic's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import search_config as page  # noqa: E402

from codalang.bench.timing import Call, Timing  # noqa: E402
from codalang.lower import ahead, split  # noqa: E402

NAMES = ["swiglu_backward 8B 8192", "swiglu_backward 1B 4096", "gemm_down_nn 8B 8192"]


def test_the_held_list_spans_patterns_widths_and_tokens() -> None:
    held = [page.workload(name) for name in page.HELD]
    assert {w.pattern.name for w in held} >= {p.name for p in page.PATTERNS.values() if p.group == "epilogue"}
    assert {w.width.name for w in held} == set(page.WIDTHS)
    assert len({w.tokens for w in held}) == 3


@pytest.mark.parametrize("name", NAMES)
def test_every_tiling_is_tried_and_then_the_best_one_s_divisions(name: str) -> None:
    problem = page.problem(page.workload(name))
    heuristic, *others = page.of_each_tiling(problem)
    assert heuristic == split.choose(problem.spec, problem.m, problem.n, problem.k)
    tilings = [page.tiling(c) for c in others]
    assert len(set(tilings)) >= len(tilings) - 1 >= 7  # the heuristic's own twice, at most
    same = page.of_tiling(problem, others[-1])
    assert same[:2] == [heuristic, others[-1]]
    assert {page.tiling(c) for c in same[1:]} == {page.tiling(others[-1])}
    assert len(set(same)) == len(same) > 3


def test_new_kernels_are_limited_in_turn() -> None:
    problems = {p: page.of_tiling(p, page.of_each_tiling(p)[0]) for p in map(page.problem, map(page.workload, NAMES))}
    few = page.limited(problems, 3)
    assert all(kept[:2] == problems[p][:2] for p, kept in few.items())
    assert len({(p.spec, c) for p, kept in few.items() for c in kept[2:]}) == 3
    assert page.limited(problems, 1000) == problems


def test_the_best_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are told by the configuration: tall tiles are fast, and of them those with one load stage."""

    def milliseconds(name: str) -> float:
        return 2.0 - 0.5 * ("tile=(192, 128), cluster=(2, 1)" in name) - 0.1 * ("load_stages=1" in name)

    def timer(calls: Mapping[str, Call], **options: int) -> dict[str, Timing]:
        for call in calls.values():
            call()
        return {name: Timing(milliseconds(name), 0.0, 9.0) for name in calls}

    monkeypatch.setattr(page, "compiled", lambda asked: asked)
    with ahead.recorded():
        (found,) = page.search(NAMES[:1], 1e9, timer, "meta")
    assert (found["heuristic_ms"], found["best_ms"]) == (2.0, pytest.approx(1.4))
    assert found["best"].startswith("192x128 pp cluster (2, 1)")
    assert "load 1" in found["best"]
    assert found["candidates"] > 12
