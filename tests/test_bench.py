"""`codalang bench`: every way of a workload computes the same; results and tables, with times that are made up."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import types
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs
import pytest
import torch
from emulation import emulated

from codalang.bench import first_call, host, implementations, measure, plot, report, rivals, timing, workloads
from codalang.bench.implementations import Skipped
from codalang.bench.report import Report, Result
from codalang.bench.timing import Call, Timing
from codalang.bench.workloads import PATTERNS, Width, Workload, make_operands
from codalang.cli import main

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import block as block_script  # noqa: E402

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


# ---- other libraries, by modules that do what theirs say they do -----------------------------------------------------


def swiglu(pre: torch.Tensor) -> torch.Tensor:
    gate, up = pre[..., 0::2].float(), pre[..., 1::2].float()
    return (torch.nn.functional.silu(gate) * up).to(pre.dtype)


def fake_liger() -> types.SimpleNamespace:
    def fused_add_rms_norm(x, residual, weight, eps):
        total = x + residual
        return total * torch.rsqrt(total.float().square().mean(-1, keepdim=True) + eps).to(x.dtype) * weight, total

    def rope(q, k, cos, sin):
        def turned(heads):
            first, second = heads.chunk(2, -1)
            return heads * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

        return turned(q), turned(k)

    def cross_entropy(a, b, target, reduction):
        return torch.nn.functional.cross_entropy((a @ b.t()).float(), target, reduction=reduction)

    return types.SimpleNamespace(
        liger_fused_add_rms_norm=fused_add_rms_norm,
        liger_swiglu=lambda gate, up: torch.nn.functional.silu(gate) * up,
        liger_rope=rope,
        liger_fused_linear_cross_entropy=cross_entropy,
    )


def fake_quack() -> types.SimpleNamespace:
    return types.SimpleNamespace(gemm=lambda A, B, tuned: A @ B)


def fake_quack_epilogues() -> types.SimpleNamespace:
    def rms_partial(A, B, C, *, store_d, weight):
        x = (A @ B).float() + C.float()
        return {"D": (x * weight).to(A.dtype), "resid_out": x.to(A.dtype), "sqsum": x.square().sum(-1)}

    def rstd_swiglu(A, B, C, *, store_d, rstd):
        acc = (A @ B).float()
        return {"D": acc.to(A.dtype), "postact": swiglu((acc * rstd[:, None]).to(A.dtype))}

    def rope(A, B, C, *, store_d, table):
        (first, second), (cos, sin) = (t.float().unflatten(-1, (-1, 2)).unbind(-1) for t in (A @ B, table))
        turned = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
        return {"D": turned.flatten(-2).to(A.dtype)}

    def lse_target(A, B, C, *, store_d, target):
        assert not store_d
        logits = (A @ B).float()
        return {"lse": torch.logsumexp(logits, -1), "target_logit": logits.gather(-1, target[:, None])[:, 0]}

    def rms_backward(A, B, C, *, store_d, y, w, corr):
        acc = (A @ B).float()
        return {"D": (acc * w + C + y * corr[:, None]).to(A.dtype), "dw": (acc * y).sum(0)}

    def dswiglu(A, B, C, *, store_d, rstd):
        with torch.enable_grad():
            leaf, r = C.float().requires_grad_(), rstd.clone().requires_grad_()
            y = swiglu(leaf * r[:, None])
            d_pre, d_r = torch.autograd.grad(y, (leaf, r), (A @ B).float())
        return {"D": d_pre.to(A.dtype), "postact": y.detach().to(A.dtype), "dsum": d_r}

    return types.SimpleNamespace(
        rms_partial_epi=rms_partial,
        rstd_swiglu_preact_epi=rstd_swiglu,
        rope_epi=rope,
        lse_target_epi=lse_target,
        rms_bwd_apply_epi=rms_backward,
        dswiglu_rstd_preact_mod=dswiglu,
    )


def fake_coda() -> types.SimpleNamespace:
    def residual_rms(A, B, C, W, eps):
        x = A @ B + C
        return x, x * W, torch.rsqrt(x.float().square().mean(-1) + eps)

    def rmsnorm_swiglu(A, B, rstd):
        pre = ((A @ B).float() * rstd[:, None]).to(A.dtype)
        return pre, swiglu(pre)

    def rmsnorm_rope(A, B, rstd, positions, frequencies):
        assert (positions.dtype, frequencies.shape) == (torch.int32, (B.shape[1],))
        z = (A @ B).float() * rstd[:, None]
        turns = frequencies.double().view(-1, 2).sum(-1)  # of a position, in two parts
        angle = 2 * math.pi * positions[:, None] * turns
        first, second = z[:, 0::2], z[:, 1::2]
        turned = first * angle.cos() + second * angle.sin(), second * angle.cos() - first * angle.sin()
        return torch.stack(turned, -1).flatten(-2).to(A.dtype)

    def lse_select_logits(A, B, target, ignore_index, return_lse):
        logits = (A @ B).float()
        lse, logit = torch.logsumexp(logits, -1), logits.gather(-1, target.long()[:, None])[:, 0]
        return lse - logit, lse, logit.to(A.dtype)

    def rms_backward(A, B, W, pre, ZdZ, rstd, dX):
        assert (B.shape[0], ZdZ.shape, rstd.dtype) == (W.shape[0], (A.shape[0],), torch.float32)
        d_h, normalized = (A @ B.t()).float(), pre.float() * rstd[:, None]
        dX.add_(((d_h * W - normalized * ZdZ[:, None]) * rstd[:, None]).to(A.dtype))
        return dX, (d_h * normalized).sum(0), (normalized * W).to(A.dtype)

    def swiglu_backward(A, B, Z):
        assert Z.shape == (A.shape[0], 2 * B.shape[0])
        with torch.enable_grad():
            leaf = Z.float().requires_grad_()
            (d_z,) = torch.autograd.grad(swiglu(leaf), leaf, (A @ B.t()).float())
        return d_z.to(A.dtype), (d_z * Z).sum(-1), swiglu(Z)

    return types.SimpleNamespace(
        gemm=lambda A, B: A @ B,
        gemm_residual_partial_rmsnorm=residual_rms,
        gemm_rmsnorm_swiglu=rmsnorm_swiglu,
        gemm_rmsnorm_rope=rmsnorm_rope,
        gemm_lse_select_logits=lse_select_logits,
        gemm_residual_partial_rmsnorm_bwd=rms_backward,
        gemm_swiglu_bwd_zdz=swiglu_backward,
    )


LIBRARIES = {
    "liger": ("liger_kernel.transformers.functional", fake_liger),
    "quack": ("quack.gemm_interface", fake_quack),
    "coda": ("coda.core.gemm.functional", fake_coda),
}
# What each returns that can be compared, and so is.
COMPARED = {
    ("liger", "residual_rms"): {"x"},
    ("liger", "swiglu"): {"y"},
    ("liger", "rope"): {"y"},
    ("liger", "logsumexp"): {"loss"},
    ("quack", "gemm_down_nt"): {"y"},
    ("quack", "residual_rms"): {"x", "h", "ss"},
    ("quack", "swiglu"): {"y", "saved_acc"},
    ("quack", "rope"): {"y"},
    ("quack", "logsumexp"): {"lse", "logit"},
    ("quack", "norm_backward"): {"d_acc", "d_gamma"},
    ("quack", "swiglu_backward"): {"d_acc", "d_r", "y"},
    ("coda", "gemm_down_nt"): {"y"},
    ("coda", "residual_rms"): {"x", "ss"},
    ("coda", "swiglu"): {"y"},
    ("coda", "rope"): {"y"},
    ("coda", "logsumexp"): {"loss", "lse", "logit"},
    ("coda", "norm_backward"): {"d_acc", "d_gamma"},
    ("coda", "swiglu_backward"): {"d_acc", "d_r", "y"},
}


MODULES = {**LIBRARIES, "quack's epilogues": ("quack.epilogue.library", fake_quack_epilogues)}


def install(monkeypatch: pytest.MonkeyPatch, *modules: tuple[str, Callable[[], types.SimpleNamespace]]) -> None:
    for name, make in modules:
        for parent in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        module = types.ModuleType(name)
        vars(module).update(vars(make()))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(("library", "name"), COMPARED)
def test_other_libraries_are_called_as_they_say(library: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *MODULES.values())
    workload = tiny(name)
    operands = make_operands(workload, "cpu")
    errors = errors_of(implementations.implementations()[library](workload, operands), workload, operands)
    assert set(errors) == COMPARED[library, name]
    assert all(e < 2 * BF16_ROUNDING for e in errors.values()), errors


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_that_is_not_there_or_differs_is_skipped_with_a_word(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = tiny("gemm_down_tn" if library == "quack" else "residual_rms")
    make, operands = implementations.implementations()[library], make_operands(workload, "cpu")
    monkeypatch.setitem(sys.modules, LIBRARIES[library][0], None)
    with pytest.raises(Skipped, match="cannot be imported"):
        make(workload, operands)
    monkeypatch.setitem(sys.modules, LIBRARIES[library][0], types.ModuleType("empty"))
    monkeypatch.setitem(sys.modules, LIBRARIES[library][0].split(".")[0], types.ModuleType("empty"))
    for parent in itertools.accumulate(LIBRARIES[library][0].split(".")[:-1], "{}.{}".format):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    with pytest.raises(Skipped, match="this version of .* differs"):
        make(workload, operands)
    with pytest.raises(Skipped, match="has no function for it"):
        make(tiny("hosted_rope"), make_operands(tiny("hosted_rope"), "cpu"))


class FakeTuner:
    """QuACK's, as far as a limit of time matters: compiles in a pool, times what is ready, takes the best."""

    clock = 0.0
    slow = 10.0

    def __init__(self, fn: Callable[..., object], configs: list[types.SimpleNamespace]) -> None:
        self.fn, self.configs, self.timed = fn, configs, []

    def prune_configs(self, kwargs: dict[str, object]) -> list[types.SimpleNamespace]:
        return self.configs

    def _bench(self, *args: object, config: types.SimpleNamespace, **kwargs: object) -> list[float]:
        FakeTuner.clock += self.slow
        self.timed.append(config.name)
        self.fn(config)
        return [config.speed] * 3

    def __call__(self, *args: object, **kwargs: object) -> str:
        queue, timings, pool = self.prune_configs(kwargs), {}, FakePool()
        while queue:
            config = queue.pop(0)
            if pool.poll(config.name)[0] == "pending":
                queue.append(config)
                FakeTuner.clock += 1.0
            else:
                timings[config.name] = self._bench(*args, config=config, **kwargs)
        return min(timings, key=timings.get)


