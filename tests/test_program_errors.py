"""What people are told about wrong programs: every message, to the letter.

Each case of the golden file is followed by EPILOGUES, which it applies.
"""

from __future__ import annotations

import golden_cases
import pytest

from codalang.errors import CodaError, Source
from codalang.parser import parse

EPILOGUES = """
epilogue norm(acc: tile[M, N], res: tile[M, N], g: row[N]) {
    let x = acc + res
    store x: tile[M, N]
    store h: tile[M, N] = x * g
    reduce ss: col[M] = sum(x * x)
}

epilogue scale(acc: tile[M, N], r: col[M]) {
    store y: tile[M, N] = acc * r
}

epilogue glu(acc: tile[M, N], r: col[M]) {
    let (gate, up) = split(acc * r)
    store y: tile[M, N/2] = gate * sigmoid(gate) * up
}

epilogue shift(acc: tile[M, N], by: scalar, count: scalar: i32, on: scalar: bool, target: col[M]: i64) {
    store y: tile[M, N] = where(on and target == count, acc + by, acc)
}

epilogue outer(a: col[M], b: row[N]) {
    store y: tile[M, N] = a * b
}

epilogue every(acc: tile[M, N], gate: row[B, N]) {
    store y: tile[M, N] = acc * gate
}

epilogue spread(a: scalar) {
    store y: tile[M, N] = a
}

epilogue tanh(acc: tile[M, N]) {
    store y: tile[M, N] = tanh(acc)
}

fn half(x) = x / 2

fn both(x) = (x, x)

program mlp(x: [T, D], w: [2, F, D], v: [D, F], eps: scalar = 1e-5) {
    y = x @ w.T
    r = half(eps)
    return (y, r)
}
"""


def message(text: str) -> str:
    """The error of a wrong program, with its class."""
    with pytest.raises(CodaError) as caught:
        parse(text + EPILOGUES)
    return f"{type(caught.value).__name__}: {caught.value}\n"


@pytest.mark.parametrize("name", golden_cases.load("program_errors.txt"))
def test_message(name: str) -> None:
    golden_cases.check("program_errors.txt", name, message)


def test_every_message_points_into_the_program() -> None:
    for name, (text, _) in golden_cases.load("program_errors.txt").items():
        whole = text + EPILOGUES
        with pytest.raises(CodaError) as caught:
            parse(Source("file.coda", whole))
        assert caught.value.loc is not None, name
        assert caught.value.loc.line <= text.count("\n") + 1, name
        for loc in (caught.value.loc, *(loc for loc, _ in caught.value.notes)):
            line = whole.split("\n")[loc.line - 1]
            assert 1 <= loc.column < loc.end_column <= len(line) + 2, name
