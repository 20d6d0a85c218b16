"""The kernels of a program, forward and backward: what `emit` and `compile` lower.

The program is called with tensors that have shapes but no memory, and each kernel that the call would launch on a
Hopper GPU is noted instead (`torch.execute.rehearsal`), so these are the kernels of a real call at these sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import attrs

from codalang.cli.sizes import TYPICAL, all_sizes
from codalang.cli.traffic import values
from codalang.ir.module import Module
from codalang.ir.program import Program
from codalang.ir.types import Dtype
from codalang.lower.spec import KernelSpec


@attrs.frozen
class Kernels:
    """Distinct kernels in the order of their first launch, and why some statements have none, if any."""

    specs: tuple[KernelSpec, ...]
    fallbacks: tuple[str, ...]


def kernels(
    module: Module, program: Program, given: Mapping[str, int], dtype: str, backward: bool
) -> tuple[Kernels, dict[str, int]]:
    """The kernels of a program at these sizes (others: usual ones), and all sizes.

    With `backward` those of the backward for the gradients of all tensors, too; the forward is then the one that saves.
    """
    import torch

    from codalang.torch import CodaFallbackWarning
    from codalang.torch import Module as Functions
    from codalang.torch.execute import rehearsal

    sizes = all_sizes(program, given, TYPICAL)
    arguments = _arguments(program, sizes, dtype, backward)
    with rehearsal() as specs, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = Functions(module)[program.name](**arguments)
        results = [found] if isinstance(found, torch.Tensor) else list(found)
        outputs = [r for r in results if r.requires_grad]
        wanted = [v for v in arguments.values() if isinstance(v, torch.Tensor) and v.requires_grad]
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, [torch.empty_like(r) for r in outputs], allow_unused=True)
    reasons = dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, CodaFallbackWarning))
    return Kernels(tuple(specs), tuple(reasons)), sizes


def _arguments(program: Program, sizes: Mapping[str, int], dtype: str, backward: bool) -> dict[str, Any]:
    """Tensors without memory; scalars are their defaults, or 1."""
    import torch

    from codalang.ir.reference import TORCH_DTYPES

    stored = values(program, dtype)
    arguments: dict[str, Any] = {}
    for param in program.params:
        if not param.type.shape:
            usual: float | bool = {Dtype.F32: 1.0, Dtype.I32: 1, Dtype.BOOL: True}[param.type.dtype]
            arguments[param.name] = usual if param.default is None else param.default
            continue
        kept_in = TORCH_DTYPES[stored[param.name].dtype]
        shape = [int(extent.evaluate(sizes)) for extent in param.type.shape]
        tensor = torch.empty(shape, dtype=kept_in, device="meta")
        arguments[param.name] = tensor.requires_grad_(backward and kept_in.is_floating_point)
    return arguments
