"""A balanced last wave gives the right results, the same bits each time, on any stream and in a graph.

Forced on at ragged extents too, where the heuristic would leave it off.  The workspace is NaN before, as outputs are.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import gpu_cases
import pytest
import torch
from torch import Tensor

from codalang.autodiff import derive
from codalang.ir import reference
from codalang.ir.epilogue import Epilogue
from codalang.ir.types import Kind
from codalang.lower import plan, run
from codalang.lower.spec import Config, KernelSpec, Operand, base_width, loaded_params
from codalang.parser import parse

PLAIN = parse("epilogue plain(acc: tile[M, N]) { store y: tile[M, N] = acc }").epilogues["plain"]
RESIDUAL = gpu_cases.SOURCES["residual_rms"]
BACKWARD = derive(RESIDUAL).backward
EXTENTS = [(129, 264, 1032), (1000, 520, 4104), (3000, 4104, 1000), (2500, 4104, 2120), (8192, 4096, 14336)]
# (epilogue, index of its tiling): cooperative and ping-pong, with and without clusters
KERNELS = [(PLAIN, 0), (PLAIN, 1), (PLAIN, 3), (PLAIN, 5), (PLAIN, 6), (RESIDUAL, 0), (BACKWARD, 0)]
NAMES = [f"{e.name}-{'x'.join(map(str, plan.TILINGS[i].tile))}" for e, i in KERNELS]


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def inputs_of(epilogue: Epilogue, m: int, n: int) -> dict[str, Tensor | float]:
    """What the epilogue loads beside the accumulator, of n columns."""
    found: dict[str, Tensor | float] = {}
    for param in loaded_params(epilogue, True):
        columns = int(n * (param.type.width or base_width(epilogue)) / base_width(epilogue))
        shapes = {Kind.TILE: (m, columns), Kind.ROW: (columns,), Kind.COL: (m,)}
        dtype = torch.bfloat16 if param.type.kind is Kind.TILE else torch.float32
        shape = shapes.get(param.type.kind)
        found[param.name] = 0.5 if shape is None else _normal(*shape, dtype=dtype)
    return found


def config_of(epilogue: Epilogue, tiling: int, major: str = "k") -> Config:
    """A configuration with a balanced last wave."""
    params = loaded_params(epilogue, True)
    dtypes = tuple("bf16" if p.type.kind is Kind.TILE else "f32" for p in params)
    spec = KernelSpec(epilogue, Operand("bf16", "k", major), dtypes, ("bf16",) * len(epilogue.stores), None)
    return attrs.evolve(next(iter(plan._configurations(spec, plan.TILINGS[tiling]))), balanced=True)


def _is_near(got: Tensor, truth: Tensor) -> bool:
    """Whether a result is the truth rounded once to its dtype, after sums in f32."""
    rounded = truth.to(got.dtype).double()
    return float((got.double() - truth).norm()) <= float(1.05 * (rounded - truth).norm() + 1e-4 * truth.norm())


def _poisoned(shape: tuple[int, ...], strides: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing may be read that was not written, the workspace included."""
    monkeypatch.setattr("codalang.lower.call.empty", _poisoned)
    return


def results(epilogue: Epilogue, tiling: int, m: int, n: int, k: int) -> tuple[list[dict[str, Tensor]], Tensor, dict]:
    """Many runs, the accumulator in f64, and the inputs."""
    a, b, inputs = _normal(m, k), _normal(n, k), inputs_of(epilogue, m, n)
    config = config_of(epilogue, tiling)
    runs = [run.gemm(epilogue, a, b, inputs, config=config) for _ in range(6)]
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        runs += [run.gemm(epilogue, a, b, inputs, config=config) for _ in range(6)]
    runs += [run.gemm(epilogue, a, b, inputs, config=config) for _ in range(6)]
    torch.cuda.synchronize()
    return runs, a.double() @ b.double().T, inputs


@pytest.mark.parametrize(("m", "n", "k"), EXTENTS)
@pytest.mark.parametrize(("epilogue", "tiling"), KERNELS, ids=NAMES)
def test_a_balanced_wave_is_right_and_repeats(epilogue: Epilogue, tiling: int, m: int, n: int, k: int) -> None:
    runs, acc, inputs = results(epilogue, tiling, m, n, k)
    truth = reference.run(epilogue, {**inputs, epilogue.params[0].name: acc}, dtype=torch.float64)
    for name, value in runs[0].items():
        assert _is_near(value, truth[name]), name
    for again in runs[1:]:
        assert all(torch.equal(again[name], value) for name, value in runs[0].items())


def captured() -> tuple[list[bool], Tensor, Tensor]:
    """Whether replays of a graph give the bits of a call."""
    a, b, config = _normal(1000, 4104), _normal(520, 4104), config_of(PLAIN, 0)
    expected = run.gemm(PLAIN, a, b, {}, config=config)["y"].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run.gemm(PLAIN, a, b, {}, config=config)["y"]
    same = []
    for _ in range(3):
        y.fill_(torch.nan)
        graph.replay()
        same.append(torch.equal(y, expected))
    return same, y, expected


def test_a_balanced_kernel_can_be_captured() -> None:
    assert captured()[0] == [True] * 3


def kernels_needed(items: list[pytest.Item]) -> list[KernelSpec]:
    """See conftest."""
    import gpu_compile

    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    kernels = {(p["epilogue"], p["tiling"]) for p in params}
    with gpu_compile.recorded() as specs:
        for epilogue, tiling in kernels | {(PLAIN, 0)}:
            a, b = _normal(256, 1024), _normal(256, 1024)
            run.gemm(epilogue, a, b, inputs_of(epilogue, 256, 256), config=config_of(epilogue, tiling))
    return list(specs)
