"""A process that compiles kernels for another, which started it and talks to it through its standard streams.

    in     pickled specs, each inside a pickled string of bytes, so that one that cannot be read ends nothing
    out    "ready", then pickled `Compiled`, in the same order

It imports neither torch nor the program of whoever started it, is shown no GPU, and dies with the process that it works
for, wherever it is in its work.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import time
import warnings

import attrs

from codalang.lower.cache import CodaCacheWarning
from codalang.lower.load import CodaSlowKernelWarning, library
from codalang.lower.spec import KernelSpec

_PR_SET_PDEATHSIG = 1


@attrs.frozen
class Compiled:
    """How a kernel's compilation went: `remarks` are warnings (of spills, say), `error` what failed, and `is_kept` is
    false where the disk cache took nothing."""

    seconds: float
    remarks: tuple[str, ...] = ()
    error: str | None = None
    is_kept: bool = True


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
    remarks = tuple(str(w.message) for w in caught if issubclass(w.category, CodaSlowKernelWarning))
    is_kept = not any(issubclass(w.category, CodaCacheWarning) for w in caught)
    return Compiled(time.perf_counter() - begin, remarks, error, is_kept)


def _compile_pickled(data: bytes) -> Compiled:
    try:
        spec = pickle.loads(data)
    except Exception as raised:
        return Compiled(0.0, error=f"{type(raised).__name__}: {raised}")
    return compile_one(spec)


def main(parent: int) -> None:
    """Compile what process `parent` asks for, until it asks for nothing more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before
            return
    # what compilers read and print goes nowhere near the questions and answers
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nowhere, stream)
    pickle.dump("ready", answers)
    answers.flush()
    while True:
        try:
            data = pickle.load(asked)
        except EOFError:
            return
        pickle.dump(_compile_pickled(data), answers)
        answers.flush()
