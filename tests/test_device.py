"""Numbers of the device's own functions, in f32 on the CPU."""

from __future__ import annotations

import torch

from codalang.lower import device


def test_the_polynomial_of_1_plus_erf() -> None:
    """As `device.one_plus_erf` computes it, with a product and a sum for each fused step."""
    x = torch.linspace(-12, 12, 400_001)
    magnitude = x.abs().clamp(max=device._ERFC_END)
    exponent = torch.full_like(x, device._ERFC[-1])
    for coefficient in reversed(device._ERFC[:-1]):
        exponent = exponent * magnitude + coefficient
    complement = torch.exp2(exponent * magnitude)
    ours = torch.where(x < 0, complement, 2 - complement)
    assert (ours.double() - torch.special.erfc(-x.double())).abs().max() < 2.5e-7
