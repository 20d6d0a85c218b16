"""Compiles the kernels of many cases ahead, in parallel processes: one takes seconds, and there are hundreds.

Which kernel a case needs is asked of `codalang.lower.run` itself: it is called with uninitialized tensors, and with a
recorder where it would get the compiled function.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import attrs
import gpu_checks
from gpu_cases import Case

from codalang.lower import run
from codalang.lower.load import CodaSlowKernelWarning, library
from codalang.lower.spec import KernelSpec


@contextlib.contextmanager
def recorded() -> Iterator[dict[KernelSpec, None]]:
    """Kernels that `run` would launch, each once, in order; none is compiled or launched."""
    specs: dict[KernelSpec, None] = {}

    def function(spec: KernelSpec) -> Callable[..., None]:
        specs.setdefault(spec)
        return lambda *arguments: None

    original = run.function
    run.function = function
    try:
        yield specs
    finally:
        run.function = original


def kernels(cases: Iterable[Case], device: str = "cuda") -> list[KernelSpec]:
    """The kernels that the cases need."""
    with recorded() as specs:
        for case in cases:
            gpu_checks.run_case(case, gpu_checks.make_inputs(case, device, contents=False), run)
    return list(specs)


@attrs.frozen
class Compiled:
    """How a kernel's compilation went: `remarks` are warnings (of spills, say), `error` what failed."""

    seconds: float
    remarks: tuple[str, ...] = ()
    error: str | None = None


def compile_one(spec: KernelSpec) -> Compiled:
    """Bring a kernel into the disk cache; an error is told, not raised.  A kernel that is there gives no remarks."""
    begin = time.perf_counter()
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            library(spec)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    remarks = [str(w.message) for w in caught if issubclass(w.category, CodaSlowKernelWarning)]
    return Compiled(time.perf_counter() - begin, tuple(remarks), error)


def compile_each(specs: Iterable[KernelSpec], processes: int | None = None) -> dict[KernelSpec, Compiled]:
    """Compile kernels in parallel processes."""
    specs = list(specs)
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return dict(zip(specs, pool.map(compile_one, specs), strict=True))


def compile_all(specs: Iterable[KernelSpec], processes: int | None = None) -> None:
    """Bring kernels into the disk cache.  Raises the first process's error where one does not compile."""
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for _ in pool.map(library, specs):
            pass
