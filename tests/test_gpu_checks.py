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

import codalang.parser
from codalang.ir import reference
from codalang.ir.epilogue import Epilogue
from codalang.ir.types import Dtype

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

import gpu_cases  # noqa: E402
import gpu_checks  # noqa: E402
from gpu_cases import Case, Subject  # noqa: E402

Results = dict[str, Tensor]
SUBJECTS = [Subject(*c) for c in itertools.product(gpu_cases.SOURCES, (False, True), (True, False))]


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
        self,
        e: Epilogue,
        a: Tensor,
        b: Tensor,
        inputs: Mapping[str, Tensor],
        *,
        config: object = None,
        samples: int | None = None,
    ) -> Results:
        accumulator = a.float() @ b.float().t() * (1 - self.shrink * a.shape[1])
        width = e.params[0].type.width or 1
        extents = (len(a), int(len(b) / width), samples or 0)
        return self._run(e, {e.params[0].name: accumulator, **inputs}, a.dtype, extents, inputs)

    def hosted(
        self,
        e: Epilogue,
        inputs: Mapping[str, Tensor],
        *,
        extents: tuple[int, ...] | None = None,
        default_dtype: torch.dtype | None = None,
    ) -> Results:
        assert default_dtype is not None
        return self._run(e, inputs, default_dtype, extents, inputs)

    def _run(
        self,
        e: Epilogue,
        values: Mapping[str, Tensor],
        dtype: torch.dtype,
        extents: tuple[int, ...] | None,
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
    narrow, wide = (gpu_cases.fitted(subject.name, n) for n in (24, 130))
    ragged = Case(subject, "f16", 129, wide, 40, **layouts)
    expanded = Case(subject, "bf16", 7, narrow, 8, a="expanded rows", b="expanded columns", vector="expanded")
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


def _changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Results]:
    return lambda results, inputs: results | {name: change(results[name])}


def _guard_of_an_index(results: Results, inputs: Mapping[str, Tensor]) -> Results:
    at = results["at"]
    at.as_strided((1,), (1,), at.storage_offset() + at.numel()).fill_(0)
    return results


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
        (_changed("high", lambda t: t.clamp(min=0)), "every_group", "`high` error"),  # a padding lane's zero
        (_changed("least", lambda t: t.clamp(max=0)), "every_group", "`least` error"),
        (_changed("peak", lambda t: t.roll(1, -1)), "every_group", "`peak` error"),
        (_changed("at", lambda t: (t + 1) % 104), "every_state", "`at` error"),
        (_changed("index", lambda t: t + 104), "every_state", "inf or NaN that must be finite"),
        (_changed("count", lambda t: t + 24), "every_state", "63 of 63 integers are wrong"),
        (_changed("var", lambda t: t * 1.001), "every_state", "`var` error"),
        (_guard_of_an_index, "every_state", "written past its ends"),
        (_changed("logit", lambda t: t.roll(1)), "every_index", "`logit` error"),
        (_changed("scales", lambda t: t - 1), "every_index", "`scales` error"),  # row_index of another row
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


def test_an_index_of_an_equal_element_is_right() -> None:
    """Where elements tie, the kernel's choice is not the reference's; nor where they differ by less than rounding."""
    program = "epilogue ties(acc: tile[M, N]) {\nstate (top, at): col[M] = argmax(acc * 0, col_index())\n}"
    gpu_cases.add("ties", codalang.parser.parse(program).epilogues["ties"])
    for on_gemm in (True, False):
        case = small("ties", backward=False, on_gemm=on_gemm)
        assert failures(case, StandIn(_changed("at", lambda t: t + 3))) == []
        assert failures(case, StandIn(_changed("at", lambda t: t + 200)))


def test_noise_is_allowed_for_where_a_program_enlarges_it() -> None:
    """A difference of nearly equal values, of which f32 has lost the last digits; but nothing is left in between."""
    program = "epilogue loss(acc: tile[M, N]) {\nreduce s: col[M] = sum((acc * 3 + 30000) - 30000)\n}"
    gpu_cases.add("loss", codalang.parser.parse(program).epilogues["loss"])
    case = small("loss", backward=False, on_gemm=True)
    assert failures(case, StandIn()) == []
    assert failures(case, StandIn(_changed("s", lambda t: t * 1.05)))


def test_noise_changes_every_value_but_those_that_are_loaded() -> None:
    e = gpu_cases.source("every_index")
    noisy = gpu_checks.with_noise(e, exact=True)
    computed = [n for n in e.nodes if n.op not in ("param", "const") and n.type.dtype is Dtype.F32]
    assert len(noisy.params) - len(e.params) == len(computed) > 5
    assert len(gpu_checks.with_noise(e, exact=False).params) == len(noisy.params) + 1


def test_infinity_times_what_f32_has_no_number_for() -> None:
    """In f64 infinite, in f32 NaN: either is right, but not one here and the other there, nor what is finite."""
    program = "epilogue tiny(acc: tile[M, N]) {\nstore y: tile[M, N] = 1 / abs(acc * 0) * exp(acc * 0 - 120)\n}"
    gpu_cases.add("tiny", codalang.parser.parse(program).epilogues["tiny"])
    for on_gemm in (True, False):
        case = small("tiny", backward=False, on_gemm=on_gemm)
        assert failures(case, StandIn()) == []
        assert failures(case, StandIn(_changed("y", lambda t: t.nan_to_num(torch.inf)))) == []
        for wrong in (1.0, -torch.inf):
            assert failures(case, StandIn(_changed("y", lambda t, wrong=wrong: t.nan_to_num(wrong))))
        assert failures(case, StandIn(_changed("y", lambda t: torch.cat((t[:1].nan_to_num(torch.inf), t[1:])))))


def test_the_whole_library_has_kernels() -> None:
    """Every epilogue on every host, but for those without a tile that a matmul could compute."""
    without = {s for s in SUBJECTS if gpu_cases.lacking(s)}
    assert all(s.on_gemm and s.epilogue.accumulator is None for s in without), without
    assert {s.name for s in gpu_cases.subjects()} == set(gpu_cases.SOURCES)
    for subject in gpu_cases.subjects():
        assert gpu_cases.ragged(subject) or gpu_cases.library(subject)


def test_pairwise_covers_every_pair_in_few_rows() -> None:
    factors = {"x": range(6), "y": "abcd", "z": (True, False), "u": range(5)}
    rows = list(gpu_cases.pairwise(factors))
    for first in factors:
        for second in factors:
            if first < second:
                wanted = {(v, w) for v in factors[first] for w in factors[second]}
                assert {(row[first], row[second]) for row in rows} == wanted
    assert len(rows) < 60  # 240 in the whole product; 30 is the least there can be


@pytest.mark.parametrize("name", ["logsumexp", "every_state", "residual_rms"])
@pytest.mark.parametrize("backward", [False, True])
def test_the_kernels_compiled_ahead_are_those_that_run(name: str, backward: bool) -> None:
    """Uninitialized inputs have the dtypes and layouts of real ones."""
    case = small(name, backward=backward, on_gemm=False, vector="strided", tile="odd pitch")
    forms = [
        {
            key: (t.dtype, t.shape, t.stride())
            for key, t in gpu_checks.make_inputs(case, "cpu", contents=c).named.items()
        }
        for c in (False, True)
    ]
    assert forms[0] == forms[1]