class FakePool:
    def poll(self, key: str) -> tuple[str, str | None]:
        return ("pending" if key.startswith("never") else "done"), None


def configs(*names: str) -> list[types.SimpleNamespace]:
    speeds = {"fast": 1.0, "fails": math.inf}
    return [types.SimpleNamespace(name=n, speed=speeds.get(n, 2.0), kwargs={"config": n}) for n in names]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeTuner]]:
    tuner, pool = type("Tuner", (FakeTuner,), {}), type("Pool", (FakePool,), {})
    monkeypatch.setitem(globals(), "FakePool", pool)
    parts = {
        "autotuner": {"Autotuner": tuner, "_bench_cuda_graph_l2_rotate": dict},
        "gemm_interface": {"default_config": lambda device: "default"},
        "cache.async_compile": {"CompilePool": pool},
    }
    install(
        monkeypatch,
        *((f"quack.{name}", lambda part=part: types.SimpleNamespace(**part)) for name, part in parts.items()),
    )
    monkeypatch.setattr(FakeTuner, "clock", 0.0)
    rivals.hurry.cache_clear()
    rivals.hurry(25.0, lambda: FakeTuner.clock)
    yield tuner
    rivals.hurry.cache_clear()


def test_tuning_begins_with_the_default_and_ends_in_time(hurried: type[FakeTuner]) -> None:
    tuner = hurried(lambda config: None, configs("never compiled", "fast", "a", "default", "late"))
    assert tuner() == "fast"
    assert tuner.timed == ["default", "fast", "a"]  # 10 s each, of 25; the pool's last is not waited for


