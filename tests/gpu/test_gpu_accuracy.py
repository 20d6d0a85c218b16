"""Transcendental functions of kernels against their documented bounds, fast and precise, over all of f32's range."""

from __future__ import annotations

import attrs
import pytest
import torch
from accuracy_cases import allowed, arguments_of, cases, exactly, finite

from codalang.ir.epilogue import Epilogue
from codalang.lower import run
from codalang.lower.accuracy import ACCURACY
from codalang.lower.spec import KernelSpec
from codalang.parser import parse

COLUMNS = 1000


def epilogue_of(op: str, exponent: float | None, precise: bool) -> Epilogue:
    """The function of a tile, stored in f32."""
    call = "1 / x" if op == "div" else f"{op}(x)" if exponent is None else f"{op}(x, {exponent})"
    epilogue = parse(f"epilogue f(x: tile[M, N]) {{ store y: tile[M, N]: f32 = {call} }}").epilogues["f"]
    return attrs.evolve(epilogue, precise=precise)


def kernels_needed(items: list[pytest.Item]) -> list[KernelSpec]:
    """See conftest."""
    choices = [item.callspec.params for item in items if hasattr(item, "callspec")]
    epilogues = [epilogue_of(c["op"], c["exponent"], c["precise"]) for c in choices]
    return [KernelSpec(e, None, ("f32",), ("f32",), None) for e in epilogues]


@pytest.mark.parametrize("precise", [False, True], ids=["fast", "precise"])
@pytest.mark.parametrize(("op", "exponent"), cases())
def test_a_kernel_is_within_the_bounds(op: str, exponent: float | None, precise: bool) -> None:
    x = arguments_of(op)
    truth = exactly(op, x, exponent)
    kernel = run.hosted(epilogue_of(op, exponent, precise), {"x": x.view(-1, COLUMNS).cuda()})
    got = kernel["y"].cpu().view(-1).double()
    accuracy = ACCURACY[op]
    error = (got - truth).abs() / allowed(accuracy.precise if precise else accuracy.fast, x.double(), truth)
    error = torch.where(finite(op, truth), error, 0.0)
    worst = int(error.argmax())
    assert error.max() <= 1, f"{op}({x[worst]}): {error.max():.3g} times what is allowed"
