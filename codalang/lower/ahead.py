"""Kernels compiled ahead of the calls that need them, in parallel processes: one takes seconds, and there are many.

    with recorded() as specs: run.gemm(...)     which kernels calls would launch; none is compiled or launched
    compile_each(specs)                         brings them into the disk cache

Calls may be recorded with tensors on `meta`, which have no memory: neither step needs a GPU.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from types import ModuleType

import attrs

from codalang.lower import call, decide, plan, run
from codalang.lower.load import CodaSlowKernelWarning, library
from codalang.lower.spec import KernelSpec


@contextlib.contextmanager
def recorded() -> Iterator[dict[KernelSpec, None]]:
    """Kernels that `run` would launch, each once, in order; none is compiled or launched."""
    specs: dict[KernelSpec, None] = {}

    def function(spec: KernelSpec) -> Callable[..., None]:
        specs.setdefault(spec)
        return lambda *arguments: None

    stands_in: tuple[tuple[ModuleType, str, object], ...] = (
        (run, "function", function),
        (decide, "_sms", lambda device: plan.SMS),
        (call, "check_sharing", lambda *arguments: None),  # tensors without memory share none
    )
    originals = [(module, name, vars(module)[name]) for module, name, _ in stands_in]
    for module, name, value in stands_in:
        setattr(module, name, value)
    try:
        yield specs
    finally:
        for module, name, value in originals:
            setattr(module, name, value)


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


def compile_each(
    specs: Iterable[KernelSpec],
    processes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[KernelSpec, Compiled]:
    """Compile kernels in parallel processes (default: as many as there are cores).  `progress` is told how many of how
    many are done, from none to all."""
    specs = list(dict.fromkeys(specs))
    progress(0, len(specs))
    if not specs:
        return {}
    workers = min(processes or os.cpu_count() or 1, len(specs))
    found: dict[KernelSpec, Compiled] = {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(compile_one, spec): spec for spec in specs}
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            progress(len(found), len(specs))
    return {spec: found[spec] for spec in specs}
