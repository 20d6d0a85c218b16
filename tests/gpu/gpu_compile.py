"""Compiles the kernels of many cases ahead: one takes seconds, and there are hundreds.

Which kernel a case needs is asked of `codalang.lower.run` itself: it is called with uninitialized tensors, and with a
recorder where it would get the compiled function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import gpu_checks
from gpu_cases import Case

from codalang.errors import CodaUnsupportedError
from codalang.lower import run
from codalang.lower.ahead import Compiled, compile_each, recorded
from codalang.lower.spec import KernelSpec

__all__ = ["Compiled", "compile_all", "compile_each", "kernels", "recorded"]


def kernels(cases: Iterable[Case], device: str = "cuda") -> list[KernelSpec]:
    """The kernels that the cases need.  A case that has none is left out: it fails where it runs."""
    with recorded() as specs:
        for case in cases:
            with contextlib.suppress(CodaUnsupportedError):
                gpu_checks.run_case(case, gpu_checks.make_inputs(case, device, contents=False), run)
    return list(specs)


def compile_all(specs: Iterable[KernelSpec], processes: int | None = None) -> None:
    """Bring kernels into the disk cache.  Raises RuntimeError where one does not compile."""
    for spec, compiled in compile_each(specs, processes).items():
        if compiled.error:
            raise RuntimeError(f"{spec.epilogue.name} with {spec.config}: {compiled.error}")
