"""What `lower.run` does around a kernel: padding, allocation, partials, merging, and which kernel it asks for.

The kernel is replaced by one that runs on the CPU; see `emulation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import torch
from emulation import emulated
from torch import Tensor

from codalang.errors import CodaCallError, Source
from codalang.ir import reference
from codalang.ir.epilogue import Epilogue
from codalang.ir.types import Dtype
from codalang.lower import run
from codalang.lower.dtypes import DTYPE_NAMES
from codalang.lower.folded import Matrix
from codalang.lower.spec import Config, Folding, KernelSpec
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
LANGUAGE = parse(
    """
state energy(x) {
    carry total = 0, count: i32 = 0
    update { return (total + x * x, count + 1) }
    merge { return (a_total + b_total, a_count + b_count) }
    finalize (energy, count) = (total, count)
}
epilogue language(acc: tile[M, N], keep: tile[M, N]: bool, where_: tile[M, 2*N]: i64, target: col[M]: i64,
                  shift: row[N/2]: i32, on: scalar: bool, k: scalar: i32, unused: col[M]) {
    let (left, right) = split(acc)
    let x = where(keep and on, acc, group_sum(acc, 8))
    store y: tile[M, N] = x * float(k)
    store ids: tile[M, 2*N]: f32 = float(where_ + 1)
    store row: row[N/2] = float(shift * 2)
    store col: col[M]: bf16 = float(target + row_index())
    store one: scalar = where(on, 7, 8)
    reduce high: col[M] = max(x)
    reduce low: row[N] = min(x)
    reduce most: scalar = max(left * right)
    state (mean, var, n): col[M] = welford(x)
    state (top, at): row[N/2] = argmax(left, row_index())
    state (best, i, j): scalar = argmax2(x, row_index(), col_index())
    state lse: row[N] = online_logsumexp(x)
    state (energy, count): scalar = energy(right)
}
"""
).epilogues["language"]
STDLIB = Path(__file__).parents[1] / "stdlib"


@pytest.fixture
def asked() -> Iterator[list[KernelSpec]]:
    """Kernels on the CPU; yields those that were asked for."""
    with emulated() as specs:
        yield specs


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
        # the total may cancel: it is measured by the size that a sum of its terms with random signs would have
        size = truth["double"][:, ::2].norm() if name == "total" else truth[name].norm()
        assert (value.double() - truth[name]).norm() <= unit * size, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 2, 1), (7, 24, 7), (130, 258, 40), (300, 1000, 8), (65, 36, 0)])
def test_gemm(asked: list[KernelSpec], dtype: torch.dtype, m: int, n: int, k: int) -> None:
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    inputs = _inputs(m, n, dtype)
    for _ in range(2):  # the second call takes what the first remembered
        _assert_results(run.gemm(EVERYTHING, a, b, inputs), _truth(a, b, inputs), dtype)
    assert len([spec for spec in asked if spec.merge is None]) == 1
    assert asked[-1].input_dtypes == (DTYPE_NAMES[dtype], "f32", DTYPE_NAMES[dtype], "number")


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


# ---- the full language -----------------------------------------------------------------------------------------------


def _language_inputs(m: int, n: int) -> dict[str, Tensor | float]:
    generator = torch.Generator().manual_seed(m + n)

    def integers(*shape: int) -> Tensor:
        return torch.randint(0, max(1, n), shape, generator=generator)

    keep = torch.rand(m, n, generator=generator) < 0.5
    shift = integers(n // 2).int()
    return {"keep": keep, "where_": integers(m, 2 * n), "target": integers(m), "shift": shift, "on": True, "k": 3}


def _assert_language(
    got: dict[str, Tensor], acc: Tensor, inputs: dict[str, Tensor | float], dtype: torch.dtype
) -> None:
    """All of one tiled run against one on the whole, in f64."""
    given = {"acc": acc.double(), "unused": torch.zeros(acc.shape[0])} | inputs
    truth = reference.run(LANGUAGE, given, dtype=torch.float64)
    assert list(got) == [o.name for o in LANGUAGE.outputs]
    for output in LANGUAGE.outputs:
        value, expected = got[output.name], truth[output.name]
        wanted = {"y": dtype, "col": torch.bfloat16}.get(output.name, torch.float32)
        assert value.dtype is (torch.int32 if output.type.dtype is Dtype.I32 else wanted), output.name
        assert value.shape == expected.shape and value.is_contiguous()
        if output.type.dtype is Dtype.I32:
            assert torch.equal(value, expected), output.name
        else:
            unit = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[value.dtype]
            assert (value.double() - expected).norm() <= unit * expected.norm(), output.name


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 3), (7, 24, 7), (130, 264, 40), (300, 1000, 8)])
def test_the_full_language_on_a_gemm(asked: list[KernelSpec], m: int, n: int, k: int) -> None:
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    inputs = _language_inputs(m, n)
    for _ in range(2):
        _assert_language(run.gemm(LANGUAGE, a, b, inputs), a.double() @ b.double().T, inputs, torch.bfloat16)
    kernels = [spec for spec in asked if spec.merge is None]
    assert len(kernels) == 1
    # `unused` is not loaded; a tile of 64-bit indices is narrowed
    assert kernels[0].input_dtypes == ("bool", "i32", "i64", "i32", "bool", "i32")
    merges = [spec.epilogue.name for spec in asked if spec.merge is not None]
    assert all(name.startswith("merge_") for name in merges)
    assert len([name for name in merges if name not in ("merge_sum", "merge_max", "merge_min")]) == 5


@pytest.mark.parametrize(("m", "n"), [(1, 8), (7, 24), (130, 264), (65, 1032)])
@pytest.mark.parametrize("layout", ["rows", "columns", "odd base", "wide pitch"])
def test_the_full_language_hosted(asked: list[KernelSpec], m: int, n: int, layout: str) -> None:
    view = LAYOUTS[layout]
    inputs = _language_inputs(m, n)
    inputs |= {name: view(inputs[name]) for name in ("keep", "where_")}
    acc = view(torch.randn(m, n).half())
    got = run.hosted(LANGUAGE, {"acc": acc} | inputs)
    _assert_language(got, acc, inputs, torch.float16)


def test_vectors_and_masks_of_any_stride(asked: list[KernelSpec]) -> None:
    inputs = _language_inputs(7, 24)
    strided = {
        name: torch.stack((value, value), -1)[..., 0] if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    assert not strided["target"].is_contiguous()
    acc = torch.randn(7, 24).bfloat16()
    tensors = strided | {"on": torch.tensor(True), "k": torch.tensor([3])}
    _assert_language(run.hosted(LANGUAGE, {"acc": acc} | tensors), acc, inputs, torch.bfloat16)


@pytest.mark.parametrize(("m", "n"), [(0, 8), (8, 0)])
def test_nothing_is_folded_to_the_identity(asked: list[KernelSpec], m: int, n: int) -> None:
    got = run.hosted(LANGUAGE, {"acc": torch.randn(m, n).bfloat16(), "unused": torch.zeros(m)} | _language_inputs(m, n))
    assert asked == []
    assert got["most"] == -torch.inf and got["count"] == 0 and got["energy"] == 0 and got["i"] == 2**31 - 1
    assert torch.equal(got["high"], torch.full((m,), -torch.inf))
    assert torch.equal(got["low"], torch.full((n,), torch.inf))


@pytest.mark.parametrize(
    ("change", "argument", "message"),
    [
        ({"target": torch.zeros(8)}, "target", r"a i32 or i64 tensor of shape \[8\], got torch.float32"),
        ({"keep": torch.zeros(8, 16)}, "keep", "a bool tensor of shape"),
        ({"where_": torch.zeros(8, 16).long()}, "where_", r"shape \[8, 32\], got torch.int64 \[8, 16\]"),
    ],
)
def test_indices_and_masks_that_do_not_fit_are_named(
    asked: list[KernelSpec], change: dict[str, Tensor], argument: str, message: str
) -> None:
    inputs = {"acc": torch.randn(8, 16).bfloat16()} | _language_inputs(8, 16) | change
    with pytest.raises(CodaCallError, match=message) as caught:
        run.hosted(LANGUAGE, inputs)
    assert caught.value.argument == argument


def test_groups_divide_the_columns(asked: list[KernelSpec]) -> None:
    with pytest.raises(CodaCallError, match="`group_sum` of `language` needs a multiple of 8 columns, got 12"):
        run.hosted(LANGUAGE, {"acc": torch.randn(8, 12).bfloat16()} | _language_inputs(8, 12))


def test_a_transform_is_merged_by_one_kernel_whoever_has_it(asked: list[KernelSpec]) -> None:
    one = parse("epilogue one(acc: tile[M, N]) { state (m, v): col[M] = welford(acc) }").epilogues["one"]
    two = parse(
        "epilogue two(acc: tile[M, N]) { store y: tile[M, N] = acc\n state m: col[M] = welford(acc * 2) }"
    ).epilogues["two"]
    for epilogue in (one, two):
        run.gemm(epilogue, torch.randn(8, 8).bfloat16(), torch.randn(16, 8).bfloat16(), {})
    merges = [spec for spec in asked if spec.merge is not None]
    assert len(merges) == 2
    assert len(set(merges)) == 1


SUMS = parse(
    """
