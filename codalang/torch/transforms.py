"""Refusing what calls do not cover: torch.func transforms and forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from codalang.errors import CodaUnsupportedError


def refuse_transforms(values: Sequence[object]) -> None:
    """Raise CodaUnsupportedError inside a transform of torch.func, or for dual tensors."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise CodaUnsupportedError(
            "codalang's functions cannot run inside torch.func transforms (vmap, grad, jvp)",
            hint="use torch.autograd; leading dimensions of `a` are batch dimensions already",
        )
    if forward_ad._current_level >= 0 and any(
        isinstance(v, Tensor) and forward_ad.unpack_dual(v).tangent is not None for v in values
    ):
        raise CodaUnsupportedError(
            "codalang's functions have no forward-mode derivative", hint="use torch.autograd.grad"
        )