def test_tuning_goes_on_until_something_ran(hurried: type[FakeTuner]) -> None:
    tuner = hurried(lambda config: None, configs("fails", "fails", "fails", "fails", "b", "late"))
    assert tuner() == "b"
    assert tuner.timed == ["fails"] * 4 + ["b"]


def test_tuners_within_a_tuner_share_its_time(hurried: type[FakeTuner]) -> None:
    inner = hurried(lambda config: None, configs("a", "fast", "b", "c"))
    outer = hurried(lambda config: inner(), configs("quack", "cublas"))
    assert outer() == "quack"
    assert inner.timed == ["a", "fast"]
    assert outer.timed == ["quack"]
    FakeTuner.clock = 1000.0
    assert hurried(lambda config: None, configs("a", "b", "fast"))() == "fast"  # the next has its own


# ---- a run -----------------------------------------------------------------------------------------------------------

SPEEDS = {"codalang": 1.0, "cublas": 0.98, "copy": 0.9, "eager": 3.0, "compile": 2.0}


def made_up(calls: Mapping[str, Call]) -> dict[str, Timing]:
    for call in calls.values():
        call()
    return {name: Timing(SPEEDS[name], 0.9 * SPEEDS[name], 1.1 * SPEEDS[name]) for name in calls}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(workloads.WIDTHS, "tiny", TINY)


