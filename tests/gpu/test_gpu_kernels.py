"""Every kernel against f64: one test per group of cases and subject.  See gpu_checks for what passes."""

from __future__ import annotations

import gpu_cases
import gpu_checks
import pytest
import torch

GROUPS = ("ragged", "library", "samples", "empty", "near limit", "tilings", "parts", "llama", "huge")
CHOICES = [
    pytest.param(subject, group, id=f"{group}: {subject}")
    for group in GROUPS
    for subject in gpu_cases.subjects()
    if gpu_cases.GROUPS[group](subject)
]


def kernels_needed(items: list[pytest.Item]) -> list:
    """See conftest."""
    import gpu_compile

    choices = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return gpu_compile.kernels(case for c in choices for case in gpu_cases.GROUPS[c["group"]](c["subject"]))


@pytest.mark.parametrize(("subject", "group"), CHOICES)
def test_kernel(subject: gpu_cases.Subject, group: str) -> None:
    from codalang.lower import call, run

    findings = [
        finding for case in gpu_cases.GROUPS[group](subject) for finding in gpu_checks.check(case, run, allocator=call)
    ]
    failures = [str(finding) for finding in findings if not finding.ok]
    assert findings and not failures, f"{len(failures)} of {len(findings)}:\n" + "\n".join(failures[:20])


def test_cublas_loses_as_much_of_its_accumulator_as_the_checks_allow_for() -> None:
    """The accumulator of tensor cores shrinks with K; gpu_checks.TRUNCATION is at most 4 times what cuBLAS's does."""
    k = 14336
    a = torch.randn(4096, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4096, k, device="cuda", dtype=torch.bfloat16)
    exact = a.double() @ b.double().t()
    got = torch.mm(a, b.t(), out_dtype=torch.float32).double()
    lost = 1 - float((got * exact).sum() / exact.square().sum())
    assert gpu_checks.TRUNCATION * k / 4 < lost < gpu_checks.TRUNCATION * k
