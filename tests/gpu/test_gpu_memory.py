"""Where results go and how operands lie: buffers of the caller, accumulation in place, folded matrices, K split.

A buffer lies between guard bands and is NaN before; what a kernel reads in another layout must give the same bits as
a contiguous copy does in the same configuration; everything is run twice.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import gpu_cases
import pytest
import torch
from gpu_checks import GUARD
from torch import Tensor

from codalang.lower import plan, run, split
from codalang.lower.dtypes import DTYPE_NAMES
from codalang.lower.folded import Matrix
from codalang.lower.spec import Config, KernelSpec, Operand
from codalang.parser import parse

ACCUMULATE = parse("epilogue accumulate(acc: tile[M, N], c: tile[M, N]) { store c: tile[M, N] = acc + c }").epilogues[
    "accumulate"
]
PLAIN = parse("epilogue plain(acc: tile[M, N]) { store y: tile[M, N] = acc }").epilogues["plain"]
BF16, F32 = torch.bfloat16, torch.float32


def _normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def _is_exact(got: Tensor, truth: Tensor) -> bool:
    """Whether a result is the truth rounded once to its dtype, after sums in f32."""
    rounded = truth.to(got.dtype).double()
    return float((got.double() - truth).norm()) <= float(1.05 * (rounded - truth).norm() + 1e-5 * truth.norm())


@attrs.frozen
class Guarded:
    """A tensor between two bands of NaN."""

    whole: Tensor
    tensor: Tensor

    @staticmethod
    def of(shape: tuple[int, ...], dtype: torch.dtype) -> Guarded:
        count = torch.Size(shape).numel()
        whole = torch.full((count + 2 * GUARD,), torch.nan, dtype=dtype, device="cuda")
        return Guarded(whole, whole[GUARD : GUARD + count].view(shape))

    def is_sound(self) -> bool:
        """Nothing beside the tensor was written, and all of it was."""
        bands = torch.cat((self.whole[:GUARD], self.whole[-GUARD:]))
        return bool(bands.isnan().all()) and not bool(self.tensor.isnan().any())


TILINGS = (None, *range(len(plan.TILINGS)))
SHORT = (1, 64, 200)
EXTENTS = [(1, 8, 64), (129, 264, 72), (1000, 520, 40), (4096, 4104, 1000), (257, 1001, 130)]


@pytest.mark.parametrize(("m", "n", "k"), EXTENTS)
@pytest.mark.parametrize("name", gpu_cases.CORE)
def test_outputs_go_into_buffers(name: str, m: int, n: int, k: int) -> None:
    import gpu_checks

    case = gpu_cases.Case(gpu_cases.Subject(name, False, True), "bf16", m, gpu_cases.fitted(name, n), k)
    inputs = gpu_checks.make_inputs(case, "cuda")
    epilogue = case.subject.epilogue
    fresh = run.gemm(epilogue, inputs.a, inputs.b, inputs.named)
    for _ in range(2):
        buffers = {key: Guarded.of(tuple(v.shape), v.dtype) for key, v in fresh.items() if v.is_floating_point()}
        got = run.gemm(epilogue, inputs.a, inputs.b, inputs.named, out={key: b.tensor for key, b in buffers.items()})
        for key, buffer in buffers.items():
            assert got[key] is buffer.tensor
            assert torch.equal(got[key], fresh[key]), key
            assert buffer.is_sound(), key
    accumulator = (inputs.a.float() @ inputs.b.float().T).bfloat16()
    given = {epilogue.params[0].name: accumulator} | inputs.named
    fresh = run.hosted(epilogue, given)
    buffers = {key: Guarded.of(tuple(v.shape), v.dtype) for key, v in fresh.items() if v.is_floating_point()}
    run.hosted(epilogue, given, out={key: b.tensor for key, b in buffers.items()})
    for key, buffer in buffers.items():
        assert torch.equal(buffer.tensor, fresh[key]) and buffer.is_sound(), key


def accumulated(m: int, n: int, k: int, dtype: torch.dtype, tiling: int | None) -> tuple[list[Guarded], Tensor, Tensor]:
    """Three results in place, one of another buffer, and the truth."""
    dy, x = _normal(k, m), _normal(k, n)
    kind = DTYPE_NAMES[dtype]
    config = _config(KernelSpec(ACCUMULATE, Operand("bf16", "mn", "mn"), (kind,), (kind,), None), tiling)
    start = _normal(m, n, dtype=dtype)
    in_place = []
    for _ in range(3):
        c = Guarded.of((m, n), dtype)
        c.tensor.copy_(start)
        run.gemm(ACCUMULATE, dy.T, x.T, {"c": c.tensor}, dtypes={"c": dtype}, out={"c": c.tensor}, config=config)
        in_place.append(c)
    apart = run.gemm(ACCUMULATE, dy.T, x.T, {"c": start}, dtypes={"c": dtype}, config=config)["c"]
    return in_place, apart, dy.double().T @ x.double() + start.double()


def _config(spec: KernelSpec, tiling: int | None) -> plan.Config | None:
    return None if tiling is None else next(iter(plan._configurations(spec, plan.TILINGS[tiling])), None)


@pytest.mark.parametrize(("m", "n", "k"), EXTENTS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("tiling", TILINGS)
def test_a_gradient_is_accumulated_in_place(m: int, n: int, k: int, dtype: torch.dtype, tiling: int | None) -> None:
    in_place, apart, truth = accumulated(m, n, k, dtype, tiling)
    assert all(c.is_sound() and torch.equal(c.tensor, apart) for c in in_place)
    assert _is_exact(apart, truth)


# name -> extents for F features, K columns; order of the view
FOLDED: dict[str, tuple[Callable[[int, int], tuple[int, ...]], tuple[int, ...]]] = {
    "gate and up": (lambda f, k: (2, f, k), (1, 0, 2)),
    "heads of 128": (lambda f, k: (f // 64, 2, 64, k), (0, 2, 1, 3)),
    "heads of 64": (lambda f, k: (f // 32, 2, 32, k), (0, 2, 1, 3)),
    "twelve": (lambda f, k: (12, f // 4, k), (1, 0, 2)),
}
PLAIN_SPEC = KernelSpec(PLAIN, Operand("bf16", "k", "k"), (), ("bf16",), None)


def products(name: str, t: int, f: int, k: int, tiling: int | None) -> dict[str, tuple[list[Tensor], Tensor]]:
    """Results of a folded weight and of its copy in two dimensions, and the truth."""
    extents, order = FOLDED[name]
    w = _normal(*extents(f, k)).permute(order)
    flat = w.reshape(-1, k).contiguous()
    x, dy, config = _normal(t, k), _normal(t, len(flat)), _config(PLAIN_SPEC, tiling)

    def product(a: Tensor | Matrix, b: Tensor | Matrix) -> Tensor:
        return run.gemm(PLAIN, a, b, {}, config=config)["y"]

    backward = [product(dy, b) for b in (Matrix(w, w.ndim - 1).T, flat.T, Matrix(w, w.ndim - 1).T)]
    return {
        "forward": ([product(x, b) for b in (w, flat, w)], x.double() @ flat.double().T),
        "weight first": ([product(a, x) for a in (w, flat, w)], flat.double() @ x.double().T),
        "backward": (backward, dy.double() @ flat.double()),
    }


def gradients(
    name: str, t: int, f: int, k: int, dtype: torch.dtype, tiling: int | None
) -> tuple[list[Guarded], list[Tensor], Tensor]:
    """Gradients accumulated in the layout of the weight: the buffers, views of them as the matrix is, and the truth."""
    extents, order = FOLDED[name]
    start, kind = _normal(*extents(f, k), dtype=dtype), DTYPE_NAMES[dtype]
    x, dy = _normal(t, k), _normal(t, start.numel() // k)
    config = _config(KernelSpec(ACCUMULATE, Operand("bf16", "mn", "mn"), (kind,), (kind,), None), tiling)
    buffers, views = [], []
    for _ in range(2):
        buffers.append(Guarded.of(tuple(start.shape), dtype))
        buffers[-1].tensor.copy_(start)
        views.append(buffers[-1].tensor.permute(order))
        c = {"c": views[-1]}
        run.gemm(ACCUMULATE, dy.T, x.T, c, dtypes={"c": dtype}, out=c, config=config)
    before = start.permute(order).double()
    return buffers, views, (dy.double().T @ x.double()).view(before.shape) + before


FOLDED_EXTENTS = [(1, 64, 64), (130, 192, 72), (1000, 448, 136), (2048, 4096, 1032)]


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize(("t", "f", "k"), FOLDED_EXTENTS)
@pytest.mark.parametrize("tiling", TILINGS)
def test_folded_weights_are_read_as_they_lie(name: str, t: int, f: int, k: int, tiling: int | None) -> None:
    for what, (results, truth) in products(name, t, f, k, tiling).items():
        assert torch.equal(results[0], results[2]), what
        # the heuristic may take another tiling for the copy, which gives other sums
        assert tiling is None or torch.equal(results[0], results[1]), what
        assert _is_exact(results[0], truth), what


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize(("t", "f", "k"), FOLDED_EXTENTS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("tiling", TILINGS)
def test_gradients_of_folded_weights_lie_as_they_do(
    name: str, t: int, f: int, k: int, dtype: torch.dtype, tiling: int | None
) -> None:
    buffers, views, truth = gradients(name, t, f, k, dtype, tiling)
    assert all(buffer.is_sound() for buffer in buffers)
    assert torch.equal(*views)
    assert _is_exact(views[0], truth)


def kernels_needed(items: list[pytest.Item]) -> list[KernelSpec]:
    """See conftest."""
    import gpu_compile

    made = {
        test_a_gradient_is_accumulated_in_place: accumulated,
        test_folded_weights_are_read_as_they_lie: products,
        test_gradients_of_folded_weights_lie_as_they_do: gradients,
    }
    with gpu_compile.recorded() as specs:
        for item in items:
            if item.function in made:
                made[item.function](**item.callspec.params)
    for m in SHORT:
        specs.update(dict.fromkeys(attrs.evolve(PLAIN_SPEC, config=config) for config in split_ways(m)))
    return list(specs)


def split_ways(m: int) -> list[Config]:
    """Every tiling for few tiles, with K split in two and in many."""
    return [c for c in split.candidates(PLAIN_SPEC, m, 1032, 8192) if c.split in (2, 8)]


@pytest.mark.parametrize("m", SHORT)
def test_split_sums_do_not_depend_on_who_is_last(m: int) -> None:
    """Many runs, beside other work of the GPU, have the same bits."""
    a, b = _normal(m, 8192), _normal(1032, 8192)
    truth = a.double() @ b.double().T
    other = torch.cuda.Stream()
    for config in split_ways(m):
        first = run.gemm(PLAIN, a, b, {}, config=config)["y"]
        assert _is_exact(first, truth), config
        with torch.cuda.stream(other):
            beside = [run.gemm(PLAIN, a, b, {}, config=config)["y"] for _ in range(10)]
        again = [run.gemm(PLAIN, a, b, {}, config=config)["y"] for _ in range(30)]
        torch.cuda.synchronize()
        assert all(torch.equal(first, y) for y in (*beside, *again)), config


def test_a_split_kernel_can_be_captured() -> None:
    a, b = _normal(16, 4096), _normal(256, 4096)
    expected = run.gemm(PLAIN, a, b, {})["y"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run.gemm(PLAIN, a, b, {})["y"]
    for _ in range(3):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)