def all_reports(choice: measure.Choice, how: measure.Run | None = None, **options: object) -> list[Report]:
    said: list[str] = []
    with emulated():
        return list(
            measure.reports(
                choice,
                how or measure.Run(),
                command="codalang bench --only tests",
                say=said.append,
                timer=made_up,
                device="cpu",
                compile_kernels=False,
                **options,
            )
        )


def tiny_choice(only: str = "", **fields: object) -> measure.Choice:
    return measure.Choice(**{"only": only, "widths": ("tiny",), "tokens": (40, 24), "ways": ("eager",), **fields})


def test_a_run_gives_a_report_per_workload_and_the_last_has_all(sizes: None) -> None:
    found = all_reports(tiny_choice("residual_rms|gemm_down|hosted_rope"))
    assert [len(r.results) for r in found] == list(range(1, 11))
    last = found[-1]
    assert [r.name for r in last.results][:2] == ["residual_rms tiny 40", "gemm_down_tn tiny 40"]
    first = last.results[0]
    assert first.extents == (40, 64, 96)
    assert first.flops == 2 * 40 * 64 * 96
    assert first.bytes == 2 * (40 * 96 + 64 * 96 + 3 * 40 * 64)
    assert set(first.times) == {"codalang", "cublas", "eager"}
    assert first.ratio("codalang") == pytest.approx(0.98)
    assert set(first.errors["codalang"]) == {"x", "h", "ss"}
    assert first.wrong == []
    hosted = next(r for r in last.results if r.group == "hosted")
    assert (hosted.baseline, set(hosted.times)) == ("copy", {"codalang", "copy", "eager"})
    assert hosted.bytes == 2 * 2 * 40 * TINY.qkv


def test_filters(sizes: None) -> None:
    names = [w.name for w in measure.workloads(tiny_choice("swiglu .* 24", groups=("epilogue",)))]
    assert names == ["swiglu tiny 24"]
    every = measure.workloads(measure.Choice())
    assert every[0].name == "residual_rms 8B 8192"  # what matters most comes first
    assert len(every) == 9 * len(PATTERNS)


def test_a_budget_of_time_is_kept_and_what_is_left_is_named(sizes: None) -> None:
    ticks = itertools.count(0, 10.0)  # each look at the clock, ten seconds have passed
    found = all_reports(tiny_choice("gemm_qkv"), measure.Run(minutes=1.5), clock=lambda: next(ticks))
    last = found[-1]
    done = [r.name for r in last.results]
    assert 0 < len(done) < 6
    assert [*done, *last.unreached] == [w.name for w in measure.workloads(tiny_choice("gemm_qkv"))]
    assert "no time was left for: " in report.text(last)


