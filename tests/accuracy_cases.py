"""What the functions of kernels are checked on: arguments over the range that a bound is for, and the bounds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from codalang.ir.evaluate import OP_FUNCTIONS
from codalang.lower.accuracy import ACCURACY, Bound

EXPONENTS = (1.7, -0.5, 3.0, -1.0, 7.0, 0.5, 2.0)


def allowed(bound: Bound, x: Tensor, y: Tensor) -> Tensor:
    """The largest error that a bound allows."""
    per = {"": torch.zeros_like(x), "x": x.abs(), "power": y.abs().log2().abs()}[bound.per]
    return (bound.ulp + bound.growth * per) * 2.0**-23 * y.abs() + bound.absolute


def arguments_of(op: str) -> Tensor:
    """f32 arguments over the whole range that a bound is for: evenly, and near its ends and zero."""
    low, high = ACCURACY[op].arguments
    generator = torch.Generator().manual_seed(0)
    if low > 0:
        drawn = torch.rand(100_000, generator=generator, dtype=torch.float64)
        return torch.exp2(math.log2(low) + drawn * (math.log2(high) - math.log2(low))).float()
    even = low + torch.rand(50_000, generator=generator, dtype=torch.float64) * (high - low)
    small = torch.randn(25_000, generator=generator, dtype=torch.float64)
    turns = torch.arange(25_000, dtype=torch.float64) * math.pi / 2  # near zeros and extrema of sin and cos
    return torch.cat((even, small, turns.clamp(max=high))).float()


def exactly(op: str, x: Tensor, exponent: float | None) -> Tensor:
    """The function in f64."""
    if op == "div":
        return 1.0 / x.double()
    function = OP_FUNCTIONS[op]
    return function(x.double()) if exponent is None else function(x.double(), exponent)


def cases() -> list[tuple[str, float | None]]:
    """Each op, and its exponent if it has one."""
    return [(op, e) for op in ACCURACY for e in (EXPONENTS if op == "pow" else (None,))]


def finite(op: str, truth: Tensor) -> Tensor:
    """Where a bound holds: the result is a normal number of f32, or one of sin and cos, which come near zero."""
    if op in ("sin", "cos"):
        return torch.ones_like(truth, dtype=torch.bool)
    return (truth.abs() > 2.0**-126) & (truth.abs() < 2.0**127)
