"""codalang: GEMM epilogues as programs, with their backward derived, for NVIDIA Hopper and PyTorch.

    import codalang
    m = codalang.load("stdlib/swiglu.coda")     # or source text, or a name of the standard library: load("swiglu")
    y = m.swiglu(a, w)                          # swiglu(a @ w.T), differentiable
    print(m.swiglu.backward.source)             # the derived backward, as .coda

Importing this imports neither torch nor the device compiler; `load` imports torch, and the first call on a Hopper GPU
the compiler.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from codalang.errors import (
    CodaCallError,
    CodaCompileError,
    CodaError,
    CodaLocalityError,
    CodaNameError,
    CodaSyntaxError,
    CodaTypeError,
    CodaUnsupportedError,
    Source,
)

if TYPE_CHECKING:
    from codalang.torch import Module

__version__ = "0.1.0"

__all__ = [
    "CodaCallError",
    "CodaCompileError",
    "CodaError",
    "CodaLocalityError",
    "CodaNameError",
    "CodaSyntaxError",
    "CodaTypeError",
    "CodaUnsupportedError",
    "Source",
    "__version__",
    "load",
]


def load(program: str | os.PathLike[str] | Source) -> Module:
    """The epilogues of a program as differentiable functions: `load("swiglu").swiglu(a, w)`.

    Args:
        program: a path (a `Path`, or a str that ends in `.coda` or has a separator), source text (a str with `{` or a
            line break), or a name of the standard library (an identifier).  See `codalang.sources`.

    Raises a CodaError with the place in the program, or CodaCallError where there is no such program.
    """
    from codalang.torch import load

    return load(program)