def test_a_way_that_fails_or_is_wrong_is_told_and_the_others_are_measured(
    sizes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = implementations.implementations()

    def fails(workload: Workload, operands: workloads.Operands) -> implementations.Way:
        raise torch.OutOfMemoryError("no memory for it\nand a long story")

    def wrong(workload: Workload, operands: workloads.Operands) -> implementations.Way:
        way = real["eager"](workload, operands)
        return attrs.evolve(way, restore=lambda r: {**way.restore(r), "ss": r["ss"] * 1.1}, note="by other means")

    monkeypatch.setattr(implementations, "implementations", lambda: {**real, "eager": wrong, "compile": fails})
    (found,) = all_reports(tiny_choice("residual_rms", tokens=(40,), ways=("eager", "compile")))
    (result,) = found.results
    assert result.skipped == {"compile": "OutOfMemoryError: no memory for it"}
    assert result.wrong == ["eager"]
    assert result.errors["eager"]["ss"] == pytest.approx(0.1, rel=0.1)
    assert "eager IS WRONG" in measure.line(result)
    shown = report.text(found)
    assert "0.327!*" in shown
    assert "! residual_rms tiny 40: the results of eager are not the reference's" in shown
    assert "* eager, residual + partial RMS + weight: by other means" in shown
    assert "skipped: compile (residual_rms tiny 40): OutOfMemoryError: no memory for it" in shown


def test_our_own_failure_does_not_end_a_run(sizes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = implementations.implementations()

    def fails(workload: Workload, operands: workloads.Operands) -> implementations.Way:
        raise RuntimeError("the device compiler failed")

    monkeypatch.setattr(implementations, "implementations", lambda: {**real, "codalang": fails})
    (found,) = all_reports(tiny_choice("residual_rms", tokens=(40,)))
    assert "codalang FAILED: RuntimeError: the device compiler failed" in measure.line(found.results[0])
    assert "skipped: codalang" in report.text(found)
    ElementTree.fromstring(plot.bars(found))
    ElementTree.fromstring(plot.roofline(found))


def test_nan_is_wrong() -> None:
    assert attrs.evolve(example().results[0], errors={"eager": {"y": math.nan}}).wrong == ["eager"]


# ---- reports ---------------------------------------------------------------------------------------------------------


def example() -> Report:
    def result(pattern: str, group: str, baseline: str, tokens: int, **times: float) -> Result:
        flops = 0 if group == "hosted" else 2 * tokens * 4096 * 4096
        return Result(
            pattern,
            pattern.replace("_", " "),
            group,
            "8B",
            tokens,
            (tokens, 4096, 0 if group == "hosted" else 4096),
            flops,
            200_000_000,
            baseline,
            {name: Timing(t, t, t) for name, t in times.items()},
        )

    return Report(
        "codalang bench",
        {"device": "GPU of tests"},
        (
            result("swiglu", "epilogue", "cublas", 8192, codalang=1.0, cublas=0.9, eager=4.0, compile=1.5),
            result("rope", "epilogue", "cublas", 8192, codalang=1.0, cublas=1.0, eager=2.0),
            result("swiglu", "epilogue", "cublas", 4096, codalang=0.5, cublas=0.5, compile=0.75),
            result("gemm_qkv_tn", "gemm", "cublas", 8192, codalang=1.0, cublas=1.01),
            result("hosted_rope", "hosted", "copy", 8192, codalang=0.05, copy=0.048),
        ),
        {"torch.mul": 7.25, "lower.run.gemm": 21.0},
        ({"epilogue": "swiglu", "cache": "cold", "ours": 5.125, "torch": 3.0},),
        ("rope 8B 4096",),
        12.5,
    )


def test_json_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "bench.json"
    report.write(example(), path)
    assert report.from_json(path.read_text()) == example()
    assert [p.name for p in path.parent.iterdir()] == ["bench.json"]
    with pytest.raises(ValueError, match="not a report"):
        report.from_json('{"version": 0}')


def test_tables() -> None:
    shown = [table.text() for table in report.tables(example())]
    assert shown[0].splitlines() == [
        "GEMM + epilogue, 8B, 8192 tokens: cublas's time over each, higher is better",
        "work             M x N x K  cublas ms  codalang  eager  compile  TFLOP/s",
        "swiglu  8192 x 4096 x 4096      0.900     0.900  0.225    0.600      275",
        "rope    8192 x 4096 x 4096      1.000     1.000  0.500        -      275",
    ]
    assert [table.title.split(":")[0] for table in report.tables(example())] == [
        "GEMM + epilogue, 8B, 8192 tokens",
        "GEMM + epilogue, 8B, 4096 tokens",
        "Plain GEMM, 8B, 8192 tokens",
        "Epilogue on plain tensors, 8B, 8192 tokens",
        "Geometric means over what was measured",
        "The host's time per call, tiny tensors",
        "First calls of a process, seconds",
    ]
    assert "hosted rope  8192 x 4096    0.048     0.960  4.00" in shown[3]
    means = shown[4].splitlines()
    assert means[2].split()[-2:] == [f"{0.9 ** (1 / 3):.3f}", "3"]
    assert "GEMM + epilogue: times as fast as compile" in means[4]
    assert means[4].split()[-2:] == ["1.500", "2"]
    assert "5.12" in shown[6]


def test_markdown() -> None:
    lines = report.tables(example())[0].markdown().splitlines()
    assert lines[2].startswith("| work | M x N x K | cublas ms | codalang |")
    assert lines[3] == "|---|---|---|---|---|---|---|"
    assert lines[4] == "| swiglu | 8192 x 4096 x 4096 | 0.900 | 0.900 | 0.225 | 0.600 | 275 |"


def test_several_runs_as_one() -> None:
    again = attrs.evolve(example().results[0], times={"codalang": Timing(0.8, 0.8, 0.8), "cublas": Timing(0.9, 1, 1)})
    more = attrs.evolve(again, tokens=16384)
    later = Report("codalang bench --tokens 16384", {"device": "GPU of tests"}, (again, more), seconds=1.0)
    both = report.merged([example(), later])
    assert both.command == "codalang bench\ncodalang bench --tokens 16384"
    assert [r.name for r in both.results] == [*(r.name for r in example().results), "swiglu 8B 16384"]
    assert both.results[0] == again
    assert (both.host, both.first_calls, both.seconds) == (example().host, example().first_calls, 13.5)
    with pytest.raises(ValueError, match="different machines"):
        report.merged([example(), attrs.evolve(later, machine={"device": "another"})])


def test_a_report_of_nothing() -> None:
    empty = Report("codalang bench", {})
    assert report.tables(empty) == []
    assert report.text(empty).strip() == "0 s"
    assert report.geometric_mean([]) is None
    ElementTree.fromstring(plot.bars(empty))
    ElementTree.fromstring(plot.roofline(empty))


# ---- plots -----------------------------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def drawn(svg: str, tag: str) -> dict[str, ElementTree.Element]:
    """Shapes by their titles."""
    found = ElementTree.fromstring(svg).iter(SVG + tag)
    return {shape.findtext(SVG + "title"): shape for shape in found if shape.findtext(SVG + "title")}


def test_bars_are_as_long_as_the_times() -> None:
    shapes = drawn(plot.bars(example()), "rect")
    ours, eager = (
        float(shapes[t].get("width")) for t in ("swiglu, 8B, 8192: codalang 1.111", "rope, 8B, 8192: eager 2.000")
    )
    assert ours / eager == pytest.approx(1.111 / 2, rel=1e-2)
    assert not any("hosted" in title for title in shapes)
    cut = shapes["swiglu, 8B, 8192: eager 4.444"]
    assert float(cut.get("width")) == pytest.approx(plot.PLOT)


def test_the_roofline_has_a_point_per_gemm_under_its_roof() -> None:
    svg = plot.roofline(example())
    points = drawn(svg, "circle")
    assert len(points) == 4
    peak = 2 * 8192 * 4096 * 4096 / 0.9 / 1e9
    texts = [text.text for text in ElementTree.fromstring(svg).iter(SVG + "text")]
    assert f"{peak:.0f} TFLOP/s, cuBLAS" in texts
    assert f"{0.2 / 0.048:.2f} TB/s, a copy" in texts
    roof = next(
        line
        for line in ElementTree.fromstring(svg).iter(SVG + "line")
        if line.get("y1") == line.get("y2") and float(line.get("y1")) < plot.HIGH / 2
    )
    assert all(float(p.get("cy")) > float(roof.get("y1")) for p in points.values())


# ---- the command -----------------------------------------------------------------------------------------------------

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@NO_GPU
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert "times kernels on a Hopper GPU" in shown["errors"][0]["message"]
    assert shown["errors"][0]["hint"] == "`codalang bench --compile-only` compiles them without one"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "("],
        ["--tokens", "0"],
        ["--rounds", "1"],
        ["--minutes", "0"],
        ["--minutes", "nan"],
        ["--widths", "3B"],
        ["--section", "all"],
        ["--ways", "numpy"],
    ],
)
def test_wrong_arguments(arguments: list[str]) -> None:
    assert main(["bench", *arguments]) == 2