epilogue sums(acc: tile[M, N], g: row[N]) {
    store y: tile[M, N] = acc
    reduce rows: col[M] = sum(acc * acc)
    reduce columns: row[N] = max(acc * g)
    reduce whole: scalar = sum(acc)
}
epilogue factor(rows: row[N], c: row[N], eps: scalar) { store r: row[N] = rsqrt(rows + eps) * c }
"""
).epilogues


@pytest.mark.parametrize("how", [{}, {"split": 2}, {"balanced": True}, {"tile": (128, 128), "ping_pong": True}])
def test_what_is_taken_unmerged_is_a_part_of_each_tile(asked: list[KernelSpec], how: dict) -> None:
    """However tiles are divided along K; a vector kernel merges it, and gives what merging first would."""
    m, n, k = 300, 520, 1100
    config = attrs.evolve(Config((128, 256), (2, 1), False, 4, 32, 0, 2), **how)
    a, b, g = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.randn(n)
    whole = run.gemm(SUMS["sums"], a, b, {"g": g}, config=config)
    parts = run.gemm(SUMS["sums"], a, b, {"g": g}, config=config, unmerged=("rows", "columns"))
    tiles = [-(-extent // step) for extent, step in zip((m, n), config.tile, strict=True)]
    assert (parts["rows"].shape, parts["columns"].shape) == ((tiles[1], m), (tiles[0], n))
    assert torch.allclose(parts["rows"].sum(0), whole["rows"]) and torch.equal(parts["whole"], whole["whole"])
    assert torch.equal(parts["columns"].amax(0), whole["columns"]) and torch.equal(parts["y"], whole["y"])
    c, asked_for = torch.randn(m), {"rows": "sum"}
    given = [{"rows": rows, "c": c, "eps": 1e-5} for rows in (parts["rows"], whole["rows"])]
    merged, first = [run.vector(SUMS["factor"], inputs, m, parts=asked_for)["r"] for inputs in given]
    assert torch.allclose(merged, first)
    hosted = run.hosted(SUMS["sums"], {"acc": a @ b.T, "g": g}, unmerged=("rows",))
    assert hosted["rows"].shape == (-(-n // 256), m) and hosted["columns"].shape == (n,)


# ---- buffers of the caller -------------------------------------------------------------------------------------------

ACCUMULATE = parse("epilogue accumulate(acc: tile[M, N], c: tile[M, N]) { store c: tile[M, N] = acc + c }").epilogues[
    "accumulate"
]


def _buffers(got: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(value, torch.nan) for name, value in got.items()}


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 4), (7, 24, 7), (130, 258, 40), (300, 1000, 8)])
def test_results_are_written_into_given_buffers(asked: list[KernelSpec], m: int, n: int, k: int) -> None:
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    inputs = _inputs(m, n, torch.bfloat16)
    fresh = run.gemm(EVERYTHING, a, b, inputs)
    plain = {"acc": (a.float() @ b.float().T).bfloat16()} | inputs
    for call, expected in (
        (lambda out: run.gemm(EVERYTHING, a, b, inputs, out=out), fresh),
        (lambda out: run.hosted(EVERYTHING, plain, out=out), run.hosted(EVERYTHING, plain)),
    ):
        for names in (list(expected), ["double", "total"], ["half", "rows", "columns"]):
            for _ in range(2):
                out = {name: buffer for name, buffer in _buffers(expected).items() if name in names}
                got = call(out)
                assert all(got[name] is out[name] for name in names)
                assert list(got) == list(expected)
                assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_transforms_are_written_into_given_buffers(asked: list[KernelSpec]) -> None:
    a, b = torch.randn(130, 40).bfloat16(), torch.randn(264, 40).bfloat16()
    inputs = _language_inputs(130, 264)
    expected = run.gemm(LANGUAGE, a, b, inputs)
    out = {name: value.clone().fill_(-7) for name, value in expected.items()}
    got = run.gemm(LANGUAGE, a, b, inputs, out=out)
    assert all(got[name] is out[name] and torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [256, 250])
def test_an_input_is_accumulated_into_in_place(asked: list[KernelSpec], dtype: torch.dtype, n: int) -> None:
    a, b = torch.randn(40, 130).bfloat16().T, torch.randn(40, n).bfloat16().T
    c = torch.randn(130, n).to(dtype)
    truth, address = a.double() @ b.double().T + c.double(), c.data_ptr()
    got = run.gemm(ACCUMULATE, a, b, {"c": c}, dtypes={"c": dtype}, out={"c": c})["c"]
    assert got is c and got.data_ptr() == address
    assert torch.equal(got, truth.to(dtype))
    assert (asked[0].operand.a_major, asked[0].operand.b_major) == (
        "mn",
        "mn" if n == 256 else asked[0].operand.b_major,
    )
    hosted = run.hosted(ACCUMULATE, {"acc": c.clone(), "c": c}, out={"c": c})["c"]
    assert hosted is c and torch.equal(hosted, 2 * truth.to(dtype))


def test_buffers_that_do_not_fit_are_refused(asked: list[KernelSpec]) -> None:
    a, b, c = torch.randn(16, 8).bfloat16(), torch.randn(64, 8).bfloat16(), torch.randn(16, 64).bfloat16()
    two = parse(
        "epilogue two(acc: tile[M, N], c: tile[M, N], r: row[N]) { store x: tile[M, N] = acc + c * r\n"
        "store y: tile[M, N] = acc * c }"
    ).epilogues["two"]
    r, shared = torch.randn(64).bfloat16(), torch.randn(20, 64).bfloat16()
    for out, message in (
        ({"z": c}, "`two` has no output `z`; it has x, y"),
        ({"x": c[:, :32]}, r"bfloat16 tensor of shape \[16, 64\]"),
        ({"x": c.T.contiguous().T}, r"contiguous .* got torch.bfloat16 \[16, 64\] with strides \[1, 16\]"),
        ({"x": c.float()}, "got torch.float32"),
        ({"x": shared[:16], "y": shared[1:17]}, "the buffers for `x` and `y` share memory"),
    ):
        with pytest.raises(CodaCallError, match=message) as caught:
            run.gemm(two, a, b, {"c": c, "r": r}, out=out)
        assert caught.value.argument == "out"
    # a shifted view of the input, an operand, and a vector of the buffer's own memory
    flat = torch.randn(16 * 64 + 64).bfloat16()
    x, late = flat[: 16 * 64].view(16, 64), flat[8 : 8 + 16 * 64].view(16, 64)
    for given, name in (
        ((a, b, {"c": late, "r": r}), "c"),
        ((x[:, :8], b, {"c": c, "r": r}), "a"),
        ((a, flat[512:1024].view(64, 8), {"c": c, "r": r}), "b"),
        ((a, b, {"c": c, "r": flat[960:1024]}), "r"),
    ):
        for _ in range(2):
            with pytest.raises(CodaCallError, match=f"shares memory with `{name}`, which the kernel reads"):
                run.gemm(two, *given, out={"x": x})
    # no kernel reads what is copied before it
    run.gemm(two, a, b, {"c": x.view(64, 16).T, "r": r}, out={"x": x})


def test_of_nothing_a_parameter_that_is_not_used_may_be_missing(asked: list[KernelSpec]) -> None:
    got = run.gemm(LANGUAGE, torch.randn(0, 4).bfloat16(), torch.randn(8, 4).bfloat16(), _language_inputs(0, 8))
    assert got["y"].shape == (0, 8)
    inputs = {"acc": torch.randn(8, 0).bfloat16()} | _language_inputs(8, 0)
    assert run.hosted(LANGUAGE, inputs)["high"].shape == (8,)
    del inputs["target"]
    with pytest.raises(CodaCallError, match="target"):
        run.hosted(LANGUAGE, inputs)


# ---- folded matrices -------------------------------------------------------------------------------------------------

# A weight as a checkpoint keeps it, and the view whose leading dimensions are the rows of the matrix in question.
FOLDED: dict[str, tuple[tuple[int, ...], tuple[int, ...], Folding]] = {
    "gate and up": ((2, 36, 24), (1, 0, 2), Folding((2,))),
    "half-split pairs": ((3, 2, 8, 24), (0, 2, 1, 3), Folding((8, 2))),
    "nothing to fold": ((3, 8, 24), (0, 1, 2), Folding()),
    "a box of no tile": ((14, 6, 24), (1, 0, 2), Folding()),
    "more than a kernel should know": ((512, 2, 24), (1, 0, 2), Folding()),
    "a pitch of no TMA": ((2, 36, 23), (1, 0, 2), Folding()),
}


def _folded(name: str) -> tuple[Tensor, Folding]:
    """The view, and how the kernel sees it."""
    extents, order, folding = FOLDED[name]
    return torch.randn(extents).bfloat16().permute(order), folding


@pytest.mark.parametrize("name", FOLDED)
def test_operands_are_folded(asked: list[KernelSpec], name: str) -> None:
    plain = parse("epilogue plain(acc: tile[M, N]) { store y: tile[M, N]: f32 = acc }").epilogues["plain"]
    w, folding = _folded(name)
    flat = w.reshape(-1, w.shape[-1])
    x, dy = torch.randn(40, flat.shape[1]).bfloat16(), torch.randn(40, flat.shape[0]).bfloat16()
    forward, weight_first = run.gemm(plain, x, w, {})["y"], run.gemm(plain, w, x, {})["y"]
    backward = run.gemm(plain, dy, Matrix(w, w.ndim - 1).T, {})["y"]
    assert torch.equal(forward, (x.double() @ flat.double().T).float())
    assert torch.equal(weight_first, forward.T)
    assert torch.equal(backward, (dy.double() @ flat.double()).float())
    seen = [(spec.operand.a_folding, spec.operand.b_folding) for spec in asked]
    assert seen == [(Folding(), folding), (folding, Folding()), (Folding(), Folding((), folding.rows))]


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_accumulated_in_its_layout(asked: list[KernelSpec], name: str, dtype: torch.dtype) -> None:
    w, folding = _folded(name)
    gradient = w.to(dtype).clone(memory_format=torch.preserve_format)
    assert gradient.stride() == w.stride()
    rows, columns = w.shape[:-1].numel(), w.shape[-1]
    dy, x = torch.randn(40, rows).bfloat16(), torch.randn(40, columns).bfloat16()
    truth = (dy.double().T @ x.double() + gradient.double().reshape(rows, columns)).to(dtype)
    got = run.gemm(ACCUMULATE, dy.T, x.T, {"c": gradient}, dtypes={"c": dtype}, out={"c": gradient})["c"]
    assert got is gradient
    assert torch.equal(got.reshape(rows, columns), truth)
    if name != "a pitch of no TMA":
        assert asked[0].output_foldings == asked[0].input_foldings == (() if folding == Folding() else (folding,))
    plain = {"acc": torch.zeros(rows, columns, dtype=dtype), "c": gradient}
    assert run.hosted(ACCUMULATE, plain, out={"c": gradient})["c"] is gradient
    assert torch.equal(gradient.reshape(rows, columns), truth)


def test_one_kernel_serves_every_extent_of_a_folding(asked: list[KernelSpec]) -> None:
    plain = parse("epilogue plain(acc: tile[M, N]) { store y: tile[M, N] = acc }").epilogues["plain"]
    for features in (36, 40):
        run.gemm(plain, torch.randn(40, 24).bfloat16(), torch.randn(2, features, 24).bfloat16().transpose(0, 1), {})
    assert len(asked) == 2
    assert asked[0] == asked[1]


def test_a_folded_buffer_must_be_dense(asked: list[KernelSpec]) -> None:
    a, b = torch.randn(40, 72).bfloat16().T, torch.randn(40, 24).bfloat16().T
    c = torch.zeros(2, 36, 24)
    for out in (c[:, :, :16].transpose(0, 1), c[:1].expand(2, 36, 24).transpose(0, 1), c.transpose(0, 1)[1:]):
        with pytest.raises(CodaCallError, match="the buffer for `c`"):
            run.gemm(ACCUMULATE, a, b, {"c": c.transpose(0, 1)}, dtypes={"c": torch.float32}, out={"c": out})


READS_LITTLE = parse(
    """
