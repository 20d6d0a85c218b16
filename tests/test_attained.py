"""An index is judged by the value that stands at it."""

from __future__ import annotations

import math

import pytest
import torch

from codalang.ir import reference
from codalang.ir.attained import attained, is_index
from codalang.parser import parse

PROGRAM = """
epilogue f(acc: tile[M, N], at: row[N]) {
    let x = acc * at
    state (v, i): col[M] = argmax(x, col_index())
    state (w, j): row[N] = argmax(x, row_index())
    state (u, row, column): scalar = argmax2(x, row_index(), col_index())
    reduce total: col[M] = sum(x)
}
"""
OF = {"i": "v", "j": "w", "row": "u", "column": "u"}


@pytest.fixture
def found() -> tuple:
    epilogue = parse(PROGRAM).epilogues["f"]
    inputs = {"acc": torch.randn(5, 8, dtype=torch.float64), "at": torch.rand(8, dtype=torch.float64) + 0.5}
    return epilogue, inputs, reference.run(epilogue, inputs)


def test_right_indices_attain_their_maxima(found: tuple) -> None:
    epilogue, inputs, results = found
    assert {o.name for o in epilogue.outputs if is_index(o)} == set(OF)
    for output in filter(is_index, epilogue.outputs):
        assert torch.equal(attained(epilogue, output, inputs, results), results[OF[output.name]])


def test_other_indices_attain_what_stands_there(found: tuple) -> None:
    epilogue, inputs, results = found
    x = inputs["acc"] * inputs["at"]
    outputs = {o.name: o for o in epilogue.outputs}
    wrong = results | {"i": torch.zeros(5, dtype=torch.int32), "row": torch.tensor(2), "column": torch.tensor(3)}
    assert torch.equal(attained(epilogue, outputs["i"], inputs, wrong), x[:, 0])
    assert attained(epilogue, outputs["row"], inputs, wrong) == x[2, 3]
    alone = {"j": torch.full((8,), 7)}
    assert attained(epilogue, outputs["j"], inputs, alone).tolist() == [-math.inf] * 8
