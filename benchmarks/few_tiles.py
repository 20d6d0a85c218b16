"""Short batches, small auxiliary kernels, accumulated gradients and folded weights on a Hopper GPU, beside cuBLAS.

`python benchmarks/few_tiles.py [--only short overlap merged gradient folded wave] [--out DIR] [--rounds N] [--near X]`

    short      M from 1 to 256 at the weights of Llama-3-8B: the configurations that `lower.split` considers whose
               estimate is near the best (`--near`: its quotient, default all), its choice, the same loading whole tiles
               of A, and cuBLAS
    overlap    chains of small GEMMs and of GEMMs with hosted kernels, launched from a CUDA graph, with and without
               kernels that start while the one before them ends
    merged     the parts of a reduction merged and a vector expression of it, in one kernel, and by torch and a hosted
               kernel
    gradient   dy.T @ x added to a bf16 and to an f32 gradient in place: every tiling, the heuristic's choice, and
               cuBLAS without and with the addition
    folded     a weight of gate and up concatenated, of heads half-split: forward, dgrad and accumulated gradient, with
               the same configuration as for a weight that is one matrix
    wave       large GEMMs whose last wave is not full: as it is and balanced, in a configuration that is else the same,
               and what the heuristic chooses
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests/gpu")]

import gpu_cases  # noqa: E402
import gpu_compile  # noqa: E402
import test_gpu_balance  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from codalang.autodiff import derive  # noqa: E402
from codalang.bench.timing import interleaved  # noqa: E402
from codalang.lower import balance, plan, run, split  # noqa: E402
from codalang.lower.call import forget  # noqa: E402
from codalang.lower.dtypes import DTYPE_NAMES  # noqa: E402
from codalang.lower.folded import Matrix, box  # noqa: E402
from codalang.lower.spec import Config, Folding, KernelSpec, Operand  # noqa: E402
from codalang.parser import parse  # noqa: E402

SHORT = (1, 16, 64, 128, 256)
# (N, K) of Llama-3-8B's weights
WEIGHTS = {"o": (4096, 4096), "qkv": (6144, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
TOKENS = 8192
PLAIN = parse("epilogue plain(acc: tile[M, N]) { store y: tile[M, N] = acc }").epilogues["plain"]
ACCUMULATE = parse("epilogue accumulate(acc: tile[M, N], c: tile[M, N]) { store c: tile[M, N] = acc + c }").epilogues[
    "accumulate"
]
SCALE = parse("epilogue scale(x: tile[M, N], row: row[N]) { store y: tile[M, N] = x * row }").epilogues["scale"]
INVERSE = parse("epilogue inverse(ss: row[N]) { store r: row[N] = rsqrt(ss / 4096 + 1e-5) }").epilogues["inverse"]
PLAIN_SPEC = KernelSpec(PLAIN, Operand("bf16", "k", "k"), (), ("bf16",), None)

Calls = dict[str, Callable[[], object]]


@attrs.frozen
class Comparison:
    """Calls that are timed together; `estimates` are microseconds that a model says."""

    name: str
    calls: Calls
    estimates: dict[str, float] = attrs.field(factory=dict)

    @property
    def baseline(self) -> str:
        """What others are compared with: cuBLAS, or the first."""
        return "cublas" if "cublas" in self.calls else next(iter(self.calls))


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def _short_form(config: Config) -> str:
    schedule = "pp" if config.ping_pong else "co"
    tile, cluster = ("x".join(map(str, pair)) for pair in (config.tile, config.cluster))
    split_ = f" split {config.split}" if config.split > 1 else ""
    rows = f" of {config.a_rows} rows" if config.a_rows else ""
    slabs = f"{config.load_stages},{config.store_stages}"
    return f"{tile}{rows} {schedule} {cluster} ring {config.stages} slabs {slabs}{split_}"


near = float("inf")  # estimates of candidates over the best that are worth a measurement


def short() -> Iterator[Comparison]:
    """Every candidate for a short batch."""
    for name, (n, k) in WEIGHTS.items():
        b = _normal(n, k)
        for m in SHORT:
            a = _normal(m, k)
            chosen = split.choose(PLAIN_SPEC, m, n, k)
            longest = near * split.cycles(PLAIN_SPEC, chosen, m, n, k)
            others = [
                c for c in split.candidates(PLAIN_SPEC, m, n, k) if split.cycles(PLAIN_SPEC, c, m, n, k) <= longest
            ]
            found = dict.fromkeys([chosen, *others])
            calls: Calls = {
                _short_form(c): lambda a=a, b=b, c=c: run.gemm(PLAIN, a, b, {}, config=c)["y"] for c in found
            }
            calls["chosen"] = lambda a=a, b=b: run.gemm(PLAIN, a, b, {})["y"]
            if chosen.a_rows:
                whole = attrs.evolve(chosen, a_rows=0)
                calls["chosen, whole tiles of A"] = lambda a=a, b=b, c=whole: run.gemm(PLAIN, a, b, {}, config=c)["y"]
            calls["cublas"] = lambda a=a, b=b: torch.matmul(a, b.t())
            estimates = {_short_form(c): split.cycles(PLAIN_SPEC, c, m, n, k) / 1755 for c in found}
            estimates["chosen"] = estimates[_short_form(next(iter(found)))]
            yield Comparison(f"{name}, M={m} N={n} K={k}", calls, estimates)


def overlap() -> Iterator[Comparison]:
    """Chains that begin again with what they made."""
    for m, width in ((16, 2048), (256, 2048), (1024, 2048), (8192, 2048)):
        x, w = _normal(m, width), _normal(width, width) * width**-0.5
        row = _normal(width)

        def gemms(x: Tensor = x, w: Tensor = w) -> Tensor:
            y = x
            for _ in range(8):
                y = run.gemm(PLAIN, y, w, {})["y"]
            return y

        def mixed(x: Tensor = x, w: Tensor = w, row: Tensor = row) -> Tensor:
            y = x
            for _ in range(4):
                y = run.gemm(PLAIN, y, w, {})["y"]
                y = run.hosted(SCALE, {"x": y, "row": row})["y"]
            return y

        for name, chain in (("8 GEMMs", gemms), ("4 GEMMs, 4 hosted", mixed)):
            calls: Calls = {}
            for how in ("apart", "overlapping"):
                run.overlap = how == "overlapping"
                calls[how] = _graph(chain)
            run.overlap = False
            yield Comparison(f"{name}, M={m} N=K={width}", calls)


def _graph(chain: Callable[[], object]) -> Callable[[], object]:
    """Replays what a chain launches.  Where kernels are only recorded, the chain itself."""
    chain()
    if recording:
        return chain
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = chain()

    def replay(kept: object = kept) -> None:
        graph.replay()

    return replay


recording = False


def merged() -> Iterator[Comparison]:
    """`r = rsqrt(ss / D + eps)` of the parts that tiles left of `ss`."""
    for parts, length in ((1, 8192), (16, 8192), (32, 8192), (112, 8192), (64, 4096), (64, 14336)):
        left = _normal(parts, length, dtype=torch.float32).square()
        given = {"ss": "sum"}
        calls: Calls = {
            "torch.sum": lambda left=left: left.sum(0),
            "torch.sum, then torch": lambda left=left: torch.rsqrt(left.sum(0) / 4096 + 1e-5),
            "torch.sum, then hosted": lambda left=left, n=length: run.hosted(
                INVERSE, {"ss": left.sum(0)}, extents=(1, n)
            ),
            "in one kernel": lambda left=left, n=length, given=given: run.vector(INVERSE, {"ss": left}, n, parts=given),
        }
        yield Comparison(f"{parts} parts of {length}", calls)


def gradient() -> Iterator[Comparison]:
    """Every tiling of an accumulation in place."""
    for name, (n, k) in WEIGHTS.items():
        dy, x = _normal(TOKENS, n), _normal(TOKENS, k)
        for dtype in (torch.bfloat16, torch.float32):
            c, kind = torch.zeros(n, k, dtype=dtype, device="cuda"), DTYPE_NAMES[dtype]
            spec = KernelSpec(ACCUMULATE, Operand("bf16", "mn", "mn"), (kind,), (kind,), None)

            def call(config: Config | None, dy: Tensor = dy, x: Tensor = x, c: Tensor = c) -> Callable[[], object]:
                given = {"c": c}
                return lambda: run.gemm(ACCUMULATE, dy.T, x.T, given, dtypes={"c": c.dtype}, out=given, config=config)

            chosen = plan.choose(spec, n, k, TOKENS)
            found = [next(iter(plan._configurations(spec, tiling)), None) for tiling in plan.TILINGS]
            wide = attrs.evolve(chosen, tile=(128, 256), cluster=(2, 1), ping_pong=False)
            found += [
                attrs.evolve(wide, subtile=subtile, load_stages=loads, store_stages=stores, stages=stages)
                for subtile, loads, stores, stages in ((32, 1, 1, 3), (32, 2, 1, 3), (16, 2, 2, 3), (16, 4, 2, 3))
            ]
            calls = {_short_form(o) + f" sub {o.subtile}": call(o) for o in found if o and _fits(spec, o)}
            calls[f"chosen ({_short_form(chosen)})"] = call(None)
            calls["cublas"] = lambda dy=dy, x=x: torch.matmul(dy.T, x)
            if dtype is torch.bfloat16:
                calls["cublas, added"] = lambda dy=dy, x=x, c=c: torch.addmm(c, dy.T, x, out=c)
            else:
                calls["cublas, f32"] = lambda dy=dy, x=x: torch.mm(dy.T, x, out_dtype=torch.float32)
                calls["cublas, f32, then added"] = lambda dy=dy, x=x, c=c: c.add_(
                    torch.mm(dy.T, x, out_dtype=torch.float32)
                )
            yield Comparison(f"{name}, {kind} gradient [{n}, {k}] of {TOKENS} tokens", calls)


def _fits(spec: KernelSpec, config: Config) -> bool:
    return plan.shared_bytes(spec, config) <= plan.SMEM_CAPACITY


def folded() -> Iterator[Comparison]:
    """A weight as a matrix and folded."""
    yield from _folded("gate and up", (2, 14336, 4096), (1, 0, 2))
    yield from _folded("heads", (48, 2, 64, 4096), (0, 2, 1, 3))


def _folded(name: str, extents: tuple[int, ...], order: tuple[int, ...]) -> Iterator[Comparison]:
    w = _normal(*extents).permute(order)
    flat = w.reshape(-1, extents[-1]).contiguous()
    x, dy = _normal(TOKENS, extents[-1]), _normal(TOKENS, len(flat))
    found = box(Matrix(w, w.ndim - 1))
    assert found is not None
    rows = found.folding

    forward = split.choose(
        attrs.evolve(PLAIN_SPEC, operand=Operand("bf16", "k", "k", b_folding=rows)), TOKENS, len(flat), extents[-1]
    )
    calls: Calls = {
        how: lambda b=b: run.gemm(PLAIN, x, b, {}, config=forward) for how, b in (("flat", flat), ("folded", w))
    }
    yield Comparison(f"{name}: forward", calls | {"cublas": lambda: torch.matmul(x, flat.t())})

    operand = Operand("bf16", "k", "mn", b_folding=Folding((), rows.rows))
    backward = split.choose(attrs.evolve(PLAIN_SPEC, operand=operand), TOKENS, extents[-1], len(flat))
    calls = {
        how: lambda b=b: run.gemm(PLAIN, dy, b, {}, config=backward)
        for how, b in (("flat", flat.T), ("folded", Matrix(w, w.ndim - 1).T))
    }
    yield Comparison(f"{name}: dgrad", calls | {"cublas": lambda: torch.matmul(dy, flat)})

    spec = KernelSpec(ACCUMULATE, Operand("bf16", "mn", "mn"), ("bf16",), ("bf16",), None, True, None, (rows,), (rows,))
    gradients = {"flat": torch.zeros_like(flat), "folded": torch.zeros_like(w)}
    assert gradients["folded"].stride() == w.stride()
    wgrad = split.choose(spec, len(flat), extents[-1], TOKENS)
    calls = {
        how: lambda c=c: run.gemm(ACCUMULATE, dy.T, x.T, {"c": c}, out={"c": c}, config=wgrad)
        for how, c in gradients.items()
    }
    yield Comparison(f"{name}: accumulated gradient", calls | {"cublas": lambda: torch.matmul(dy.T, x)})


def wave() -> Iterator[Comparison]:
    """The last wave as it is and balanced."""
    residual = gpu_cases.SOURCES["residual_rms"]
    backward = derive(residual).backward
    for name, epilogue, n, k, major in (
        ("down, residual_rms", residual, 4096, 14336, "k"),
        ("gate and up dgrad, backward of residual_rms", backward, 4096, 28672, "mn"),
        ("gate and up dgrad, plain", PLAIN, 4096, 28672, "mn"),
        ("o, residual_rms", residual, 4096, 4096, "k"),
        ("qkv, plain", PLAIN, 6144, 4096, "k"),
        ("square, plain", PLAIN, 8192, 8192, "k"),
    ):
        a, b = _normal(TOKENS, k), _normal(n, k) if major == "k" else _normal(k, n).T
        inputs = test_gpu_balance.inputs_of(epilogue, TOKENS, n)

        def call(config: Config | None, a: Tensor = a, b: Tensor = b, inputs=inputs, e=epilogue):  # noqa: ANN001, ANN202
            return lambda: run.gemm(e, a, b, inputs, config=config)

        balanced = test_gpu_balance.config_of(epilogue, 0, major)
        whole = attrs.evolve(balanced, balanced=False)
        calls = {f"{_short_form(c)}{' balanced' * c.balanced}": call(c) for c in (whole, balanced)}
        calls["chosen"] = call(None)
        saved = balance.saved(balanced, TOKENS, n, k) / 1755
        calls["cublas"] = lambda a=a, b=b: torch.matmul(a, b.t())
        yield Comparison(f"{name}, M={TOKENS} N={n} K={k}, estimated to save {saved:.1f} us", calls)


GROUPS: dict[str, Callable[[], Iterator[Comparison]]] = {
    "short": short,
    "overlap": overlap,
    "merged": merged,
    "gradient": gradient,
    "folded": folded,
    "wave": wave,
}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--near", type=float, default=near)
    options = parser.parse_args()
    globals().update(near=options.near, recording=True)
    with gpu_compile.recorded() as specs:
        for group in options.only:
            for comparison in GROUPS[group]():
                for call in comparison.calls.values():
                    call()
        torch.cuda.synchronize()
    forget()
    globals().update(recording=False)
    outcome = gpu_compile.compile_each(specs)  # errors are told, not raised: the others are of use
    failures = [f"{spec.config}: {compiled.error}"[:300] for spec, compiled in outcome.items() if compiled.error]
    print(f"{len(specs)} kernels compiled, {len(failures)} failed: {failures}", flush=True)
    results = []
    for group in options.only:
        for comparison in GROUPS[group]():
            times = {name: t.median * 1e3 for name, t in interleaved(comparison.calls, rounds=options.rounds).items()}
            results.append({"group": group, "name": comparison.name, "microseconds": times})
            baseline = comparison.baseline
            print(f"\n{group}: {comparison.name}")
            named = [name for name in times if name.startswith(("cublas", "chosen", "flat", "folded"))]
            best = [name for name in sorted(times, key=times.__getitem__) if name not in named]
            for name in (*named, *(best[:4] if group == "short" else best)):
                estimate = comparison.estimates.get(name)
                told = "" if estimate is None else f"  estimated {estimate:8.1f}"
                print(
                    f"  {times[name]:8.1f} us  {times[baseline] / times[name]:6.3f} of {baseline}{told}  {name}",
                    flush=True,
                )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "few_tiles.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