epilogue little(acc: tile[M, N], r: row[N], s: row[B, N]) {
    store y: tile[M, N] = r + 1
    store z: tile[M, N] = 2
    reduce n: row[B, N] = sum(cast(1, f32) + 0 * r)
}
"""
).epilogues["little"]


def test_what_a_kernel_does_not_load_decides_too(asked: list[KernelSpec]) -> None:
    """Extents, samples and dtypes by inputs that the epilogue does not read: of this call, not of one before it."""
    r = torch.randn(16)
    for rows, samples, dtype in ((4, 2, torch.bfloat16), (8, 2, torch.bfloat16), (8, 4, torch.float16)):
        inputs = {"acc": torch.zeros(rows, 16, dtype=dtype), "r": r, "s": torch.zeros(samples, 16)}
        got = run.hosted(READS_LITTLE, inputs)
        assert (got["y"].shape, got["y"].dtype, got["n"].shape) == ((rows, 16), dtype, (samples, 16))
        on_gemm = run.gemm(READS_LITTLE, torch.zeros(8, 64).half(), torch.zeros(16, 64).half(), inputs)
        assert on_gemm["n"].shape == (samples, 16)


def test_where_an_epilogue_without_tensors_runs(asked: list[KernelSpec]) -> None:
    """On the device that is named: there is no tensor to tell it, and none of a call before it does."""
    constant = parse("epilogue constant(s: scalar) { store y: tile[M, N] = s + 1 }").epilogues["constant"]
    twice = parse("epilogue twice(s: scalar) { store y: row[N] = 2 * s }").epilogues["twice"]
    for device in ("cpu", "meta"):
        where = torch.device(device)
        assert run.hosted(constant, {"s": 1.0}, extents=(4, 8), device=where)["y"].device == where
        assert run.vector(twice, {"s": 1.0}, 8, device=where)["y"].device == where
