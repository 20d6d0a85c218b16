"""codalang: GEMM epilogues as programs, with their backward derived, for NVIDIA Hopper and PyTorch.

    import codalang
    m = codalang.load("stdlib/swiglu.coda")     # or source text, or a name of the standard library: load("swiglu")
    y = m.swiglu(a, w)                          # swiglu(a @ w.T), differentiable
    print(m.swiglu.backward.source)             # the derived backward, as .coda

    @codalang.epilogue                          # the same in Python; see codalang.builder
    def swiglu(acc: tile[M, N]): ...

Importing this imports neither torch nor the device compiler; `load` imports torch, and the first call on a Hopper GPU
the compiler.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

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
    from codalang.builder.shapes import Dim
    from codalang.builder.states import Transform
    from codalang.torch import EpilogueFunction, Module

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
    "epilogue",
    "load",
    "state",
]


def load(program: str | os.PathLike[str] | Source, *, precise: bool = False) -> Module:
    """The epilogues of a program as differentiable functions: `load("swiglu").swiglu(a, w)`.

    Args:
        program: a path (a `Path`, or a str that ends in `.coda` or has a separator), source text (a str with `{` or a
            line break), or a name of the standard library (an identifier).  See `codalang.sources`.
        precise: every epilogue is a `precise epilogue`: kernels compute exp, log, tanh and the like to the last digit
            or two, not fast.

    Raises a CodaError with the place in the program, or CodaCallError where there is no such program.
    """
    from codalang.torch import load

    return load(program, precise=precise)


@overload
def epilogue(function: Callable[..., None]) -> EpilogueFunction: ...


@overload
def epilogue(
    *, name: str | None = None, dims: tuple[Dim | str, Dim | str] | None = None, precise: bool = False
) -> Callable[[Callable[..., None]], EpilogueFunction]: ...


def epilogue(function: Callable[..., None] | None = None, **options: Any) -> Any:
    """The epilogue that a Python function means, as a differentiable function; see `codalang.builder`.

    Args:
        function: a function of values, its parameters annotated with shapes.
        name: the epilogue's name, if not the function's.
        dims: the symbols of rows and columns, where the shapes do not say both.
        precise: kernels compute exp, log, tanh and the like to the last digit or two, not fast.

    Raises a CodaError with the line of Python that is wrong.
    """
    from codalang.builder import build
    from codalang.torch import EpilogueFunction

    if function is None:
        return functools.partial(epilogue, **options)
    made = EpilogueFunction(build(function, **options))
    for attribute in ("__module__", "__qualname__", "__doc__"):  # its arguments are a matmul's, not the function's
        setattr(made, attribute, getattr(function, attribute))
    return made


@overload
def state(definition: type) -> Transform: ...


@overload
def state(*, name: str) -> Callable[[type], Transform]: ...


def state(definition: type | None = None, *, name: str | None = None) -> Any:
    """The stateful transform that a Python class means; see `codalang.builder.states`.

    Args:
        definition: the class.
        name: the transform's name, if not the class's.

    Raises a CodaError with the line of Python that is wrong.
    """
    from codalang.builder.states import define

    return functools.partial(define, name=name) if definition is None else define(definition, name)
