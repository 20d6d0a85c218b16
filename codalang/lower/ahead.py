"""Kernels compiled ahead of the calls that need them, in parallel processes: one takes seconds, and there are many.

    with recorded() as specs: run.gemm(...)     which kernels calls would launch; none is compiled or launched
    compile_each(specs)                         brings them into the disk cache

Calls may be recorded with tensors on `meta`, which have no memory: neither step needs a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import as_completed

from codalang.lower import run
from codalang.lower.load import disk_cache
from codalang.lower.spec import KernelSpec
from codalang.lower.worker import Compiled, compile_one
from codalang.lower.workers import Workers, cores


@contextlib.contextmanager
def recorded() -> Iterator[dict[KernelSpec, None]]:
    """Kernels that `run` would launch, each once, in order; none is compiled or launched."""
    specs: dict[KernelSpec, None] = {}

    def function(spec: KernelSpec) -> Callable[..., None]:
        specs.setdefault(spec)
        return lambda *arguments: None

    original, vars(run)["function"] = run.function, function
    try:
        yield specs
    finally:
        vars(run)["function"] = original


def compile_each(
    specs: Iterable[KernelSpec],
    processes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[KernelSpec, Compiled]:
    """Compile kernels in parallel processes (default: as many as there are cores), or here where none is to be had.
    `progress` is told how many of how many are done, from none to all."""
    specs = list(dict.fromkeys(specs))
    progress(0, len(specs))
    if not specs:
        return {}
    found: dict[KernelSpec, Compiled] = {}
    workers = Workers(processes or cores(), disk_cache().root)
    try:
        futures = {workers.submit(spec): spec for spec in specs}
        for future in as_completed(futures):
            spec = futures[future]
            found[spec] = compile_one(spec) if future.exception() else future.result()
            progress(len(found), len(specs))
    finally:
        workers.stop()
    return {spec: found[spec] for spec in specs}
