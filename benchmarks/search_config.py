"""Exhaustive search of GEMM configurations on a Hopper GPU, beside what the heuristic chooses.

`python benchmarks/search_config.py [--out DIR] [--only REGEX] [--config REGEX] [--ablate] [--rounds N]`

`--config` limits the candidates to those whose short form (as the table shows it) matches.  `--ablate` times beside
each candidate what its epilogue costs for a reason: `moves` loads and stores the same tiles with next to no maths,
`plain` stores the accumulator alone.

For each workload (those of `codalang.bench.workloads`, at `--widths` and `--tokens`, and some more epilogues) every
candidate configuration that fits in shared memory (`codalang.bench.candidates`) is compiled, in parallel processes and
through the disk cache, then all are timed interleaved with cuBLAS's GEMM alone.  The table shows the best few and the
heuristic's; the JSON has all.  `codalang/lower/plan.py` is written from these results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from fractions import Fraction
from pathlib import Path

import attrs

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

from codalang.bench.candidates import large, short  # noqa: E402
from codalang.bench.timing import Call, interleaved  # noqa: E402
from codalang.bench.tune import problems  # noqa: E402
from codalang.bench.workloads import PATTERNS, WIDTHS, Pattern, Workload, derived, make_operands  # noqa: E402
from codalang.ir.build import EpilogueBuilder  # noqa: E402
from codalang.ir.epilogue import Epilogue  # noqa: E402
from codalang.ir.types import Kind  # noqa: E402
from codalang.lower import ahead, run, split  # noqa: E402
from codalang.lower.spec import Config, KernelSpec  # noqa: E402

# More epilogues, on the gate/up projection and on the gradient of its input.
MORE = [
    pattern
    for name in ("swiglu", "bias_gelu")
    for pattern in (
        Pattern(
            f"{name}_forward",
            f"{name}, forward",
            "epilogue",
            lambda name=name: derived(name).forward,
            lambda w, t: (t, 2 * w.ffn, w.hidden),
        ),
        Pattern(
            f"{name}_derived",
            f"{name}, derived backward",
            "epilogue",
            lambda name=name: derived(name).backward,
            lambda w, t: (t, w.ffn, w.hidden),
            ("k", "mn"),
        ),
    )
]


@attrs.frozen
class Job:
    """A workload, or the same GEMM with another epilogue."""

    workload: Workload
    epilogue: Epilogue
    what: str = ""

    @property
    def name(self) -> str:
        """What `--only` matches."""
        return f"{self.workload.name} {self.what}".rstrip()

    @property
    def spec(self) -> KernelSpec:
        """Its kernel, configuration left open."""
        operands = make_operands(self.workload, "meta")
        with problems() as found, ahead.recorded():
            run.gemm(self.epilogue, operands.a, operands.b, self.given(operands.inputs))
        return found[0].spec

    def given(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What of the workload's inputs the epilogue takes."""
        names = {p.name for p in self.epilogue.params}
        return {name: value for name, value in inputs.items() if name in names}


def jobs(widths: list[str], tokens: list[int]) -> list[Job]:
    """Every workload on a GEMM."""
    patterns = [p for p in (*PATTERNS.values(), *MORE) if p.group != "hosted"]
    chosen = [Workload(p, WIDTHS[width], count) for width in widths for count in tokens for p in patterns]
    return [Job(workload, workload.epilogue) for workload in chosen]


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
    return [Job(job.workload, what(job.epilogue), what.__name__) for what in (moves, plain)]


def candidates(job: Job, wanted: re.Pattern[str] = re.compile("")) -> list[Config]:
    """Every configuration that fits."""
    return [config for config in large(job.spec) if wanted.search(short(config))]


def fitted(spec: KernelSpec, config: Config) -> Config:
    """A configuration of another job of the same GEMM, without the slabs that this one does not need."""
    has_loads = any(p.type.kind is Kind.TILE for p, _ in spec.inputs)
    return attrs.evolve(config, load_stages=config.load_stages * has_loads)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="jobs whose name matches")
    parser.add_argument("--config", type=re.compile, default=re.compile(""))
    parser.add_argument("--widths", nargs="+", choices=list(WIDTHS), default=["8B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192])
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    chosen = [job for job in jobs(options.widths, options.tokens) if options.only.search(job.name)]
    failures = compile_all(chosen, options)
    results = []
    for job in chosen:
        results += search(job, options, failures)
        torch.cuda.empty_cache()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "search.json").write_text(json.dumps(results, indent=1))


def compile_all(chosen: list[Job], options: argparse.Namespace) -> set[KernelSpec]:
    """Compile every candidate, and its ablations; those that fail."""
    specs = []
    for job in chosen:
        configs = candidates(job, options.config)
        for variant in [job, *(ablations(job) if options.ablate else [])]:
            specs += [attrs.evolve(variant.spec, config=fitted(variant.spec, c)) for c in configs]
    outcome = ahead.compile_each(specs)
    errors = {spec: compiled.error for spec, compiled in outcome.items() if compiled.error}
    print(f"{len(outcome)} kernels compiled, {len(errors)} failed: {sorted(set(errors.values()))}", flush=True)
    return set(errors)


def search(job: Job, options: argparse.Namespace, failures: set[KernelSpec]) -> list[dict[str, object]]:
    """Time the candidates of a job; rows for the JSON."""
    operands = make_operands(job.workload, "cuda")
    a, b, spec = operands.a, operands.b, job.spec
    variants = [job, *(ablations(job) if options.ablate else [])]
    configs = [c for c in candidates(job, options.config) if attrs.evolve(spec, config=c) not in failures]

    def call(variant: Job, config: Config) -> Call:
        given, own = variant.given(operands.inputs), fitted(variant.spec, config)
        return lambda: run.gemm(variant.epilogue, a, b, given, config=own)

    heuristic = split.choose(spec, *job.workload.extents)
    calls = {f"{variant.what}{c}": call(variant, c) for variant in variants for c in configs}
    calls["heuristic"] = call(job, heuristic)
    calls["cublas"] = lambda: torch.matmul(a, b.t())
    times = interleaved(calls, rounds=options.rounds, warm_up=1)
    cublas = times["cublas"].median

    def ratio(name: str) -> float:
        return round(cublas / times[name].median, 4)

    rows: list[dict[str, object]] = [
        {"job": job.name, "config": attrs.asdict(c), "short": short(c), "ratio": ratio(str(c))}
        | {variant.what: ratio(f"{variant.what}{c}") for variant in variants[1:]}
        for c in configs
    ]
    rows.sort(key=lambda row: -float(str(row["ratio"])))
    print(f"\n{job.name}: cublas {cublas:.3f} ms, heuristic {ratio('heuristic'):.3f} {short(heuristic)}")
    for row in rows[: None if options.ablate else 8]:
        shown = "".join(f"{variant.what} {row[variant.what]:.3f}  " for variant in variants[1:])
        print(f"   {row['ratio']:.3f}  {shown}{row['short']}")
    by_shape: dict[str, object] = {}
    for row in rows:
        by_shape.setdefault(" ".join(str(row["short"]).split()[:2]), row["ratio"])
    print("   " + "  ".join(f"{s} {r:.3f}" for s, r in by_shape.items()), flush=True)
    own = {"job": job.name, "config": "heuristic", "short": short(heuristic), "ratio": ratio("heuristic")}
    return [*rows, own]


if __name__ == "__main__":
    main()
