"""Common factors are taken out of sums: the same maths, by fewer operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import JUMPS, epilogues, extents, fitted, inputs_for

from codalang.ir import reference
from codalang.ir.epilogue import Epilogue
from codalang.ir.printer import print_epilogue
from codalang.ir.simplify import simplify
from codalang.ir.verify import verify
from codalang.lower.factor import factored
from codalang.parser import parse


def body(expression: str) -> str:
    """What is computed for an expression of three tiles."""
    text = f"epilogue e(a: tile[M, N], b: tile[M, N], c: tile[M, N]) {{\n    store y: tile[M, N] = {expression}\n}}"
    result = factored(simplify(parse(text).epilogues["e"]))
    verify(result)
    return print_epilogue(result).split("tile[M, N] = ")[1].split("\n")[0]


@pytest.mark.parametrize(
    ("expression", "becomes"),
    [
        ("a*b*c + b*2*a", "(c + 2) * a * b"),
        ("a*b*c + a*2*b*c*c", "(2 * c * c + c) * a * b"),
        ("a*b + a*c", "a * b + a * c"),
        ("a*b + c", "a * b + c"),
    ],
)
def test_factors(expression: str, becomes: str) -> None:
    assert body(expression) == becomes


def test_a_product_that_is_there_anyway_stays() -> None:
    text = """
        epilogue e(g: tile[M, N], t: tile[M, N]) {
            let s = sigmoid(g)
            store d: tile[M, N] = t*g*s*(1 - s) + t*s
            store h: tile[M, N] = g*s
        }"""
    result = factored(simplify(parse(text).epilogues["e"]))
    assert sum(n.op == "mul" for n in result.nodes) == 3


@given(epilogues(without=JUMPS), extents, st.integers(0, 2**31))
def test_values_stay(epilogue: Epilogue, size: tuple[int, int, int], seed: int) -> None:
    """But for rounding, which may decide what jumps: two sums that are equal compare as they are rounded."""
    size = fitted(epilogue, size)
    result = factored(simplify(epilogue))
    verify(result)
    inputs = inputs_for(epilogue, size, seed)
    want = reference.run(epilogue, inputs, extents=size)
    got = reference.run(result, inputs, extents=size)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-6)
