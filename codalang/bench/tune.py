"""Tuning: candidate configurations of a GEMM kernel, compiled in parallel, timed in turn, the best remembered.

    calls = recorded(lambda: module.swiglu(a, w))      the GEMMs that some code runs, with their tensors
    for call in calls: ...
        tuned = tune(call, ...)                         see `lower.tuned` for what is remembered, and where

All candidates are timed a few rounds, then the best few and the heuristic's many rounds: noise must not choose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from codalang.bench.candidates import all_for
from codalang.bench.timing import Call, Timing, interleaved
from codalang.errors import CodaCompileError
from codalang.lower import ahead, run, split, tuned
from codalang.lower.call import forget, listening
from codalang.lower.spec import Config, KernelSpec
from codalang.torch import execute

Timer = Callable[..., Mapping[str, Timing]]
FIRST_ROUNDS, FINAL_ROUNDS, FINALISTS = 3, 15, 5


@attrs.frozen
class Problem:
    """What a configuration is chosen for."""

    spec: KernelSpec  # its configuration is open
    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.spec.epilogue.name} {self.m} x {self.n} x {self.k}"


@attrs.frozen(eq=False)
class GemmCall:
    """One GEMM with its tensors: `run` runs it with a configuration, or the one that is chosen."""

    problem: Problem
    run: Callable[[Config | None], object]


@attrs.frozen
class Tuned:
    """The outcome: milliseconds of the heuristic's configuration and of the best."""

    problem: Problem
    heuristic: Config
    best: Config
    heuristic_ms: float
    best_ms: float
    candidates: int
    failed: int

    @property
    def gain(self) -> float:
        """How much faster the best is."""
        return self.heuristic_ms / self.best_ms


@contextlib.contextmanager
def recording() -> Iterator[list[GemmCall]]:
    """The GEMMs that run meanwhile, each problem once; no call is repeated without a look at its GEMMs."""
    found: dict[Problem, GemmCall] = {}
    original = run.gemm

    def gemm(*arguments: Any, config: Config | None = None, **options: Any) -> dict[str, torch.Tensor]:
        def replay(config: Config | None) -> dict[str, torch.Tensor]:
            with torch.no_grad():
                return original(*arguments, config=config, **options)

        with problems() as asked, ahead.recorded(), listening():  # nobody else is to hear of this rehearsal
            original(*arguments, **options)
        for problem in asked:
            found.setdefault(problem, GemmCall(problem, replay))
        calls.extend(call for call in found.values() if call not in calls)
        return original(*arguments, config=config, **options)

    calls: list[GemmCall] = []
    before, execute.stepwise = execute.stepwise, True
    vars(run)["gemm"] = gemm
    try:
        yield calls
    finally:
        vars(run)["gemm"] = original
        execute.stepwise = before


@contextlib.contextmanager
def problems() -> Iterator[list[Problem]]:
    """The problems for which calls choose a configuration meanwhile; calls of a signature seen before choose none."""
    found: list[Problem] = []

    def choose(spec: KernelSpec, m: int, n: int, k: int, device: torch.device) -> Config:
        found.append(Problem(attrs.evolve(spec, config=None), m, n, k))
        return split.choose(spec, m, n, k)

    original = tuned.choose
    vars(tuned)["choose"] = choose
    try:
        yield found
    finally:
        vars(tuned)["choose"] = original


def compiled(
    problems_: Sequence[Problem], processes: int | None = None, progress: Callable[[int, int], None] = lambda a, b: None
) -> dict[Problem, list[Config]]:
    """The candidates of each problem that compile, the heuristic's first.

    Raises CodaCompileError where the heuristic's does not compile.
    """
    every = {p: all_for(p.spec, p.m, p.n, p.k) for p in problems_}
    specs = [attrs.evolve(p.spec, config=c) for p, configs in every.items() for c in configs]
    outcome = ahead.compile_each(specs, processes, progress)
    errors = {(p, c): outcome[attrs.evolve(p.spec, config=c)].error for p, configs in every.items() for c in configs}
    for problem, (heuristic, *_) in every.items():
        if error := errors[problem, heuristic]:
            raise CodaCompileError(f"the kernel of {problem.name} does not compile: {error}", problem.spec.epilogue.loc)
    return {p: [c for c in configs if errors[p, c] is None] for p, configs in every.items()}


def tune(call: GemmCall, configs: Sequence[Config], *, timer: Timer = interleaved) -> Tuned:
    """Time the configurations of a call, the first of which is the heuristic's, and find the best."""
    problem = call.problem
    heuristic = configs[0]
    ready: dict[str, Call] = {}
    for config in configs:
        with contextlib.suppress(RuntimeError):  # a launch that the device refuses
            call.run(config)
            ready[str(config)] = _bound(call, config)
    times = timer(ready, rounds=FIRST_ROUNDS, warm_up=1)
    best = sorted(ready, key=lambda name: times[name].median)[:FINALISTS]
    finalists = {name: ready[name] for name in dict.fromkeys([str(heuristic), *best])}
    final = timer(finalists, rounds=FINAL_ROUNDS, warm_up=1)
    name = min(finalists, key=lambda n: final[n].median)
    chosen = next(c for c in configs if str(c) == name)
    return Tuned(
        problem,
        heuristic,
        chosen,
        final[str(heuristic)].median,
        final[name].median,
        len(configs),
        len(configs) - len(ready),
    )


def _bound(call: GemmCall, config: Config) -> Call:
    return lambda: call.run(config)


def keep(result: Tuned, gpu: str) -> bool:
    """Remember the best; calls that this process has not decided yet take it, too."""
    problem = result.problem
    facts = {"milliseconds": result.best_ms, "heuristic_milliseconds": result.heuristic_ms}
    kept = tuned.remember(problem.spec, problem.m, problem.n, problem.k, gpu, result.best, **facts)
    forget()
    return kept
