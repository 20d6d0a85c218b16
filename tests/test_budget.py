"""A budget of memory trades bytes kept for bytes moved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import autograd, derived
from strategies import cotangents_for, epilogues, extents, fitted, inputs_for

from codalang.autodiff import derive
from codalang.errors import CodaUnsupportedError
from codalang.ir.epilogue import Epilogue
from codalang.parser import parse

PRODUCT = parse("""
epilogue product(a: tile[M, N], b: tile[M, N], c: tile[M, N]) {
    store y: tile[M, N] = sin(a + b + c)
}
""").epilogues["product"]
ROOTED = parse("""
epilogue rooted(acc: tile[M, N], res: tile[M, N]) {
    store y: tile[M, N] = sigmoid(acc) * sin(res)
}
""").epilogues["rooted"]


def kept_bytes(epilogue: Epilogue, **options: object) -> float:
    """Bytes per element that the forward stores for the backward alone."""
    return float(2 * sum(d.store for d in derive(epilogue, **options).plan))


def test_what_moves_less_is_saved_unless_memory_is_short() -> None:
    """The sum is three loads, or a store and a load; hosted, what it is made of is there anyway."""
    free, tight = derive(PRODUCT, hosted=True), derive(PRODUCT, hosted=True, budget=0)
    assert kept_bytes(PRODUCT, hosted=True) == 2 and len(free.saved) == 1
    assert kept_bytes(PRODUCT, hosted=True, budget=0) == 0 and not tight.saved
    assert derive(PRODUCT, hosted=True, budget=2) == free
    moved = [sum(d.load + d.store for d in derivative.plan) for derivative in (free, tight)]
    assert moved[0] < moved[1]


def test_a_matmul_is_not_computed_again() -> None:
    assert derive(ROOTED, budget=2) == derive(ROOTED)
    with pytest.raises(CodaUnsupportedError, match=r"keeps 2 bytes per element at the least, .* budget of 1") as caught:
        derive(ROOTED, budget=1)
    assert caught.value.hint


@given(epilogues(), extents, st.integers(0, 1000), st.booleans())
def test_a_budget_is_kept_and_gradients_stay(
    epilogue: Epilogue, size: tuple[int, int], seed: int, hosted: bool
) -> None:
    """Half of what is kept at best, where that can be."""
    size = fitted(epilogue, size)
    most = kept_bytes(epilogue, hosted=hosted)
    try:
        derivative = derive(epilogue, hosted=hosted, budget=most / 2)
    except CodaUnsupportedError:
        assert most > 0
        derivative = derive(epilogue, hosted=hosted, budget=most)
    assert 2 * sum(d.store for d in derivative.plan) <= most
    inputs, cotangents = inputs_for(epilogue, size, seed), cotangents_for(epilogue, size, seed)
    found, wanted = derived(derivative, inputs, cotangents, size), autograd(epilogue, inputs, cotangents, size)
    for name, value in found.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-6, equal_nan=True)