def test_the_command_offers_what_there_is() -> None:
    """Its choices are written out, so that `--help` imports no torch."""
    from codalang.cli import bench

    assert bench._WIDTHS == tuple(workloads.WIDTHS)
    assert bench._TOKENS == workloads.TOKENS
    assert bench._GROUPS == tuple(workloads.GROUPS) == tuple(report.TITLES)
    assert {*bench._WAYS, *implementations.ALWAYS} == set(implementations.implementations())
    assert set(measure.Choice().ways) == {*bench._WAYS} - {"max-autotune"}


def test_a_filter_that_matches_nothing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--only", "attention"]) == 1
    shown = capsys.readouterr().err
    assert "no workload matches `attention`" in shown and "swiglu_backward, gemm_qkv_tn" in shown


def test_the_command_line_of_a_report_says_no_folder() -> None:
    from codalang.cli.bench import command_line

    assert command_line(["bench", "--out", "/home/me", "--only", "a b"]) == "codalang bench --out DIR --only 'a b'"


def test_the_command_end_to_end(
    sizes: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the GPU: times are made up, kernels stand-ins on the CPU."""
    from codalang.cli import bench

    monkeypatch.setattr(bench, "needs_hopper", lambda command, instead: None)
    monkeypatch.setattr(bench, "_WIDTHS", ("tiny",))
    real = measure.reports
    monkeypatch.setattr(
        measure,
        "reports",
        lambda *a, **k: real(
            *a, **{**k, "progress": lambda d, t: None}, timer=made_up, device="cpu", compile_kernels=False
        ),
    )
    monkeypatch.setattr(host, "microseconds", lambda: {"torch.mul": 7.0})
    monkeypatch.setattr(first_call, "measured", lambda: [{"epilogue": "swiglu", "cache": "cold", "ours": 5.0}])
    command = ["bench", "--widths", "tiny", "--tokens", "40", "--only", "rope", "--out", str(tmp_path)]
    with emulated():
        assert main([*command, "--ways", "eager", "max-autotune", "--no-compile"]) == 0
    shown = capsys.readouterr()
    assert "scaled RoPE on QKV" in shown.out and "torch.mul" in shown.out and "cold" in shown.out
    assert "rope tiny 40" in shown.err
    assert {p.name for p in tmp_path.iterdir()} == {"bench.json", "bars.svg", "roofline.svg"}
    found = report.from_json((tmp_path / "bench.json").read_text())
    assert [r.name for r in found.results] == ["rope tiny 40", "hosted_rope tiny 40"]
    assert set(found.results[0].times) == {"codalang", "cublas", "eager"}
    assert found.host == {"torch.mul": 7.0}


def test_the_launch_that_is_timed_is_that_of_the_timed_gemm() -> None:
    with emulated() as specs:
        launch, gemm = host.launch("cpu"), host.calls("cpu")["lower.run.gemm"]
        timed, made = launch(), gemm()
    assert [t.shape for t in timed] == [t.shape for t in made.values()]
    assert not any(t.isnan().any() for t in timed)  # of all that is poisoned, nothing is left
    assert len(specs) == 1


def child(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_first_calls_of_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a folder of their own per epilogue, cold then warm; one that fails or hangs is told."""
    folders: dict[str, list[Path]] = {"good": [], "bad": [], "slow": []}
    codes = {
        "good": 'print(\'noise\'); print(\'{"torch": 2.0, "first forward": 3.0, "first backward": 0.5}\')',
        "bad": "raise SystemExit('no device')",
        "slow": "import time; time.sleep(60)",
    }

    def spawn(name: str, folder: Path) -> subprocess.Popen[str]:
        folders[name].append(folder)
        return child(codes[name])

    monkeypatch.setattr(first_call, "TIMEOUT", 5.0)
    rows = list(first_call.measured(("good", "bad"), spawn))
    assert [(r["epilogue"], r["cache"]) for r in rows] == [
        ("good", "cold"),
        ("bad", "cold"),
        ("good", "warm"),
        ("bad", "warm"),
    ]
    assert rows[0] == {
        "epilogue": "good",
        "cache": "cold",
        "ours": 3.5,
        "torch": 2.0,
        "first forward": 3.0,
        "first backward": 0.5,
    }
    assert rows[1]["failed"] == "no device"
    assert folders["good"][0] == folders["good"][1] != folders["bad"][0]
    monkeypatch.setattr(first_call, "TIMEOUT", 0.2)
    assert next(first_call.measured(("slow",), spawn))["failed"] == "took longer than 0 s"
    shown = report.tables(Report("", {}, first_calls=tuple(rows)))[0].text()
    assert shown.splitlines()[1].split()[-1] == "failed" and "no device" in shown


@NO_GPU
def test_a_first_call_runs_as_a_file_that_imports_nothing_of_ours_before_torch() -> None:
    """Without a GPU it gets as far as the first tensor; the clock of `torch` has then run for torch alone."""
    process = first_call._spawned("swiglu", Path("unused"))
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (1, "")
    assert "torch.randn(256, 512" in errors and "codalang/__init__" not in errors


def test_kernels_are_known_without_a_gpu_or_memory() -> None:
    choice = measure.Choice("residual_rms|logsumexp|hosted_norm", widths=("70B",), tokens=(16384,))
    specs = measure.kernels(measure.workloads(choice))
    names = [s.epilogue.name for s in specs]
    assert {"residual_rms", "logsumexp_target", "weighted_residual_backward"} <= set(names)
    assert [s.operand is None for s in specs if s.epilogue.name == "weighted_residual_backward"] == [True]
    assert all(s.config for s in specs if s.operand)


def test_the_recomputed_output_is_the_forward_s() -> None:
    """The backward that also gives SwiGLU gives the gradients that it gave without."""
    backward, plain_backward = PATTERNS["swiglu_backward"].epilogue(), workloads.derived("scaled_swiglu").backward
    assert [o.name for o in backward.outputs] == ["d_acc", "d_r", "y"]
    assert backward.outputs[:2] == plain_backward.outputs
    assert len(backward.nodes) == len(plain_backward.nodes) + 1  # one product more: the rest is shared


# ---- a block beside CODA's -------------------------------------------------------------------------------------------


def fake_coda_block() -> types.SimpleNamespace:
    def norm(x, weight, eps):
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype) * weight

    def block(x0, y0, w0, w1, w2, w3, wn0, wn1, positions, frequencies, eps):
        (batch, length, d), (columns, _) = x0.shape, w3.shape
        assert (w1.shape[1], wn0.dtype, positions.dtype) == (d, x0.dtype, torch.int32)
        assert (positions.shape, frequencies.shape) == ((batch * length,), (columns,))
        x1 = x0 + y0 @ w0.t()
        x2 = x1 + swiglu(norm(x1, wn0, eps) @ w1.t()) @ w2.t()
        z = norm(x2, wn1, eps) @ w3.t()
        angle = 2 * math.pi * positions[:, None] * frequencies.double().view(-1, 2).sum(-1)
        first, second = z.unflatten(-1, (-1, 2)).unbind(-1)
        turned = first * angle.cos() + second * angle.sin(), second * angle.cos() - first * angle.sin()
        return x2, torch.stack(turned, -1).flatten(-2).to(x0.dtype)

    return types.SimpleNamespace(block=block)


