"""Search of GEMM configurations on a Hopper GPU, beside what the heuristic chooses.

    python benchmarks/search_config.py [--only REGEX] [--seconds 150] --out DIR

The held list has the patterns of `codalang.bench.workloads` at several widths and token counts.  Of each workload one
configuration of every tiling that fits is compiled, in parallel processes and through the disk cache, and timed; then
every division of shared memory of the best tiling (`codalang.bench.candidates`), as many as there is time for; each
time in turns with the heuristic's.  `codalang/lower/plan.py` is written from these results; short batches, where K is
split, have `benchmarks/few_tiles.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

from codalang.bench.candidates import all_for, short  # noqa: E402
from codalang.bench.timing import interleaved  # noqa: E402
from codalang.bench.tune import GemmCall, Problem, Timer, Tuned, problems, tune  # noqa: E402
from codalang.bench.workloads import PATTERNS, WIDTHS, Workload, make_operands  # noqa: E402
from codalang.lower import ahead, run  # noqa: E402
from codalang.lower.spec import Config  # noqa: E402

HELD = (
    "residual_rms 8B 8192",
    "residual_rms 1B 4096",
    "swiglu 8B 8192",
    "swiglu 70B 4096",
    "rope 8B 8192",
    "rope 1B 16384",
    "logsumexp 1B 4096",
    "norm_backward 8B 8192",
    "norm_backward 70B 4096",
    "swiglu_backward 8B 8192",
    "swiglu_backward 1B 4096",
    "gemm_qkv_tn 8B 4096",
    "gemm_down_nn 8B 8192",
    "gemm_gate_up_nt 1B 8192",
)
TIMING = 20.0  # seconds, of all that is timed


def workload(name: str) -> Workload:
    """What a name of the held list says."""
    pattern, width, tokens = name.split()
    return Workload(PATTERNS[pattern], WIDTHS[width], int(tokens))


def problem(chosen: Workload) -> Problem:
    """Its GEMM, configuration left open.  Needs no GPU."""
    operands = make_operands(chosen, "meta")
    with problems() as found, ahead.recorded():
        run.gemm(chosen.epilogue, operands.a, operands.b, operands.inputs)
    return found[0]


Tiling = tuple[tuple[int, int], tuple[int, int], bool]


def tiling(config: Config) -> Tiling:
    """Tile, cluster and schedule."""
    return config.tile, config.cluster, config.ping_pong


def usual(config: Config) -> tuple[int, ...]:
    """How much a division of shared memory looks as one that is seldom bad: the ring comes first."""
    return (
        min(config.stages, 4),
        config.subtile == 32,
        min(config.load_stages, 2),
        min(config.store_stages, 2),
        config.stages,
        -config.load_stages,
    )


def of_each_tiling(asked: Problem) -> list[Config]:
    """The heuristic's configuration, and one of every tiling."""
    heuristic, *others = all_for(asked.spec, asked.m, asked.n, asked.k)
    best: dict[Tiling, Config] = {}
    for config in sorted((c for c in others if c.split == 1 and not c.balanced), key=usual):
        best[tiling(config)] = config
    return list(dict.fromkeys([heuristic, *best.values()]))


def of_tiling(asked: Problem, like: Config) -> list[Config]:
    """The heuristic's configuration, that one, and every other of its tiling, the most usual first."""
    heuristic, *others = all_for(asked.spec, asked.m, asked.n, asked.k)
    same = sorted((c for c in others if tiling(c) == tiling(like)), key=lambda c: (c.balanced, *usual(c)), reverse=True)
    return list(dict.fromkeys([heuristic, like, *same]))


def compiled(asked: dict[Problem, list[Config]]) -> dict[Problem, list[Config]]:
    """Those that compile, the first of each problem among them."""
    specs = [attrs.evolve(p.spec, config=c) for p, configs in asked.items() for c in configs]
    begin = time.perf_counter()
    outcome = ahead.compile_each(specs)
    errors = {spec: found.error for spec, found in outcome.items() if found.error}
    words = sorted({error.splitlines()[0] for error in errors.values()})
    print(f"{len(outcome)} kernels in {time.perf_counter() - begin:.0f} s, {len(errors)} failed {words}", flush=True)
    return {p: [c for c in cs if attrs.evolve(p.spec, config=c) not in errors] for p, cs in asked.items()}


def timed(chosen: Workload, asked: Problem, configs: list[Config], timer: Timer, device: str) -> Tuned:
    """The best of these configurations, and the first, which is the heuristic's."""
    operands = make_operands(chosen, device)
    call = GemmCall(asked, lambda c: run.gemm(chosen.epilogue, operands.a, operands.b, operands.inputs, config=c))
    found = tune(call, configs, timer=timer)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def search(names: list[str], seconds: float, timer: Timer = interleaved, device: str = "cuda") -> list[dict[str, Any]]:
    """Rows of the JSON."""
    begin = time.perf_counter()
    chosen = {problem(w): w for w in map(workload, names)}
    first = compiled({p: of_each_tiling(p) for p in chosen})
    each = (time.perf_counter() - begin) / len({(p.spec, c) for p, configs in first.items() for c in configs})
    tilings = {p: timed(w, p, first[p], timer, device) for p, w in chosen.items()}
    room = int((seconds - TIMING - (time.perf_counter() - begin)) / each)
    second = compiled(limited({p: of_tiling(p, tilings[p].best) for p in chosen}, max(room, 0)))
    return [row(w, timed(w, p, second[p], timer, device), len({*first[p], *second[p]})) for p, w in chosen.items()]


def limited(asked: dict[Problem, list[Config]], room: int) -> dict[Problem, list[Config]]:
    """The first of each in turn until there are `room` kernels beside the first two of each, which are there."""
    kept = {p: configs[:2] for p, configs in asked.items()}
    new: set[Any] = set()
    for rank in range(2, max(map(len, asked.values()))):
        for p, configs in asked.items():
            for config in itertools.islice(configs, rank, rank + 1):
                if (p.spec, config) in new or len(new) < room:
                    new.add((p.spec, config))
                    kept[p].append(config)
    return kept


def row(chosen: Workload, found: Tuned, candidates: int) -> dict[str, Any]:
    """As JSON and a line have it."""
    m, n, k = chosen.extents
    share = found.best_ms / found.heuristic_ms
    print(f"{chosen.name:26} {share:.3f} of {candidates}: {short(found.heuristic)} | {short(found.best)}", flush=True)
    return {
        "job": chosen.name,
        "extents": f"{m} x {n} x {k}",
        "candidates": candidates,
        "heuristic_ms": found.heuristic_ms,
        "best_ms": found.best_ms,
        "heuristic": short(found.heuristic),
        "best": short(found.best),
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="names of the list that match")
    parser.add_argument("--seconds", type=float, default=150.0, help="that all may take, compiling included")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with torch.no_grad():
        rows = search([name for name in HELD if options.only.search(name)], options.seconds)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "search.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
