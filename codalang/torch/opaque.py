"""The torch operator that compilers see in place of a call of an epilogue, and what it has in common with programs'.

    codalang::call      a whole call: checked, differentiable.  Composite: tracers see through it to `run_program`, of
                        the program that an epilogue on its own is

Definitions go by their .coda text: a traced graph means the same in another process, and may be cached on disk.
The text is brought to one line, because compilers copy constants into the comments of what they generate.
In eager mode no such operator is used, because dispatching to Python costs more than the call itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from codalang.ir.epilogue import Epilogue, Param
from codalang.torch.signature import ELEMENTS, FLOATING, Extent, Value

# By name, because torch 2.11 hands a list of dtypes to Python as numbers.
DTYPES = {str(dtype): dtype for dtype in (*FLOATING, torch.int32, torch.int64)}


def is_traced() -> bool:
    """True where some tracer or mode looks on (fake tensors, functionalization, proxies)."""
    return torch._C._len_torch_dispatch_stack() > 0


class Looking(TorchDispatchMode):
    """Looks on and does nothing: within it `is_traced`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def as_tensors(
    values: Sequence[Value], params: Sequence[Param], compute: torch.dtype, device: torch.device | None
) -> list[Tensor]:
    """Numbers among the values as tensors of what their parameters hold; `params` are those of the last values."""
    lead = len(values) - len(params)
    return [
        v if isinstance(v, Tensor) else ELEMENTS[params[i - lead].type.dtype].as_tensor(v, compute, device)
        for i, v in enumerate(values)
    ]


def one_line(text: str) -> str:
    """The text with its line breaks written as `\\n`; printed .coda has no backslash of its own."""
    return text.replace("\n", "\\n")


def in_lines(text: str) -> str:
    """The inverse of `one_line`; a text that has lines already is left alone."""
    return text.replace("\\n", "\n")


@functools.lru_cache(maxsize=1024)
def epilogue_of(text: str) -> Epilogue:
    """The epilogue of a text, in one line or several."""
    from codalang.parser import parse

    (epilogue,) = parse(in_lines(text)).epilogues.values()
    return epilogue


_library: Any = torch.library.Library("codalang", "DEF")
_library.define("call(str text, bool on_gemm, Tensor[] values, SymInt[]? extents) -> Tensor[]")


def _call(text: str, on_gemm: bool, values: Sequence[Tensor], extents: Sequence[Extent] | None) -> list[Tensor]:
    from codalang.torch.module import callable_of

    found = callable_of(text, on_gemm)
    return list(found.call_bound(list(values), None if extents is None else tuple(extents)))


_library.impl("call", _call, "CompositeImplicitAutograd")
