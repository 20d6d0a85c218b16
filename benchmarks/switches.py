"""What single choices of a GEMM kernel give on a Hopper GPU: `python benchmarks/switches.py [--only REGEX]`

Beside what the heuristic chooses, kernels that differ from it in one respect: tile inputs brought into L2 before the
mainloop, tiles that leave L2 before others, the order of tiles, deeper rings of slabs, other tiles; and the same GEMM
with less of its epilogue.  All are checked against the first, then timed interleaved with cuBLAS's GEMM alone.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import attrs

sys.path.insert(0, str(Path(__file__).parent))

import search_config  # noqa: E402
import torch  # noqa: E402

from codalang.bench.candidates import short  # noqa: E402
from codalang.bench.timing import interleaved  # noqa: E402
from codalang.bench.workloads import PATTERNS, WIDTHS, Pattern, Workload, derived  # noqa: E402
from codalang.ir.build import EpilogueBuilder  # noqa: E402
from codalang.ir.epilogue import Epilogue  # noqa: E402
from codalang.ir.types import Kind  # noqa: E402
from codalang.lower import ahead, plan, run, split  # noqa: E402
from codalang.lower.spec import Config, KernelSpec  # noqa: E402

Change = dict[str, object]
L2: dict[str, Change] = {
    "prefetch": {"prefetch": True},
    "inputs leave first": {"streams": "inputs"},
    "all leave first": {"streams": "all"},
    "prefetch, all leave first": {"prefetch": True, "streams": "all"},
}
ORDER: dict[str, Change] = {"bands of 4": {"raster": 4}, "bands of 16": {"raster": 16}}
PING_PONG: dict[str, Change] = {"tile": (64, 256), "cluster": (2, 1), "ping_pong": True, "store_stages": 1}
DEEP: dict[str, Change] = {
    "all loads ahead": {"subtile": 16, "load_stages": 16, "store_stages": 1},
    "half of the stores": {"load_stages": 1, "store_stages": 4},
    "half of the stores, prefetch": {"load_stages": 1, "store_stages": 4, "prefetch": True},
    "64x256 pp": PING_PONG,
    "64x256 pp, prefetch": {**PING_PONG, "prefetch": True},
    "256x128": {"tile": (256, 128), "cluster": (1, 2)},
    "256x128, prefetch": {"tile": (256, 128), "cluster": (1, 2), "prefetch": True},
}
PANELS: dict[str, Change] = {
    "panels of 32 bytes": {"panel": 32},
    "the same, prefetch": {"panel": 32, "prefetch": True},
}
SWIGLU = Pattern(
    "swiglu_without_y",
    "SwiGLU backward + row statistic (derived)",
    "epilogue",
    lambda: derived("scaled_swiglu").backward,
    lambda w, t: (t, w.ffn, w.hidden),
    ("k", "mn"),
)
TRIED: dict[str, tuple[Pattern, dict[str, Change]]] = {
    "residual_rms": (PATTERNS["residual_rms"], {**L2, **ORDER, **DEEP}),
    "norm_backward": (PATTERNS["norm_backward"], {**L2, **DEEP}),
    "swiglu": (PATTERNS["swiglu"], {"all leave first": L2["all leave first"], **ORDER}),
    "swiglu_backward": (PATTERNS["swiglu_backward"], {**L2, **ORDER, **PANELS}),
    "swiglu_without_y": (SWIGLU, PANELS),
    "gemm_down_tn": (
        PATTERNS["gemm_down_tn"],
        {**ORDER, "all leave first": L2["all leave first"], "64x256 pp": PING_PONG},
    ),
}


def stores(epilogue: Epilogue) -> Epilogue:
    """The accumulator, stored as often as an epilogue stores tiles of its width; nothing loaded."""
    builder = EpilogueBuilder(f"{epilogue.name}_stores", ("M", "N"))
    accumulator = epilogue.params[0]
    value = builder.param(accumulator.name, accumulator.type)
    for store in epilogue.stores:
        if store.type.kind is Kind.TILE and store.type.width == accumulator.type.width:
            builder.store(store.name, value, accumulator.type)
    return builder.finish()


# What is left out, for the chosen configuration alone.
LESS: tuple[Callable[[Epilogue], Epilogue], ...] = (search_config.moves, stores, search_config.plain)


def changed(spec: KernelSpec, config: Config, change: Change) -> Config | None:
    """A configuration with a change, and as many stages of the ring as then fit; None where there are too few."""
    config = attrs.evolve(config, **change)
    if not any(p.type.kind is Kind.TILE for p, _ in spec.inputs):
        config = attrs.evolve(config, load_stages=0, prefetch=False)
    left = plan.SMEM_CAPACITY - plan.shared_bytes(spec, attrs.evolve(config, stages=0))
    stages = min(plan.MAX_STAGES, left // plan.ring_stage_bytes(config.tile))
    return attrs.evolve(config, stages=stages) if stages >= 3 else None


def variants(name: str) -> dict[str, tuple[search_config.Job, Config]]:
    """Everything to time for a workload; the first is what the heuristic chooses."""
    pattern, changes = TRIED[name]
    workload = Workload(pattern, WIDTHS["8B"], 8192)
    job = search_config.Job(workload, workload.epilogue)
    spec, chosen = job.spec, split.choose(job.spec, *workload.extents)
    found = {"chosen": (job, chosen)}
    for words, change in changes.items():
        config = changed(spec, chosen, change)
        if config:
            found[words] = (job, config)
    for less in LESS if pattern.group == "epilogue" else ():
        epilogue = less(job.epilogue)
        if epilogue.stores:
            smaller = search_config.Job(workload, epilogue, less.__name__)
            found[less.__name__] = (smaller, search_config.fitted(smaller.spec, chosen))
    return found


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=re.compile, default=re.compile(""))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--compile-only", action="store_true", help="no GPU: compile, and print what is remarked")
    options = parser.parse_args()
    chosen = {name: variants(name) for name in TRIED if options.only.search(name)}
    specs = [attrs.evolve(j.spec, config=c) for found in chosen.values() for j, c in found.values()]
    outcome = ahead.compile_each(specs)
    for spec, result in outcome.items():
        if result.error or result.remarks:
            print(spec.epilogue.name, spec.config and short(spec.config), result.error, *result.remarks)
    print(f"{len(outcome)} kernels compiled", flush=True)
    if options.compile_only:
        return
    for name, found in chosen.items():
        failed = {words for words, (j, c) in found.items() if outcome[attrs.evolve(j.spec, config=c)].error}
        measure(name, {words: v for words, v in found.items() if words not in failed}, options.rounds)
        torch.cuda.empty_cache()


def measure(name: str, found: dict[str, tuple[search_config.Job, Config]], rounds: int) -> None:
    """Check and time a workload's variants, and print them."""
    workload = found["chosen"][0].workload
    operands = search_config.make_operands(workload, "cuda")
    a, b = operands.a, operands.b

    def call(job: search_config.Job, config: Config) -> Callable[[], dict[str, torch.Tensor]]:
        given = job.given(operands.inputs)
        return lambda: run.gemm(job.epilogue, a, b, given, config=config)

    calls = {words: call(*variant) for words, variant in found.items()}
    expected = calls["chosen"]()
    wrong = [words for words, c in calls.items() if found[words][0].what == "" and not _equal(c(), expected)]
    times = interleaved({**calls, "cublas": lambda: torch.matmul(a, b.t())}, rounds=rounds, warm_up=1)
    cublas = times["cublas"]
    print(f"\n{name}: cublas {cublas.median:.3f} ms ({cublas.low:.3f} .. {cublas.high:.3f})")
    for words, (_, config) in found.items():
        note = "  WRONG" if words in wrong else ""
        print(f"   {cublas.median / times[words].median:.4f}  {words:30} {short(config)}{note}", flush=True)


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Equal but for the order of f32 sums."""
    return all(torch.allclose(v.float(), expected[k].float(), rtol=1e-2, atol=1e-2) for k, v in found.items())


if __name__ == "__main__":
    main()
