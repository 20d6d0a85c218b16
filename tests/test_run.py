"""What `lower.run` does around a kernel: padding, allocation, partials, merging, and which kernel it asks for.

The kernel is replaced by one that runs on the CPU and computes as the real one does: tile by tile, one partial per
tile, into the buffers that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from codalang.errors import CodaCallError, Source
from codalang.ir import reference
from codalang.ir.epilogue import Epilogue
from codalang.ir.types import Kind
from codalang.lower import plan, run
from codalang.lower.spec import KernelSpec, base_width, loaded_params
from codalang.parser import parse

EVERYTHING = parse(
    """
epilogue everything(acc: tile[M, N], wide: tile[M, 2*N], gamma: row[N/2], c: col[M], s: scalar) {
    let (e, o) = split(wide)
    let x = acc * s + e * o
    let (left, right) = split(x)
    store half: tile[M, N/2]: f32 = left * gamma + c
    store double: tile[M, 2*N] = join(x, acc)
    reduce rows: row[N/2] = sum(left)
    reduce columns: col[M]: bf16 = sum(x * x)
    reduce total: scalar = sum(x)
}
"""
).epilogues["everything"]
STDLIB = Path(__file__).parents[1] / "stdlib"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KernelSpec]]:
    """Kernels on the CPU; yields those that were asked for."""
    specs: list[KernelSpec] = []

    def function(spec: KernelSpec) -> Callable[..., None]:
        specs.append(spec)
        return lambda *arguments: _kernel(spec, *arguments)

    def poisoned(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(run, "function", function)
    monkeypatch.setattr(run, "empty", poisoned)
    monkeypatch.setattr(run, "_sms", lambda device: 132)
    yield specs


def _kernel(spec: KernelSpec, *arguments: object) -> None:
    epilogue = spec.epilogue
    params = loaded_params(epilogue, spec.operand is not None)
    if spec.operand:
        a, b, inputs, outputs, clusters = arguments
        assert clusters == 132 // (spec.config.cluster[0] * spec.config.cluster[1])
        for tensor, major in ((a, spec.operand.a_major), (b, spec.operand.b_major)):
            _assert_addressable(tensor if major == "k" else tensor.T)
        acc = a.double() @ b.double().T
        tile, m, n = spec.config.tile, a.shape[0], b.shape[0]
    else:
        inputs, outputs, m, n = arguments
        tile, acc = (plan.HOSTED_ROWS, 32 * plan.hosted_run(spec.aligned)), None
    for param, tensor in zip(params, inputs, strict=True):
        if param.type.kind is Kind.TILE and (spec.operand or spec.aligned):
            _assert_addressable(tensor)
    for i, row in enumerate(range(0, m, tile[0])):
        for j, column in enumerate(range(0, n, tile[1])):
            _one_tile(epilogue, acc, params, inputs, outputs, (i, j), (row, column), tile, (m, n))


def _assert_addressable(tensor: Tensor) -> None:
    assert tensor.stride(1) == 1
    assert tensor.data_ptr() % 16 == 0
    assert tensor.stride(0) * tensor.element_size() % 16 == 0


def _one_tile(epilogue, acc, params, inputs, outputs, tile_index, start, tile, extents) -> None:  # noqa: ANN001
    base = base_width(epilogue)
    stop = min(start[0] + tile[0], extents[0]), min(start[1] + tile[1], extents[1])

    def part(tensor, type_):  # noqa: ANN001, ANN202
        if not isinstance(tensor, Tensor):
            return tensor
        rows = (slice(start[0], stop[0]),) if type_.kind.has_rows else ()
        scale = (type_.width or base) / base
        columns = (slice(int(start[1] * scale), int(stop[1] * scale)),) if type_.width else ()
        return tensor[(*rows, *columns)] if rows or columns else tensor.reshape(())

    given = {p.name: part(t, p.type) for p, t in zip(params, inputs, strict=True)}
    if acc is not None:
        given[epilogue.params[0].name] = acc[start[0] : stop[0], start[1] : stop[1]]
    given = {k: v.double() if isinstance(v, Tensor) else v for k, v in given.items()}
    size = (stop[0] - start[0], int((stop[1] - start[1]) / base))
    results = reference.run(epilogue, given, dtype=torch.float64, extents=size)
    for output, buffer in zip((*epilogue.stores, *epilogue.reductions), outputs, strict=True):
        value = results[output.name]
        if output.type.kind is Kind.TILE:
            part(buffer, output.type).copy_(value)
        elif output.type.kind is Kind.COL:
            buffer[tile_index[1], start[0] : stop[0]] = value
        elif output.type.kind is Kind.ROW:
            scale = output.type.width / base
            buffer[tile_index[0], int(start[1] * scale) : int(stop[1] * scale)] = value
        else:
            buffer[tile_index] = value


def _inputs(m: int, n: int, dtype: torch.dtype) -> dict[str, Tensor | float]:
    return {
        "wide": torch.randn(m, 2 * n).to(dtype),
        "gamma": torch.randn(n // 2),
        "c": torch.randn(m).to(dtype),
        "s": 0.75,
    }


def _truth(a: Tensor, b: Tensor, inputs: dict[str, Tensor | float]) -> dict[str, Tensor]:
    exact = {k: v.double() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    acc = a.double() @ b.double().T
    return reference.run(EVERYTHING, {"acc": acc, **exact}, dtype=torch.float64, extents=tuple(acc.shape))


def _assert_results(got: dict[str, Tensor], truth: dict[str, Tensor], dtype: torch.dtype) -> None:
    dtypes = {"half": torch.float32, "double": dtype, "rows": torch.float32, "columns": torch.bfloat16}
    assert list(got) == ["half", "double", "rows", "columns", "total"]
    for name, value in got.items():
        assert value.is_contiguous()
        assert value.dtype is dtypes.get(name, torch.float32)
        unit = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[value.dtype]
        assert (value.double() - truth[name]).norm() <= unit * truth[name].norm(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 2, 1), (7, 24, 7), (130, 258, 40), (300, 1000, 8), (65, 36, 0)])
def test_gemm(asked: list[KernelSpec], dtype: torch.dtype, m: int, n: int, k: int) -> None:
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    inputs = _inputs(m, n, dtype)
    for _ in range(2):  # the second call takes what the first remembered
        _assert_results(run.gemm(EVERYTHING, a, b, inputs), _truth(a, b, inputs), dtype)
    assert len(asked) == 1
    assert asked[0].input_dtypes == (run.DTYPE_NAMES[dtype], "f32", run.DTYPE_NAMES[dtype], "number")


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda t: t,
    "columns": lambda t: t.T.contiguous().T,
    "every other row": lambda t: torch.stack((t, t), 1).reshape(-1, t.shape[1])[::2],
    "every other column": lambda t: torch.stack((t, t), 2).reshape(t.shape[0], -1)[:, ::2],
    "odd base": lambda t: torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape),
    "wide pitch": lambda t: torch.cat((t, t.new_zeros(t.shape[0], 64)), 1)[:, : t.shape[1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [64, 9])
def test_operands_and_tiles_of_any_layout(asked: list[KernelSpec], layout: str, k: int) -> None:
    view = LAYOUTS[layout]
    a, b = view(torch.randn(24, k).bfloat16()), view(torch.randn(40, k).bfloat16())
    inputs = _inputs(24, 40, torch.bfloat16) | {"wide": view(torch.randn(24, 80).bfloat16())}
    _assert_results(run.gemm(EVERYTHING, a, b, inputs), _truth(a, b, inputs), torch.bfloat16)
    plain = {"acc": (a.float() @ b.float().T).bfloat16(), **inputs}
    truth = reference.run(
        EVERYTHING,
        {k: v.double() if isinstance(v, Tensor) else v for k, v in plain.items()},
        dtype=torch.float64,
        extents=(24, 40),
    )
    _assert_results(run.hosted(EVERYTHING, plain), truth, torch.bfloat16)


def test_a_contiguous_major_needs_no_copy(asked: list[KernelSpec]) -> None:
    plain = parse("epilogue plain(acc: tile[M, N]) { store y: tile[M, N] = acc }").epilogues["plain"]
    k_major, mn_major = torch.randn(64, 32).bfloat16(), torch.randn(32, 64).bfloat16().T
    seen: list[int] = []
    original = run.function
    run.function = lambda spec: lambda a, b, *rest: seen.extend((a.data_ptr(), b.data_ptr()))
    run.gemm(plain, k_major, mn_major, {})
    run.function = original
    assert seen == [k_major.data_ptr(), mn_major.data_ptr()]


@pytest.mark.parametrize(("m", "n"), [(0, 8), (8, 0), (0, 0)])
def test_empty_extents_launch_nothing(asked: list[KernelSpec], m: int, n: int) -> None:
    got = run.gemm(
        EVERYTHING, torch.randn(m, 4).bfloat16(), torch.randn(n, 4).bfloat16(), _inputs(m, n, torch.bfloat16)
    )
    assert asked == []
    assert [tuple(t.shape) for t in got.values()] == [(m, n // 2), (m, 2 * n), (n // 2,), (m,), ()]
    assert all(not t.any() for t in got.values())


def test_dtypes_of_a_call_win_over_annotations(asked: list[KernelSpec]) -> None:
    a, b = torch.randn(8, 8).bfloat16(), torch.randn(16, 8).bfloat16()
    wanted = {"half": torch.float16, "columns": torch.float32}
    got = run.gemm(EVERYTHING, a, b, _inputs(8, 16, torch.bfloat16), dtypes=wanted)
    assert {name: got[name].dtype for name in wanted} == wanted


def test_scalars_come_as_numbers_or_tensors(asked: list[KernelSpec]) -> None:
    a, b = torch.randn(8, 8).bfloat16(), torch.randn(16, 8).bfloat16()
    inputs = _inputs(8, 16, torch.bfloat16)
    results = [
        run.gemm(EVERYTHING, a, b, inputs | {"s": s})["half"] for s in (0.75, torch.tensor(0.75), torch.tensor([0.75]))
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert [spec.input_dtypes[-1] for spec in asked] == ["number", "f32", "f32"]


def test_hosted_without_tiles_takes_extents(asked: list[KernelSpec]) -> None:
    outer = parse("epilogue outer(c: col[M], r: row[N]) { store y: tile[M, N] = c * r }").epilogues["outer"]
    c, r = torch.randn(70), torch.randn(30)
    assert torch.equal(run.hosted(outer, {"c": c, "r": r}, extents=(70, 30))["y"], c[:, None] * r)
    with pytest.raises(CodaCallError, match="do not determine its columns") as caught:
        run.hosted(outer, {"c": c, "r": torch.tensor(1.0)})
    assert caught.value.argument == "extents"


@pytest.mark.parametrize(
    ("change", "argument", "message"),
    [
        ({"gamma": torch.randn(7)}, "gamma", r"shape \[8\], got torch.float32 \[7\]"),
        ({"wide": torch.randn(8, 32).double()}, "wide", "got torch.float64"),
        ({"c": 1.0}, "c", "got 1.0"),
        ({"s": None}, "s", "is missing"),
    ],
)
def test_what_does_not_fit_is_named(
    asked: list[KernelSpec], change: dict[str, Tensor], argument: str, message: str
) -> None:
    inputs = _inputs(8, 16, torch.bfloat16) | change
    with pytest.raises(CodaCallError, match=message) as caught:
        run.gemm(EVERYTHING, torch.randn(8, 8).bfloat16(), torch.randn(16, 8).bfloat16(), inputs)
    assert caught.value.argument == argument


def test_small_and_large_calls_of_a_stdlib_epilogue_ask_for_different_kernels(asked: list[KernelSpec]) -> None:
    path = STDLIB / "swiglu.coda"
    epilogue: Epilogue = parse(Source(path.name, path.read_text())).epilogues["swiglu"]
    for m, n in ((4, 64), (2048, 2048)):
        run.gemm(epilogue, torch.randn(m, 64).bfloat16(), torch.randn(n, 64).bfloat16(), {})
    assert len({spec.config for spec in asked}) == 2
