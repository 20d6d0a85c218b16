"""Tuning: what is tried, what is chosen of times that are made up, what is remembered and found again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest
import torch
from emulation import emulated

from codalang.bench import tune
from codalang.bench.candidates import all_for, short
from codalang.bench.timing import Call, Timing
from codalang.bench.workloads import standard
from codalang.cli import main
from codalang.cli.programs import load_program
from codalang.cli.tune import gemm_calls, line, program_calls, table
from codalang.errors import CodaCompileError
from codalang.lower import ahead, plan, run, split, tuned
from codalang.lower.cache import Cache
from codalang.lower.call import CALLS
from codalang.lower.spec import Config, KernelSpec, Operand
from codalang.torch import execute

GPU = torch.device("cuda", 0)
EXTENTS = (8192, 8192, 4096)


def spec_of(name: str) -> KernelSpec:
    epilogue = standard(name)
    inputs = tuple("bf16" if p.type.kind.has_rows and p.type.width is not None else "f32" for p in epilogue.params[1:])
    return KernelSpec(epilogue, Operand("bf16", "k", "k"), inputs, ("bf16",) * len(epilogue.stores), None)


@pytest.fixture
def store(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """A folder of its own, and a GPU of a known name."""
    cache = Cache(tmp_path / "c", "tuned")
    monkeypatch.setattr(tuned, "store", lambda: cache)
    monkeypatch.setattr(tuned, "gpu_of", lambda device: "GPU of tests")
    return cache


def other_than_heuristic(spec: KernelSpec) -> Config:
    return next(c for c in all_for(spec, *EXTENTS)[1:])


@pytest.mark.parametrize("name", ["residual_rms", "scaled_swiglu", "logsumexp_target"])
@pytest.mark.parametrize("extents", [EXTENTS, (16, 4096, 4096)])
def test_candidates_fit_and_begin_with_the_heuristic(name: str, extents: tuple[int, int, int]) -> None:
    spec = spec_of(name)
    configs = all_for(spec, *extents)
    assert configs[0] == split.choose(spec, *extents)
    assert len(configs) == len(set(configs)) > 10
    assert all(plan.shared_bytes(spec, c) <= plan.SMEM_CAPACITY for c in configs)
    assert len({short(c) for c in configs}) == len(configs)
    assert (max(c.split for c in configs) > 1) == (extents != EXTENTS)


def test_what_was_remembered_is_chosen(store: Cache) -> None:
    spec = spec_of("scaled_swiglu")
    heuristic, config = split.choose(spec, *EXTENTS), other_than_heuristic(spec)
    assert tuned.choose(spec, *EXTENTS, GPU) == heuristic
    assert not store.root.exists()  # looking leaves no trace
    assert tuned.remember(spec, *EXTENTS, "GPU of tests", config, milliseconds=1.5)
    assert tuned.choose(spec, *EXTENTS, GPU) == config
    assert tuned.choose(attrs.evolve(spec, config=heuristic), *EXTENTS, GPU) == config  # what it had does not count


def test_what_was_remembered_can_be_ignored(store: Cache) -> None:
    spec = spec_of("scaled_swiglu")
    heuristic, config = split.choose(spec, *EXTENTS), other_than_heuristic(spec)
    tuned.remember(spec, *EXTENTS, "GPU of tests", config)
    with tuned.ignored():
        assert tuned.choose(spec, *EXTENTS, GPU) == heuristic
    assert tuned.choose(spec, *EXTENTS, GPU) == config


def test_what_was_remembered_is_of_one_gpu_kernel_and_size(store: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("scaled_swiglu")
    tuned.remember(spec, *EXTENTS, "GPU of tests", other_than_heuristic(spec))
    larger = (16384, 8192, 4096)
    assert tuned.choose(spec, *larger, GPU) == split.choose(spec, *larger)
    transposed = attrs.evolve(spec, operand=Operand("bf16", "k", "mn"))
    assert tuned.choose(transposed, *EXTENTS, GPU) == split.choose(transposed, *EXTENTS)
    assert tuned.choose(spec, *EXTENTS, torch.device("cpu")) == split.choose(spec, *EXTENTS)
    monkeypatch.setattr(tuned, "gpu_of", lambda device: "another GPU")
    assert tuned.choose(spec, *EXTENTS, GPU) == split.choose(spec, *EXTENTS)


def test_the_last_word_counts_and_says_what_it_is(store: Cache) -> None:
    spec = spec_of("residual_rms")
    first, second = all_for(spec, *EXTENTS)[1:3]
    for config in (first, second):
        tuned.remember(spec, *EXTENTS, "GPU of tests", config, milliseconds=1.5)
    assert tuned.choose(spec, *EXTENTS, GPU) == second
    (path,) = (store.root / "tuned").glob("*.json")
    entry = json.loads(path.read_text())
    assert (entry["epilogue"], entry["extents"], entry["milliseconds"]) == ("residual_rms", list(EXTENTS), 1.5)


def test_an_altered_entry_is_not_trusted(store: Cache) -> None:
    spec = spec_of("residual_rms")
    tuned.remember(spec, *EXTENTS, "GPU of tests", other_than_heuristic(spec))
    (path,) = (store.root / "tuned").glob("*.json")
    path.write_text(path.read_text().replace('"raster": 8', '"raster": 1'))
    assert tuned.choose(spec, *EXTENTS, GPU) == split.choose(spec, *EXTENTS)


def test_a_folder_that_others_can_write_is_not_trusted(store: Cache) -> None:
    spec = spec_of("residual_rms")
    tuned.remember(spec, *EXTENTS, "GPU of tests", other_than_heuristic(spec))
    (store.root / "tuned").chmod(0o777)
    fresh = Cache(store.root, "tuned")
    with pytest.warns(UserWarning, match="can be written by others"):
        assert fresh.find("k", ".json") is None
    assert not fresh.replace("k", ".json", b"{}")


def test_the_gemms_that_run_are_recorded_once_with_what_they_need() -> None:
    a, b = torch.randn(40, 64).bfloat16(), torch.randn(96, 64).bfloat16()
    with emulated():
        with tune.recording() as calls:
            results = [run.gemm(standard("swiglu"), a, b, {}) for _ in range(2)]
            run.gemm(standard("swiglu"), a[:24], b, {})
        assert [(c.problem.m, c.problem.n, c.problem.k) for c in calls] == [(40, 96, 64), (24, 96, 64)]
        assert all(c.problem.spec.config is None for c in calls)
        again = calls[0].run(all_for(calls[0].problem.spec, 40, 96, 64)[-1])
    assert torch.equal(again["y"], results[0]["y"])
    assert torch.equal(results[1]["y"], results[0]["y"])


def test_the_kernels_of_calls_with_and_without_a_gradient() -> None:
    with emulated():
        stores = {
            name: [len(c.problem.spec.stores) for c in gemm_calls(standard(name), (40, 96, 64), "bf16", "cpu")]
            for name in ("scaled_swiglu", "residual_rms", "logsumexp_target")
        }
    # the forward that saves the pre-activation is another kernel; the residual stream is its own saved value
    assert stores == {"scaled_swiglu": [1, 2], "residual_rms": [2], "logsumexp_target": [0, 1]}


def test_what_does_not_compile_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("scaled_swiglu")
    problem = tune.Problem(spec, *EXTENTS)
    configs = all_for(spec, *EXTENTS)
    failing = {configs[3]}
    told = []

    def compile_each(specs, processes, progress):
        progress(len(specs), len(specs))
        return {s: ahead.Compiled(1.0, error="no registers left" if s.config in failing else None) for s in specs}

    monkeypatch.setattr(ahead, "compile_each", compile_each)
    compiled = tune.compiled([problem], progress=lambda done, total: told.append((done, total)))
    assert compiled == {problem: [c for c in configs if c != configs[3]]}
    assert told == [(len(configs), len(configs))]
    failing.add(configs[0])
    with pytest.raises(CodaCompileError, match="scaled_swiglu 8192 x 8192 x 4096 does not compile: no registers left"):
        tune.compiled([problem])


class Times:
    """A timer whose times are made up; in the final the noise of the first rounds is gone."""

    def __init__(self, first: Mapping[str, float], final: Mapping[str, float]) -> None:
        self.given = [first, final]
        self.asked: list[tuple[set[str], int]] = []

    def __call__(self, calls: Mapping[str, Call], *, rounds: int, warm_up: int) -> dict[str, Timing]:
        self.asked.append((set(calls), rounds))
        times = self.given[len(self.asked) - 1]
        return {name: Timing(times[name], times[name], times[name]) for name in calls}


def test_the_best_of_the_final_wins() -> None:
    spec = spec_of("scaled_swiglu")
    configs = all_for(spec, *EXTENTS)[:12]
    ran = []

    def call(config: Config | None) -> None:
        if config == configs[11]:
            raise RuntimeError("too many resources requested for launch")
        ran.append(config)

    first = {str(c): 1.0 - 0.01 * i for i, c in enumerate(configs)}  # the later, the better
    final = {str(c): 2.0 for c in configs} | {str(configs[8]): 1.6}
    timer = Times(first, final)
    result = tune.tune(tune.GemmCall(tune.Problem(spec, *EXTENTS), call), configs, timer=timer)
    assert set(ran) == set(configs[:11])
    assert timer.asked[0] == ({str(c) for c in configs[:11]}, tune.FIRST_ROUNDS)
    assert timer.asked[1] == ({str(c) for c in (configs[0], *configs[6:11])}, tune.FINAL_ROUNDS)
    assert (result.heuristic, result.best, result.failed) == (configs[0], configs[8], 1)
    assert result.gain == pytest.approx(1.25)
    assert "2.0000 ms -> 1.6000 ms (1.250 times), 12 candidates" in line(result)
    assert short(configs[8]) in table([result])


def test_what_is_kept_is_chosen_in_this_process(store: Cache) -> None:
    spec = spec_of("scaled_swiglu")
    heuristic, best = all_for(spec, *EXTENTS)[:2]
    result = tune.Tuned(tune.Problem(spec, *EXTENTS), heuristic, best, 2.0, 1.0, 12, 0)
    CALLS["a signature"] = None  # type: ignore[assignment]
    assert tune.keep(result, "GPU of tests")
    assert not CALLS
    assert tuned.choose(spec, *EXTENTS, GPU) == best


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["swiglu", "--shape", "M=8,X=2"], "no dimension `X`"),
        (["swiglu", "--shape", "M=0"], "an empty matmul has no kernel"),
        pytest.param(
            ["swiglu"],
            "`codalang compile PROGRAM` compiles them without one",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_be_tuned(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *arguments]) == 1
    assert complaint in capsys.readouterr().err


def test_without_an_accumulator_there_is_nothing_to_tune(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "vectors.coda"
    path.write_text("epilogue vectors(x: col[M]) { store y: col[M] = x }")
    assert main(["tune", str(path)]) == 1
    assert "nothing to tune" in capsys.readouterr().err


def test_the_gemms_of_a_program_s_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_program(str(Path(__file__).parents[1] / "examples/mlp.coda"))
    (program,) = module.programs.values()
    monkeypatch.setattr(execute, "_takes_kernel", lambda job, values, device: job.on_gemm)
    with emulated():
        calls = program_calls(module, program, {"T": 48, "H": 16, "D": 32, "F": 24}, "bf16", "cpu")
        for call in calls:
            call.run(None)
    extents = [(c.problem.m, c.problem.n, c.problem.k) for c in calls]
    assert extents[:3] == [(48, 32, 16), (48, 48, 32), (48, 32, 24)]  # forward
    assert len(extents) > 3