@pytest.mark.parametrize("backward", [False, True])
def test_the_block_calls_codas_as_it_says(
    backward: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, ("coda.kernels.blocks.llama3", fake_coda_block))
    block = block_script.make(block_script.Size(64, 96, 64, 32), device="cpu", tokens=24)
    (call,) = block_script.coda_call(block, backward).values()
    assert len(call()) == (8 if backward else 2)
    said = capsys.readouterr().out
    assert float(said.split()[5]) < 2 * BF16_ROUNDING, said


def test_the_block_does_without_coda(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "coda", None)
    assert (
        block_script.coda_call(block_script.make(block_script.Size(64, 96, 64, 32), device="cpu", tokens=8), True) == {}
    )
    assert "CODA is left out: CODA cannot be imported" in capsys.readouterr().out


def test_turns_are_taken_once_a_round_after_a_flush_and_a_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else lies between the spin and the call."""
    done: list[object] = []
    device = types.SimpleNamespace(_sleep=done.append, synchronize=lambda: done.append("end"))
    flush = types.SimpleNamespace(zero_=lambda: done.append("flush"))
    stand_in = types.SimpleNamespace(cuda=device, int8=torch.int8, empty=lambda *shape, **kind: flush)
    monkeypatch.setattr(timing, "torch", stand_in)
    for name in timing.turns(["a", "b", "c"], rounds=4, spin_cycles=7):
        done.append(name)
    rounds = [done[i : i + 10] for i in range(0, len(done), 10)]
    assert len(rounds) == 4 and all(r[0::3][:3] == ["flush"] * 3 and r[1::3] == [7] * 3 for r in rounds)
    assert all(sorted(r[2::3]) == ["a", "b", "c"] and r[9] == "end" for r in rounds)
    assert len({tuple(r[2::3]) for r in rounds}) > 1
