"""Exhaustive search of GEMM configurations on a Hopper GPU, beside what the heuristic chooses.

`python benchmarks/search_config.py [--out DIR] [--only REGEX] [--config REGEX] [--ablate]
[--rasters N ...] [--rounds N]`

`--config` limits the candidates to those whose short form (as the table shows it) matches.  `--ablate` times beside
each candidate what its epilogue costs for a reason: `moves` loads and stores the same tiles with next to no maths,
`plain` stores the accumulator alone.

For each workload of `workloads` every candidate configuration that fits in shared memory is compiled (in parallel
processes, through the disk cache), then all are timed interleaved with cuBLAS's GEMM alone.  The table shows the best
few and the heuristic's; the JSON has all.  `codalang/lower/plan.py` is written from these results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from pathlib import Path

import attrs

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
import workloads  # noqa: E402
from timing import interleaved  # noqa: E402

from codalang.ir.build import EpilogueBuilder  # noqa: E402
from codalang.ir.epilogue import Epilogue  # noqa: E402
from codalang.ir.types import Kind  # noqa: E402
from codalang.lower import load, plan, run  # noqa: E402
from codalang.lower.spec import Config, KernelSpec, Operand, loaded_params  # noqa: E402

# (tile, cluster, ping-pong)
SHAPES = (
    ((128, 256), (2, 1), False),
    ((256, 128), (1, 2), False),
    ((128, 192), (2, 1), False),
    ((128, 192), (2, 1), True),
    ((128, 160), (2, 1), True),
    ((128, 128), (2, 1), True),
    ((192, 128), (1, 2), True),
    ((192, 128), (2, 1), True),
    ((256, 128), (2, 1), False),
)
# subtile, load and store stages
SLABS = (
    ((32, 1, 1), (32, 2, 1), (32, 4, 1), (32, 8, 1), (32, 1, 2), (32, 2, 2), (32, 4, 2))
    + ((64, 1, 1), (64, 2, 1), (64, 4, 1), (64, 1, 2), (64, 2, 2))
    + ((16, 2, 2), (16, 4, 2), (16, 8, 2), (16, 4, 4))
)
RASTERS = (8,)  # clusters of one band along N; `--rasters` tries others


@attrs.frozen
class Job:
    """One workload: an epilogue on a GEMM of given extents and majors."""

    name: str
    epilogue: Epilogue
    m: int
    n: int
    k: int
    majors: tuple[str, str]

    def spec(self) -> KernelSpec:
        """Its kernel, configuration left open; tiles bf16, vectors f32, as `workloads.make_inputs` makes them."""
        operand = Operand("bf16", *self.majors)
        dtypes = tuple("bf16" if p.type.kind is Kind.TILE else "f32" for p in loaded_params(self.epilogue, True))
        return KernelSpec(self.epilogue, operand, dtypes, ("bf16",) * len(self.epilogue.stores), None)


def jobs() -> Iterator[Job]:
    """Every GEMM workload."""
    for name, majors in workloads.gemms():
        m, n, k = workloads.GEMMS[name]
        yield Job(f"gemm {name} {majors}", workloads.PLAIN, m, n, k, workloads.MAJORS[majors])
    for name, form in workloads.epilogues():
        (m, n, k), k_backward = workloads.EPILOGUES[name]
        derivative = workloads.derived(name)
        if form == "forward on GEMM":
            yield Job(f"{name} forward", derivative.forward, m, n, k, ("k", "k"))
        elif form == "backward on GEMM":
            columns = int(n * (derivative.backward.params[0].type.width or 1))
            yield Job(f"{name} backward", derivative.backward, m, columns, k_backward, ("k", "mn"))


def moves(epilogue: Epilogue) -> Epilogue:
    """The tiles of an epilogue, loaded and stored with next to no maths; no vectors and no reductions."""
    builder = EpilogueBuilder(f"{epilogue.name}_moves", ("M", "N"))
    base = epilogue.params[0].type.width or Fraction(1)
    total = builder.param(epilogue.params[0].name, epilogue.params[0].type)
    for param in epilogue.params[1:]:
        if param.type.kind is Kind.TILE:
            value = builder.param(param.name, param.type, param.dtype)
            width = param.type.width or Fraction(1)
            if width > base:
                value = builder.op("add", builder.op("even", value), builder.op("odd", value))
            elif width < base:
                value = builder.op("join", value, value)
            total = builder.op("add", total, value)
    for store in epilogue.stores:
        width = store.type.width or Fraction(1)
        value = total if width == base else builder.op(*(("join", total, total) if width > base else ("even", total)))
        builder.store(store.name, value, store.type, store.dtype)
    return builder.finish()


def plain(epilogue: Epilogue) -> Epilogue:
    """The GEMM of an epilogue without it."""
    builder = EpilogueBuilder(f"{epilogue.name}_plain", ("M", "N"))
    accumulator = epilogue.params[0]
    builder.store("y", builder.param(accumulator.name, accumulator.type), accumulator.type)
    return builder.finish()


def ablations(job: Job) -> list[Job]:
    """The same GEMM with less of the epilogue."""
    return [
        attrs.evolve(job, name=f"{job.name} {what.__name__}", epilogue=what(job.epilogue)) for what in (moves, plain)
    ]


def candidates(job: Job, options: argparse.Namespace) -> list[Config]:
    """Every configuration that fits, with as many stages of the ring as fit."""
    spec = job.spec()
    has_loads = any(p.type.kind is Kind.TILE for p, _ in spec.inputs)
    found = {}
    for (tile, cluster, ping_pong), (subtile, loads, stores), raster in itertools.product(
        SHAPES, SLABS, options.rasters
    ):
        loads *= has_loads
        warps_rows = tile[0] // 64 // (1 if ping_pong else 2)
        if tile[1] % subtile or (loads and (tile[1] // subtile * warps_rows) % loads):
            continue
        config = Config(tile, cluster, ping_pong, 0, subtile, loads, stores, raster)
        left = plan.SMEM_CAPACITY - plan.shared_bytes(spec, config)
        stages = min(plan.MAX_STAGES, left // plan.ring_stage_bytes(tile))
        if stages >= 3:
            found[attrs.evolve(config, stages=stages)] = None
    return [config for config in found if options.config.search(_short(config))]


def _fitted(job: Job, config: Config) -> Config:
    """A configuration of another job of the same GEMM, without the slabs that this one does not need."""
    has_loads = any(p.type.kind is Kind.TILE for p, _ in job.spec().inputs)
    return attrs.evolve(config, load_stages=config.load_stages * has_loads)


def _compile(spec: KernelSpec) -> str | None:
    try:
        load.library(spec)
    except Exception as error:  # a candidate that does not compile is a result too
        return f"{type(error).__name__}: {error}"[:200]
    return None


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=re.compile, default=re.compile(""))
    parser.add_argument("--config", type=re.compile, default=re.compile(""))
    parser.add_argument("--rasters", type=int, nargs="+", default=RASTERS)
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    chosen = [job for job in jobs() if options.only.search(job.name)]
    specs = [attrs.evolve(job.spec(), config=c) for job in chosen for c in candidates(job, options)]
    if options.ablate:
        specs += [
            attrs.evolve(other.spec(), config=_fitted(other, c))
            for job in chosen
            for other in ablations(job)
            for c in candidates(job, options)
        ]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        failures = {s: why for s, why in zip(specs, pool.map(_compile, specs), strict=True) if why}
    print(f"{len(specs)} kernels compiled, {len(failures)} failed: {sorted(set(failures.values()))}", flush=True)
    results = []
    for job in chosen:
        results += _search(job, options, failures)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "search.json").write_text(json.dumps(results, indent=1))


def _search(job: Job, options: argparse.Namespace, failures: dict[KernelSpec, str]) -> list[dict[str, object]]:
    spec = job.spec()
    a = workloads.operand(job.m, job.k, job.majors[0])
    b = workloads.operand(job.n, job.k, job.majors[1], job.k**-0.5)
    base = job.epilogue.params[0].type.width or 1
    inputs = workloads.make_inputs(job.epilogue, job.m, int(job.n / base))
    heuristic = plan.choose(spec, job.m, job.n, job.k)
    configs = [c for c in candidates(job, options) if attrs.evolve(spec, config=c) not in failures]
    variants = [("", job), *((o.name.split()[-1], o) for o in (ablations(job) if options.ablate else []))]

    def call(program: Epilogue, config: Config | None) -> workloads.Call:
        given = {name: value for name, value in inputs.items() if program.has_param(name)}
        return lambda: run.gemm(program, a, b, given, config=config)

    calls = {f"{what}{c}": call(o.epilogue, _fitted(o, c)) for what, o in variants for c in configs}
    calls["heuristic"] = call(job.epilogue, None)
    calls["cublas"] = lambda: torch.matmul(a, b.t())
    times = interleaved(calls, rounds=options.rounds, warm_up=1)
    cublas = times["cublas"].median

    def ratio(name: str) -> float:
        return round(cublas / times[name].median, 4)

    rows: list[dict[str, object]] = [
        {"job": job.name, "config": attrs.asdict(c), "ratio": ratio(str(c))}
        | {what: ratio(f"{what}{c}") for what, _ in variants[1:]}
        for c in configs
    ]
    rows.append({"job": job.name, "config": "heuristic", "ratio": ratio("heuristic")})
    print(f"\n{job.name}: cublas {cublas:.3f} ms, heuristic {ratio('heuristic'):.3f} {_short(heuristic)}")
    best = sorted(zip(configs, rows, strict=False), key=lambda pair: -float(str(pair[1]["ratio"])))
    for config, row in best[: None if options.ablate else 8]:
        shown = "".join(f"{what} {row[what]:.3f}  " for what, _ in variants[1:])
        print(f"   {row['ratio']:.3f}  {shown}{_short(config)}")
    by_shape: dict[str, float] = {}
    for config, row in best:
        shape = f"{config.tile[0]}x{config.tile[1]}{'pp' if config.ping_pong else 'co'}"
        by_shape.setdefault(shape, float(str(row["ratio"])))
    print("   " + "  ".join(f"{s} {r:.3f}" for s, r in by_shape.items()), flush=True)
    return rows


def _short(c: Config) -> str:
    schedule = "pp" if c.ping_pong else "co"
    return (
        f"{c.tile[0]}x{c.tile[1]} {schedule} cluster {c.cluster} stages {c.stages} sub {c.subtile} "
        f"load {c.load_stages} store {c.store_stages} raster {c.raster}"
    )


if __name__ == "__main__":
    main()
