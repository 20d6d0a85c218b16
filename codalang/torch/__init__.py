"""The PyTorch side: programs as differentiable functions of tensors.

signature           what a call of an epilogue looks like; checks its arguments
single              the program that it is
execute             runs one epilogue without gradients: kernel or reference
program_plan        runs a program without gradients
program_opaque      the same as a torch operator, for torch.compile and other tracers
program_autograd    the derivative of a call
module              Module and EpilogueFunction, what users hold
"""

from __future__ import annotations

import os

from codalang.errors import Source
from codalang.sources import resolve
from codalang.torch.execute import CodaFallbackWarning, reference_only
from codalang.torch.module import EpilogueFunction, Module, module_of

__all__ = ["CodaFallbackWarning", "EpilogueFunction", "Module", "load", "reference_only"]


def load(program: str | os.PathLike[str] | Source, *, precise: bool = False) -> Module:
    """The epilogues of a program as functions of tensors.  See `codalang.load`."""
    return module_of(resolve(program), precise)
