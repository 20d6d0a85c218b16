"""Refusing what calls do not cover: torch.func transforms, forward-mode differentiation, batches of gradients, and
torch.jit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from codalang.errors import CodaUnsupportedError


def refuse_transforms(values: Sequence[object]) -> None:
    """Raise CodaUnsupportedError inside a transform of torch.func or torch.jit.trace, or for dual tensors."""
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
    if torch._C._get_tracing_state() is not None:
        raise CodaUnsupportedError(
            "codalang's functions cannot be traced by torch.jit", hint="use torch.compile or torch.export"
        )


_is_batched, _is_legacy_batched = torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor


def refuse_batches(cotangents: Sequence[Tensor | None]) -> None:
    """Raise CodaUnsupportedError where many cotangents of one result come as a tensor."""
    if any([c is not None and (_is_batched(c) or _is_legacy_batched(c)) for c in cotangents]):
        raise CodaUnsupportedError(
            "the gradients of codalang's functions cannot be computed in a batch (is_grads_batched, vectorize, vmap)",
            hint="call torch.autograd.grad once for each cotangent; of jacobian and hessian leave vectorize=False",
        )
