"""The GPU tests' own check, tested where there is no GPU: it passes a right kernel and fails each kind of wrong one.

The stand-in for `lower.run` computes in f32 and rounds what it stores, as a kernel does, and writes into tensors from
its own `empty`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

from codalang.ir import reference
from codalang.ir.epilogue import Epilogue

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

import gpu_cases  # noqa: E402
import gpu_checks  # noqa: E402
from gpu_cases import Case, Subject  # noqa: E402

Results = dict[str, Tensor]


def no_fault(results: Results, inputs: Mapping[str, Tensor]) -> Results:
    return results


class StandIn:
    """Runs the reference in f32, then lets `fault` spoil the results."""

    def __init__(
        self, fault: Callable[[Results, Mapping[str, Tensor]], Results] = no_fault, shrink: float = 0.0
    ) -> None:
        self.fault = fault
        self.shrink = shrink  # of the accumulator, per element of K

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def gemm(
        self, e: Epilogue, a: Tensor, b: Tensor, inputs: Mapping[str, Tensor], *, config: object = None
    ) -> Results:
        accumulator = a.float() @ b.float().t() * (1 - self.shrink * a.shape[1])
        width = e.params[0].type.width or 1
        return self._run(e, {e.params[0].name: accumulator, **inputs}, a.dtype, (len(a), int(len(b) / width)), inputs)

    def hosted(self, e: Epilogue, inputs: Mapping[str, Tensor], *, extents: tuple[int, int] | None = None) -> Results:
        assert e.accumulator is not None
        return self._run(e, inputs, inputs[e.accumulator.name].dtype, extents, inputs)

    def _run(
        self,
        e: Epilogue,
        values: Mapping[str, Tensor],
        dtype: torch.dtype,
        extents: tuple[int, int] | None,
        inputs: Mapping[str, Tensor],
    ) -> Results:
        storage = reference.Storage(dtype)
        results = reference.run(e, values, dtype=torch.float32, extents=extents, storage=storage)
        written = {}
        for name, result in results.items():
            written[name] = self.empty(tuple(result.shape), dtype=result.dtype, device=result.device).copy_(result)
        return self.fault(written, inputs)


def small(name: str, *, backward: bool, on_gemm: bool, **changes: object) -> Case:
    case = Case(Subject(name, backward, on_gemm), "bf16", 63, 104, 72, vector_dtype="same")
    return attrs.evolve(case, **changes)


def failures(case: Case, stand_in: StandIn) -> list[str]:
    findings = gpu_checks.check(case, stand_in, device="cpu", allocator=stand_in)
    assert findings
    return [str(finding) for finding in findings if not finding.ok]


@pytest.mark.parametrize("subject", gpu_cases.subjects(), ids=str)
def test_a_right_kernel_passes(subject: Subject) -> None:
    layouts = {"a": "odd base", "b": "column", "tile": "every other column", "vector": "strided"}
    ragged = Case(subject, "f16", 129, 130, 40, **layouts)
    expanded = Case(subject, "bf16", 7, 24, 8, a="expanded rows", b="expanded columns", vector="expanded")
    for case in (ragged, expanded, *gpu_cases.empty(subject), *gpu_cases.near_limit(subject)[:1]):
        assert failures(case, StandIn()) == []


def _unwritten(results: Results, inputs: Mapping[str, Tensor]) -> Results:
    next(iter(results.values())).view(-1)[-1] = torch.nan
    return results


def _past_the_end(results: Results, inputs: Mapping[str, Tensor]) -> Results:
    first = next(iter(results.values()))
    first.as_strided((1,), (1,), first.storage_offset() + first.numel()).fill_(0)
    return results


def _truncated(results: Results, inputs: Mapping[str, Tensor]) -> Results:
    # One ulp off in half of the elements: what truncation instead of rounding to nearest does.
    first = next(iter(results.values()))
    bits = first.view(torch.int16)
    bits[::2] ^= 1
    return results


def _swapped_columns(results: Results, inputs: Mapping[str, Tensor]) -> Results:
    first = next(iter(results.values()))
    first[:, [0, 1]] = first[:, [1, 0]]
    return results


def _input_written(results: Results, inputs: Mapping[str, Tensor]) -> Results:
    next(iter(inputs.values())).view(-1)[0] += 1
    return results


def _moving() -> Callable[[Results, Mapping[str, Tensor]], Results]:
    """The last bit of one element changes from run to run, as with atomics."""
    flips = itertools.cycle((0, 1))

    def spoil(results: Results, inputs: Mapping[str, Tensor]) -> Results:
        next(iter(results.values())).view(-1)[:1].view(torch.int16)[0] ^= next(flips)
        return results

    return spoil


def _wrong_dtype(results: Results, inputs: Mapping[str, Tensor]) -> Results:
    return {name: result.float() for name, result in results.items()}


def _strided(results: Results, inputs: Mapping[str, Tensor]) -> Results:
    return {name: torch.stack((result, result), -1)[..., 0] for name, result in results.items()}


def _missing(results: Results, inputs: Mapping[str, Tensor]) -> Results:
    return dict(list(results.items())[:-1])


def _padding_summed(results: Results, inputs: Mapping[str, Tensor]) -> Results:
    # A sum over a tile of 128 columns of which 104 exist, where a padding lane contributes exp(0).
    return results | {"per_row": results["per_row"] + 24}


@pytest.mark.parametrize(
    ("fault", "name", "message"),
    [
        (_unwritten, "residual_rms", "inf or NaN that must be finite"),
        (_past_the_end, "residual_rms", "written past its ends"),
        (_truncated, "residual_rms", "error"),
        (_swapped_columns, "residual_rms", "error"),
        (_input_written, "residual_rms", "an input was written into"),
        (_moving(), "residual_rms", "differs between two runs"),
        (_wrong_dtype, "residual_rms", "expected torch.bfloat16"),
        (_strided, "residual_rms", "not contiguous"),
        (_missing, "residual_rms", "outputs are"),
        (_padding_summed, "every_feature", "`per_row` error"),
    ],
)
def test_a_wrong_kernel_fails(fault: Callable[..., Results], name: str, message: str) -> None:
    found = failures(small(name, backward=False, on_gemm=True), StandIn(fault))
    assert any(message in text for text in found), found


def test_f32_results_are_held_to_1e_5() -> None:
    def off(results: Results, inputs: Mapping[str, Tensor]) -> Results:
        return results | {"ss": results["ss"] * (1 + 2e-5)}

    case = small("residual_rms", backward=False, on_gemm=True)
    assert [text for text in failures(case, StandIn(off)) if "`ss`" in text]


def test_what_tensor_cores_truncate_is_allowed_for_and_no_more() -> None:
    case = small("residual_rms", backward=False, on_gemm=True, k=14336)
    assert failures(case, StandIn(shrink=2.0**-30)) == []
    assert [text for text in failures(case, StandIn(shrink=2.0**-27)) if "`ss`" in text]


def test_pairwise_covers_every_pair_in_few_rows() -> None:
    factors = {"x": range(6), "y": "abcd", "z": (True, False), "u": range(5)}
    rows = list(gpu_cases.pairwise(factors))
    for first in factors:
        for second in factors:
            if first < second:
                wanted = {(v, w) for v in factors[first] for w in factors[second]}
                assert {(row[first], row[second]) for row in rows} == wanted
    assert len(rows) < 60  # 240 in the whole product; 30 is the least there can be
