"""Ways to do a workload.  Each makes of a workload and its operands a call, which is all that is timed.

| name          | is                                                                                            |
|---------------|-----------------------------------------------------------------------------------------------|
| codalang      | ours                                                                                          |
| cublas        | the GEMM alone, by torch.matmul: the point of reference                                       |
| copy          | a copy that reads and writes as many bytes: the point of reference of what is hosted          |
| eager         | plain torch (`plain`)                                                                         |
| compile       | the same through torch.compile                                                                |
| max-autotune  | the same through torch.compile in mode max-autotune, without CUDA graphs                      |
| liger, quack, coda | other libraries (`rivals`), where they are installed                                     |

Results come back in our names and order of columns, so that all can be compared with one reference.  A way that does
less (it has no scale, say) returns fewer results, and says so in its note.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch
from torch import Tensor

from codalang.bench import plain
from codalang.bench.workloads import Operands, Workload
from codalang.lower import run

Results = Mapping[str, Tensor]


class Skipped(Exception):
    """A way does not do this workload; the text says why."""


def _same(results: Results) -> Results:
    return results


@attrs.frozen
class Way:
    """A workload made ready.

    Attributes:
        call: what is timed.
        restore: its results in our names and order of columns; those that cannot be compared are left out.
        note: what it does less, or otherwise, than the others.
    """

    call: Callable[[], Results]
    restore: Callable[[Results], Results] = _same
    note: str = ""


Implementation = Callable[[Workload, Operands], Way]


def codalang(workload: Workload, operands: Operands) -> Way:
    """Ours, by the functions that the PyTorch layer calls."""
    epilogue, a, b, inputs = workload.epilogue, operands.a, operands.b, operands.inputs
    if a is None or b is None:
        extents = (workload.extents[0], workload.unit)
        return Way(lambda: run.hosted(epilogue, inputs, extents=extents))
    return Way(lambda: run.gemm(epilogue, a, b, inputs))


def cublas(workload: Workload, operands: Operands) -> Way:
    """The GEMM alone."""
    a, b = operands.a, operands.b
    if a is None or b is None:
        raise Skipped("there is no GEMM")
    plain_gemm = workload.pattern.group == "gemm"
    return Way(lambda: {"y": torch.matmul(a, b.t())}, _same if plain_gemm else lambda results: {})


def copy(workload: Workload, operands: Operands) -> Way:
    """A copy of as many bytes as the epilogue moves."""
    if workload.on_gemm:
        raise Skipped("there is a GEMM")
    device = next(iter(operands.inputs.values())).device
    source = torch.empty(workload.tile_bytes // 2, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return Way(lambda: {"copy": target.copy_(source)}, lambda results: {})


def eager(workload: Workload, operands: Operands) -> Way:
    """Plain torch."""
    if workload.pattern.group == "gemm":
        raise Skipped("it is cuBLAS")
    function, arguments = _plain(workload, operands)
    return Way(lambda: function(*arguments), lambda results: plain.restored(workload, results))


def compiled(mode: str | None, backend: str = "inductor") -> Implementation:
    """Through torch.compile in that mode."""

    def make(workload: Workload, operands: Operands) -> Way:
        if workload.pattern.group == "gemm" and mode is None:
            raise Skipped("it is cuBLAS")
        torch._dynamo.reset()  # it gives up on a function that it has compiled for many shapes
        function, arguments = _plain(workload, operands)
        call = torch.compile(function, fullgraph=True, dynamic=False, mode=mode, backend=backend)
        return Way(lambda: call(*arguments), lambda results: plain.restored(workload, results))

    return make


def _plain(workload: Workload, operands: Operands) -> tuple[Callable[..., dict[str, Tensor]], tuple[object, ...]]:
    """Plain torch as a function and its arguments."""
    maths, given = plain.maths(workload), plain.prepared(workload, operands)
    if given.a is None:
        first = workload.epilogue.params[0].name
        inputs = dict(given.inputs)
        return maths, (inputs.pop(first), inputs)

    def function(a: Tensor, b: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return maths(torch.matmul(a, b.t()), inputs)

    return function, (given.a, given.b, given.inputs)


def implementations() -> dict[str, Implementation]:
    """All, by name."""
    from codalang.bench import rivals

    return {
        "codalang": codalang,
        "cublas": cublas,
        "copy": copy,
        "eager": eager,
        "compile": compiled(None),
        "max-autotune": compiled("max-autotune-no-cudagraphs"),
        "liger": rivals.liger,
        "quack": rivals.quack,
        "coda": rivals.coda,
    }


BASELINES = ("cublas", "copy")
ALWAYS = ("codalang", *BASELINES)


def baseline(workload: Workload) -> str:
    """What the workload's ratios are to."""
    return "cublas" if workload.on_gemm else "copy"
