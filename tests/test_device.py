"""Numbers of the device's own functions, in f32 on the CPU."""

from __future__ import annotations

import torch

from codalang.lower import device


def one_plus_erf(x: torch.Tensor) -> torch.Tensor:
    magnitude = x.abs()
    near = magnitude.clamp(max=device._ERFC_END)
    exponent = torch.full_like(x, device._ERFC[-1])
    for coefficient in reversed(device._ERFC[:-1]):
        exponent = exponent * near + coefficient
    complement = torch.exp2(exponent * magnitude)
    return torch.where(x < 0, complement, 2 - complement)


def test_1_plus_erf_ends_at_0() -> None:
    """And not a little above it: a factor that is infinite makes NaN of 0."""
    far = torch.tensor([-30.0, -1e4, -torch.inf, 30.0, 1e4, torch.inf])
    assert one_plus_erf(far).tolist() == [0, 0, 0, 2, 2, 2]
    assert one_plus_erf(torch.tensor(torch.nan)).isnan()


def test_the_polynomial_of_1_plus_erf() -> None:
    """As `device.one_plus_erf` computes it, with a product and a sum for each fused step."""
    x = torch.linspace(-12, 12, 400_001)
    ours = one_plus_erf(x)
    assert (ours.double() - torch.special.erfc(-x.double())).abs().max() < 2.5e-7
